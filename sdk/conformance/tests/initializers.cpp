// What holds of an initializer: it fills a mixer from a teacher and from what the teacher does on
// text, and from nothing else.
#include <algorithm>
#include <cmath>
#include <future>
#include <set>

#include "kit/checks.h"
#include "kit/initializer.h"
#include "kit/names.h"

namespace graft::conformance {
namespace {

Initializer make(Context& context, const Options& options) {
  return Initializer(context.library, *context.component, options);
}
Initializer make(Context& context) { return make(context, context.options); }

// A run that has to work.
InitResult run(const Context& context, const Bench& bench, const InitSetup& setup,
               Initializer& initializer) {
  InitRig rig(context, *bench.mixer, setup);
  InitResult result = rig.run(initializer);
  must(result.outcome,
       sdk::cat("run on ", bench.mixer->label, ", layer '", setup.layer->name, "'"));
  return result;
}

void check_finite(const InitResult& result, const std::string& what) {
  for (std::size_t i = 0; i < result.student.size(); ++i)
    check_finite(result.student[i], sdk::cat(what, ", parameter ", i));
}

void check_same(const InitResult& got, const InitResult& expected, const std::string& what) {
  for (std::size_t i = 0; i < expected.student.size(); ++i)
    check_equal(got.student[i], expected.student[i], sdk::cat(what, ", parameter ", i));
  if (got.written != expected.written) fail(what, ": marks other parameters as written");
}

// It may do without, or say why not.
void check_works_or_says_why(const InitResult& result, const std::string& what) {
  if (result.outcome.ok()) return check_finite(result, what);
  if (result.outcome.message.empty())
    fail(what, ": answers with status ", result.outcome.status, " and no message");
}

// ---------------------------------------------------------------- tables

void check_tables(const Initializer& initializer) {
  std::set<std::pair<std::string, std::uint32_t>> roles;
  for (const graft_role_need& need : initializer.needs()) {
    const std::string problem = role_problem(need.role);
    if (!problem.empty()) fail("needs: ", problem);
    if ((need.flags & ~std::uint32_t{GRAFT_NEED_REQUIRED | GRAFT_NEED_TEACHER}) != 0 ||
        need.reserved != 0)
      fail("needs: ", need.role, " has bits set that mean nothing for a role");
    if (!roles.emplace(need.role, need.flags & GRAFT_NEED_TEACHER).second)
      fail("needs: names ", need.role, " of the ",
           (need.flags & GRAFT_NEED_TEACHER) != 0 ? "teacher" : "student", " twice");
  }
  std::set<std::string> signals;
  for (const graft_calibration_need& need : initializer.calibration()) {
    const std::string problem = calibration_signal_problem(need.name);
    if (!problem.empty()) fail("calibration: ", problem);
    if ((need.flags & ~std::uint32_t{GRAFT_NEED_REQUIRED}) != 0)
      fail("calibration: ", need.name, " has bits set that mean nothing for a signal");
    if (!signals.insert(need.name).second) fail("calibration: names ", need.name, " twice");
  }
}

void needs(Context& context) {
  for (const NamedOptions& one : configurations(context.desc(), context.options)) {
    try {
      check_tables(make(context, one.options));
    } catch (const Failed& problem) {
      fail("with ", one.name, ": ", problem.what());
    }
  }
}

void missing_role(Context& context) {
  Initializer initializer = make(context);
  const Bench bench(context, initializer);
  int tried = 0;
  for (const graft_role_need& need : initializer.needs()) {
    if ((need.flags & GRAFT_NEED_TEACHER) == 0 || (need.flags & GRAFT_NEED_REQUIRED) == 0) continue;
    InitSetup setup = bench.setup();
    setup.missing_role = need.role;
    InitRig rig(context, *bench.mixer, setup);
    const Outcome outcome = rig.run(initializer).outcome;
    const std::string what = sdk::cat("without the teacher's ", need.role);
    if (outcome.status != GRAFT_NOT_FOUND && outcome.status != GRAFT_FAILED_PRECONDITION)
      fail(what, ": expected GRAFT_NOT_FOUND or GRAFT_FAILED_PRECONDITION, got ", outcome.text());
    if ((outcome.where + outcome.message).find(need.role) == std::string::npos)
      fail(what, ": the answer does not name the role: ", outcome.text());
    ++tried;
  }
  run(context, bench, bench.setup(), initializer);  // it stays usable
  if (tried == 0) skip("requires no role of the teacher");
}

// ---------------------------------------------------------------- what is written

// That nothing else changes is checked in every run; here, that what is marked was written.
void writes_what_it_marks(Context& context) {
  for (const NamedOptions& one : configurations(context.desc(), context.options)) {
    Initializer initializer = make(context, one.options);
    const Bench bench(context, initializer);
    InitSetup setup = bench.setup();
    const InitResult first = run(context, bench, setup, initializer);
    // From elsewhere: what it sets to the value that was there before shows.
    setup.random_start = true;
    const InitResult second = run(context, bench, setup, initializer);
    for (std::size_t i = 0; i < first.student.size(); ++i) {
      if (!first.written[i] || !first.student[i].same_bytes(first.start[i])) continue;
      if (second.written[i] && second.student[i].same_bytes(second.start[i]))
        fail("with ", one.name, ": marks parameter ", i, " as written and does not write it");
    }
    if (std::ranges::find(first.written, true) == first.written.end())
      fail("with ", one.name, ": writes nothing");
  }
}

void finite(Context& context) {
  for (const NamedOptions& one : configurations(context.desc(), context.options)) {
    Initializer initializer = make(context, one.options);
    const Bench bench(context, initializer);
    InitRig rig(context, *bench.mixer, bench.setup());
    const InitResult result = rig.run(initializer);
    check_works_or_says_why(result, "with " + one.name);
    if (result.outcome.ok()) {
      rig.forward(result.student);
    } else if (one.name == "the defaults") {
      fail("on ", bench.mixer->label, ": ", result.outcome.text());
    } else {
      context.note("with ", one.name, " on ", bench.mixer->label, ": ", result.outcome.text());
    }
  }
}

void deterministic(Context& context) {
  Initializer initializer = make(context), other = make(context);
  const Bench bench(context, initializer);
  const InitResult first = run(context, bench, bench.setup(), initializer);
  check_same(run(context, bench, bench.setup(), initializer), first, "the same run again");
  check_same(run(context, bench, bench.setup(), other), first, "another instance");
  context.note(first.passes, " passes, ", first.batches, " batches, ", first.probes, " probes");
}

// ---------------------------------------------------------------- layers

Layer with_all_kv_heads(const Layer& layer) {
  Layer out = layer;
  out.name += ", not grouped";
  out.info.n_kv_heads = layer.info.n_heads;
  return out;
}

bool same_shapes(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::ranges::equal(a, b, {}, &Tensor::shape, &Tensor::shape);
}

// A block of grouped heads is the same function as one with each key-value head repeated: a mixer
// that has a head of its own for each query comes out the same.
void gqa(Context& context) {
  Initializer initializer = make(context);
  const Bench bench(context, initializer);
  for (const Layer& layer : all_layers()) {
    if (layer.info.n_heads == layer.info.n_kv_heads) continue;
    InitSetup setup = bench.setup(layer);
    Random random(context.seed);
    const Teacher grouped(layer, random);
    setup.teacher = &grouped;
    const InitResult result = run(context, bench, setup, initializer);
    check_finite(result, layer.name);
    if (setup.source != nullptr) continue;
    const Layer wide = with_all_kv_heads(layer);
    const Teacher repeated = grouped.ungrouped(wide);
    setup.layer = &wide;
    setup.teacher = &repeated;
    const InitResult same = run(context, bench, setup, initializer);
    if (!same_shapes(result.student, same.student)) {
      context.note(bench.mixer->label, " shares key-value heads: not compared");
      continue;
    }
    for (std::size_t i = 0; i < same.student.size(); ++i) {
      check_close(result.student[i], same.student[i], context.tolerance * 1e-4,
                  sdk::cat("layer '", layer.name, "', parameter ", i,
                           ", from grouped heads against the same heads repeated"));
    }
  }
}

void layers(Context& context) {
  Initializer one = make(context);
  const Bench bench(context, one);
  std::vector<InitResult> fresh;
  for (const Layer& layer : all_layers()) {
    Initializer own = make(context);
    fresh.push_back(run(context, bench, bench.setup(layer), own));
  }
  // In another order, with one instance.
  for (std::size_t i = fresh.size(); i-- > 0;) {
    check_same(
        run(context, bench, bench.setup(all_layers()[i]), one), fresh[i],
        sdk::cat("an instance that served others before, layer '", all_layers()[i].name, "'"));
  }
  const auto in_a_thread = [&](std::size_t i) {
    Initializer own = make(context);
    return run(context, bench, bench.setup(all_layers()[i]), own);
  };
  std::future<InitResult> first = std::async(std::launch::async, in_a_thread, 0),
                          second = std::async(std::launch::async, in_a_thread, 1);
  check_same(first.get(), fresh[0], "one of two instances at work at once");
  check_same(second.get(), fresh[1], "the other of two instances at work at once");
}

// ---------------------------------------------------------------- calibration

void calibration(Context& context) {
  Initializer initializer = make(context);
  const Bench bench(context, initializer);
  const auto try_setup = [&](const InitSetup& setup, const std::string& what) {
    InitRig rig(context, *bench.mixer, setup);
    const InitResult result = rig.run(initializer);
    check_works_or_says_why(result, what);
    if (!result.outcome.ok()) context.note(what, ": ", result.outcome.text());
    return result.outcome.ok();
  };
  InitSetup setup = bench.setup();
  setup.optional_signals = false;
  if (!try_setup(setup, "without optional signals")) fail("does not work without optional signals");
  setup = bench.setup();
  setup.batches = {};
  try_setup(setup, "without text");
  setup.batches = {{1, 2}};
  try_setup(setup, "on one sequence of two tokens");
  setup.batches = {{1, 16}, {4, 31}, {2, 9}};
  if (!try_setup(setup, "on batches of different sizes"))
    fail("does not work on batches of different sizes");
}

// What a batch or a probe gave lives until the next one.
void lifetimes(Context& context) {
  for (const NamedOptions& one : configurations(context.desc(), context.options)) {
    Initializer initializer = make(context, one.options);
    const Bench bench(context, initializer);
    InitSetup setup = bench.setup();
    InitRig kept(context, *bench.mixer, setup);
    const InitResult expected = kept.run(initializer);
    setup.poison_ended = true;
    InitRig ended(context, *bench.mixer, setup);
    const InitResult got = ended.run(initializer);
    const std::string what = sdk::cat("with ", one.name,
                                      ", what next_batch() and probe() gave being filled with NaN "
                                      "at the next call");
    if (got.outcome.status != expected.outcome.status)
      fail(what, ": reads it later; ", got.outcome.text());
    if (expected.outcome.ok()) check_same(got, expected, what + ": reads it later");
  }
}

// What next_batch() fails with is the initializer's answer too.
void failing_text(Context& context) {
  Initializer initializer = make(context);
  const Bench bench(context, initializer);
  const InitResult whole = run(context, bench, bench.setup(), initializer);
  if (whole.batches == 0) skip("reads no calibration text");
  for (const int call : {0, 1, whole.batches - 1}) {
    InitSetup setup = bench.setup();
    setup.next_batch_fails = call;
    InitRig rig(context, *bench.mixer, setup);
    const Outcome outcome = rig.run(initializer).outcome;
    const std::string what = sdk::cat("with next_batch() failing at call ", call);
    if (outcome.ok()) fail(what, ": answers with OK");
    if (outcome.message.find(kHostFailure) == std::string::npos)
      fail(what, ": its answer does not say what the host said: ", outcome.text());
  }
  check_same(run(context, bench, bench.setup(), initializer), whole, "after failures");
}

void probe_failure(Context& context) {
  Initializer initializer = make(context);
  const Bench bench(context, initializer);
  const InitResult whole = run(context, bench, bench.setup(), initializer);
  if (whole.probes == 0) skip("does not run the mixer with probe()");
  InitSetup setup = bench.setup();
  setup.probe_fails = true;
  InitRig rig(context, *bench.mixer, setup);
  const InitResult result = rig.run(initializer);
  check_works_or_says_why(result, "with probe() failing");
  context.note("with probe() failing: ", result.outcome.ok() ? "works" : result.outcome.text());
  check_same(run(context, bench, bench.setup(), initializer), whole, "after a failure");
}

void stopped(Context& context) {
  Initializer initializer = make(context);
  const Bench bench(context, initializer);
  const InitResult whole = run(context, bench, bench.setup(), initializer);
  InitRig rig(context, *bench.mixer, bench.setup());
  context.library.host().ask_to_stop(true);
  const InitResult result = rig.run(initializer);
  context.library.host().ask_to_stop(false);
  if (result.outcome.ok()) {
    check_same(result, whole, "a run that finishes although it should stop");
  } else if (result.outcome.status != GRAFT_CANCELLED) {
    fail("asked to stop: expected GRAFT_CANCELLED or a finished run, got ", result.outcome.text());
  }
  context.note("asked to stop: ", result.outcome.ok() ? "finishes" : "ends with GRAFT_CANCELLED");
  check_same(run(context, bench, bench.setup(), initializer), whole, "after being stopped");
}

}  // namespace

std::vector<Test> initializer_tests() {
  return {
      {"initializer.needs", Kind::initializer,
       "The tables of roles and signals are well formed, whatever the configuration.", needs},
      {"initializer.missing_role", Kind::initializer,
       "A required role that the teacher lacks is named in the answer.", missing_role},
      {"initializer.writes_what_it_marks", Kind::initializer,
       "The mixer's parameters change exactly where student_written says so, and nothing else "
       "does.",
       writes_what_it_marks},
      {"initializer.finite", Kind::initializer,
       "Each configuration leaves finite parameters, with which the mixer runs.", finite},
      {"initializer.deterministic", Kind::initializer,
       "The same run gives the same bytes, in any instance.", deterministic},
      {"initializer.gqa", Kind::initializer,
       "A teacher with fewer key-value heads is served, each head going to its queries.", gqa},
      {"initializer.layers", Kind::initializer,
       "One instance serves layers one after the other, two serve two at once.", layers},
      {"initializer.calibration", Kind::initializer,
       "Text of any size, and no more than the required signals, is enough or refused in words.",
       calibration},
      {"initializer.signal_lifetime", Kind::initializer,
       "Nothing of a batch or a probe is read after the next one.", lifetimes},
      {"initializer.next_batch_failure", Kind::initializer,
       "A failure of next_batch() is passed on with its words.", failing_text},
      {"initializer.probe_failure", Kind::initializer,
       "A failure of probe() is handled or passed on.", probe_failure},
      {"initializer.should_stop", Kind::initializer,
       "A run that should stop is cancelled or finished, and the instance stays usable.", stopped},
  };
}

}  // namespace graft::conformance
