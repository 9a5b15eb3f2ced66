#include "kit/initializer.h"

#include <algorithm>
#include <exception>

#include "kit/checks.h"
#include "kit/stand_in.h"

namespace graft::conformance {
namespace {

std::string text(const char* given) { return given == nullptr ? "" : given; }

graft_status say(graft_error* error, graft_status code, const char* where,
                 const std::string& message) {
  return sdk::detail::fill_error(error, code, where, message);
}

graft_named_tensor named(const std::string& name, const std::string& role, const std::string& axes,
                         const std::string& domain, std::int32_t heads, std::int32_t head_dim,
                         Tensor& value) {
  return {sizeof(graft_named_tensor),
          0,
          name.c_str(),
          role.c_str(),
          axes.c_str(),
          domain.c_str(),
          heads,
          head_dim,
          value.c()};
}

std::vector<const graft_named_tensor*> pointers_to(const std::vector<graft_named_tensor>& all) {
  std::vector<const graft_named_tensor*> out;
  for (const graft_named_tensor& one : all) out.push_back(&one);
  return out;
}

std::vector<NamedParameter> parameters_of(const Mixer& mixer, std::vector<Tensor> values) {
  std::vector<NamedParameter> out;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const graft_param_spec& spec = *mixer.specs()[i];
    out.push_back({text(spec.name), text(spec.role), text(spec.axes), text(spec.domain), spec.heads,
                   spec.head_dim, std::move(values[i])});
  }
  return out;
}

Context context_of(const Context& context, const Choice& choice) {
  return {choice.library == nullptr ? context.library : *choice.library,
          choice.component,
          context.settings,
          choice.options,
          context.seed,
          1,
          {}};
}

std::unique_ptr<Mixer> make_mixer(Context& context, const Choice& choice, const Layer& layer) {
  if (!offers(context, sdk::float32)) skip(choice.label, " does not compute in float32");
  if (choice.library == nullptr) return std::make_unique<Mixer>(context, stand_in_mixers(), layer);
  return std::make_unique<Mixer>(context, layer);
}

bool has_role(const std::vector<NamedParameter>& parameters, const graft_role_need& need) {
  return std::ranges::any_of(parameters,
                             [&](const NamedParameter& p) { return p.role == text(need.role); });
}

std::string list_of(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

}  // namespace

// ---------------------------------------------------------------- the instance

Initializer::Initializer(const Library& library, const Component& component,
                         const Options& options) {
  const CompleteConfig config(*component.desc, options);
  must(outcome_of([&](graft_error* e) {
         return library.initializers()->create(component.desc->id, config.c(), &handle_, e);
       }),
       "create");
  if (handle_ == nullptr || handle_->v == nullptr)
    fail("create answers OK and gives no initializer");
}

Initializer::~Initializer() {
  if (handle_ != nullptr) handle_->v->destroy(handle_);
}

std::span<const graft_role_need> Initializer::needs() const {
  if (handle_->v->n_needs > 0 && handle_->v->needs == nullptr)
    fail("announces ", handle_->v->n_needs, " needs and gives none (NULL)");
  return {handle_->v->needs, handle_->v->n_needs};
}

std::span<const graft_calibration_need> Initializer::calibration() const {
  if (handle_->v->n_calibration > 0 && handle_->v->calibration == nullptr)
    fail("announces ", handle_->v->n_calibration, " calibration needs and gives none (NULL)");
  return {handle_->v->calibration, handle_->v->n_calibration};
}

const graft_calibration_need* Initializer::find_signal(std::string_view name) const {
  for (const graft_calibration_need& need : calibration()) {
    if (name == text(need.name)) return &need;
  }
  return nullptr;
}

// ---------------------------------------------------------------- the host's side of a run

// Batches, rewinding and probing. What the host hands out is checked when it ends.
class InitRig::Feed {
 public:
  Feed(InitRig& rig, const Initializer& initializer, std::vector<NamedParameter>& student)
      : rig_(rig), initializer_(initializer), student_(student) {}

  void install(graft_init_args& args) {
    args.n_batches = static_cast<std::uint32_t>(rig_.text_.size());
    args.ctx = this;
    args.next_batch = [](void* ctx, const graft_named_tensor* const** out, std::uint32_t* n,
                         graft_error* error) {
      return guarded(ctx, error, [&](Feed& feed) { return feed.next(out, n, error); });
    };
    args.rewind = [](void* ctx, graft_error* error) {
      return guarded(ctx, error, [](Feed& feed) { return feed.rewind(); });
    };
    args.probe = [](void* ctx, std::uint32_t n, const char* const* taps, const DLTensor** out,
                    graft_error* error) {
      return guarded(ctx, error, [&](Feed& feed) { return feed.probe(n, taps, out, error); });
    };
  }

  // After the run: what a callback could not throw through the plugin.
  void finish() {
    if (failure_) std::rethrow_exception(failure_);
    retire();
  }

  int passes = 0, batches = 0, probes = 0;

 private:
  template <class Work>
  static graft_status guarded(void* ctx, graft_error* error, Work&& work) noexcept {
    Feed& feed = *static_cast<Feed*>(ctx);
    try {
      return work(feed);
    } catch (const std::exception& problem) {
      feed.failure_ = std::current_exception();
      return say(error, GRAFT_INTERNAL, "host", problem.what());
    }
  }

  graft_status next(const graft_named_tensor* const** out, std::uint32_t* n, graft_error* error) {
    const int call = calls_++;
    if (rig_.setup_.next_batch_fails && call >= *rig_.setup_.next_batch_fails)
      return say(error, GRAFT_INTERNAL, "next_batch", kHostFailure);
    retire();
    if (at_ >= rig_.text_.size()) {
      has_batch_ = false;
      return say(error, GRAFT_NOT_FOUND, "next_batch", "the pass is over");
    }
    passes += at_ == 0 ? 1 : 0;
    ++batches;
    current_ = at_++;
    has_batch_ = true;
    offer();
    *out = batch_.pointers.data();
    *n = static_cast<std::uint32_t>(batch_.pointers.size());
    return GRAFT_OK;
  }

  // A signal covers the whole batch or is left out, and is given for max_sequences at the start of
  // a pass, rounded up to batches: as the host does.
  void offer() {
    std::int64_t before = 0;
    for (std::size_t i = 0; i < current_; ++i) before += rig_.setup_.batches[i].first;
    for (const Signal& signal : rig_.text_[current_]) {
      const graft_calibration_need* const need = initializer_.find_signal(signal.name);
      if (need == nullptr ||
          ((need->flags & GRAFT_NEED_REQUIRED) == 0 && !rig_.setup_.optional_signals))
        continue;
      if (need->max_sequences != 0 && before >= need->max_sequences) continue;
      batch_.signals.push_back({&signal, signal.value.copy()});
    }
    static const std::string none;
    for (Offered& one : batch_.signals)
      batch_.c.push_back(named(one.from->name, none, one.from->axes, none, 0, 0, one.value));
    batch_.pointers = pointers_to(batch_.c);
  }

  graft_status rewind() {
    retire();
    at_ = 0;
    has_batch_ = false;
    return GRAFT_OK;
  }

  graft_status probe(std::uint32_t n, const char* const* taps, const DLTensor** out,
                     graft_error* error) {
    if (rig_.setup_.probe_fails) return say(error, GRAFT_INTERNAL, "probe", kHostFailure);
    if (!has_batch_)
      return say(error, GRAFT_FAILED_PRECONDITION, "probe",
                 "there is no current batch; call next_batch() first");
    if (n > 0 && (taps == nullptr || out == nullptr))
      fail("probe() is called without names or room");
    MixerInputs in;
    for (const Signal& signal : rig_.text_[current_]) {
      if (signal.name == GRAFT_SIGNAL_BLOCK_INPUT) in.x = signal.value.copy();
    }
    for (const NamedParameter& parameter : student_) in.params.push_back(parameter.value.copy());
    const Plan plan = rig_.mixer_->plan(in.batch(), in.tokens(), sdk::float32);
    for (std::uint32_t i = 0; i < n; ++i) {
      if (!find_tap(plan, text(taps[i])) && text(taps[i]) != "y")
        return unknown(plan, taps[i], error);
    }
    retire_probe();
    probe_ = std::make_unique<MixerOutputs>(rig_.mixer_->forward(in));
    ++probes;
    for (std::uint32_t i = 0; i < n; ++i) {
      const auto tap = find_tap(plan, text(taps[i]));
      out[i] = tap ? probe_->taps[*tap].c() : probe_->y.c();
    }
    return GRAFT_OK;
  }

  static std::optional<std::size_t> find_tap(const Plan& plan, const std::string& name) {
    for (std::size_t i = 0; i < plan.taps.size(); ++i) {
      if (plan.taps[i].name == name) return i;
    }
    return std::nullopt;
  }

  static graft_status unknown(const Plan& plan, const char* tap, graft_error* error) {
    std::vector<std::string> known;
    for (const Plan::Spec& spec : plan.taps) known.push_back(spec.name);
    return say(error, GRAFT_NOT_FOUND, "probe",
               sdk::cat("the mixer has no tap '", text(tap), "'; it has: ", list_of(known)));
  }

  // What was handed out ends here; it stays where it is, so that a late read is no crash.
  void retire() {
    for (Offered& one : batch_.signals) {
      const std::string& name = one.from->name;
      if (!one.value.intact()) fail("writes past the end (or before the start) of signal ", name);
      if (!one.value.same_bytes(one.from->value)) fail("changes signal ", name);
      if (rig_.setup_.poison_ended) one.value.poison();
    }
    ended_batches_.push_back(std::move(batch_));
    batch_ = {};
    retire_probe();
  }
  void retire_probe() {
    if (probe_ == nullptr) return;
    const auto end = [&](Tensor& tensor) {
      if (!tensor.intact()) fail("writes past the end (or before the start) of what probe() gave");
      if (rig_.setup_.poison_ended) tensor.poison();
    };
    std::ranges::for_each(probe_->taps, end);
    end(probe_->y);
    ended_probes_.push_back(std::move(probe_));
  }

  struct Offered {
    const Signal* from;
    Tensor value;
  };
  // Moved as a whole: what points into it stays good.
  struct Batch {
    std::vector<Offered> signals;
    std::vector<graft_named_tensor> c;
    std::vector<const graft_named_tensor*> pointers;
  };
  InitRig& rig_;
  const Initializer& initializer_;
  std::vector<NamedParameter>& student_;
  std::size_t at_ = 0, current_ = 0;
  bool has_batch_ = false;
  int calls_ = 0;
  Batch batch_;
  std::unique_ptr<MixerOutputs> probe_;
  std::vector<Batch> ended_batches_;
  std::vector<std::unique_ptr<MixerOutputs>> ended_probes_;
  std::exception_ptr failure_;
};

// ---------------------------------------------------------------- a run

InitRig::InitRig(const Context& context, const Choice& mixer, const InitSetup& setup)
    : setup_(setup), mixer_context_(context_of(context, mixer)) {
  mixer_ = make_mixer(mixer_context_, mixer, *setup.layer);
  Random random(setup.seed);
  const Teacher attention(*setup.layer, random);
  const Teacher& teacher = setup.teacher == nullptr ? attention : *setup.teacher;
  if (setup.source != nullptr) {
    Context source_context = context_of(context, *setup.source);
    const auto source = make_mixer(source_context, *setup.source, *setup.layer);
    teacher_ = parameters_of(*source, source->random_params(sdk::float32, random));
  } else {
    for (const NamedParameter& p : teacher.parameters())
      teacher_.push_back({p.name, p.role, p.axes, p.domain, p.heads, p.head_dim, p.value.copy()});
  }
  Random words(setup.seed + 1);
  for (const auto& [sequences, tokens] : setup.batches)
    text_.push_back(teacher.read(sequences, tokens, words));
}

InitRig::~InitRig() = default;

std::string InitRig::missing_role(const Initializer& initializer) const {
  std::vector<std::string> of_teacher, of_student;
  for (const NamedParameter& parameter : teacher_) of_teacher.push_back(parameter.role);
  for (const graft_param_spec* const spec : mixer_->specs()) of_student.push_back(text(spec->role));
  for (const graft_role_need& need : initializer.needs()) {
    const auto& roles = (need.flags & GRAFT_NEED_TEACHER) != 0 ? of_teacher : of_student;
    if ((need.flags & GRAFT_NEED_REQUIRED) == 0 ||
        std::ranges::find(roles, text(need.role)) != roles.end())
      continue;
    return sdk::cat("the ", (need.flags & GRAFT_NEED_TEACHER) != 0 ? "teacher" : "mixer",
                    " has no role ", text(need.role));
  }
  return "";
}

bool InitRig::has_all_teacher_roles(const Initializer& initializer) const {
  return std::ranges::all_of(initializer.needs(), [&](const graft_role_need& need) {
    return (need.flags & GRAFT_NEED_TEACHER) == 0 || has_role(teacher_, need);
  });
}

// graft_named_tensors of parameters, and what they were.
class InitRig::Parameters {
 public:
  Parameters(std::vector<NamedParameter>& all, const std::string& left_out) {
    for (NamedParameter& p : all) {
      if (!left_out.empty() && p.role == left_out) continue;
      parameters_.push_back(&p);
      before_.push_back(p.value.copy());
      c_.push_back(named(p.name, p.role, p.axes, p.domain, p.heads, p.head_dim, p.value));
    }
    pointers_ = pointers_to(c_);
  }

  std::uint32_t size() const { return static_cast<std::uint32_t>(pointers_.size()); }
  const graft_named_tensor* const* data() const { return pointers_.data(); }
  bool changed(std::size_t i) const { return !parameters_[i]->value.same_bytes(before_[i]); }
  const std::string& name(std::size_t i) const { return parameters_[i]->name; }
  void check_intact(const char* whose) const {
    for (const NamedParameter* const p : parameters_) {
      if (!p->value.intact())
        fail("writes past the end (or before the start) of the ", whose, "'s ", p->name);
    }
  }

 private:
  std::vector<NamedParameter*> parameters_;
  std::vector<Tensor> before_;
  std::vector<graft_named_tensor> c_;
  std::vector<const graft_named_tensor*> pointers_;
};

Outcome InitRig::call(Initializer& initializer, Feed& feed, const Parameters& teacher,
                      const Parameters& student, Tensor& marks) {
  graft_init_args args{};
  args.struct_size = sizeof args;
  args.n_teacher = teacher.size();
  args.n_student = student.size();
  args.layer = setup_.layer->c();
  args.teacher = teacher.data();
  args.student = student.data();
  args.student_written = static_cast<std::uint8_t*>(marks.c()->data);
  args.mixer = mixer_->get();
  feed.install(args);
  graft_exec exec{};
  exec.struct_size = sizeof exec;
  exec.device_type = kDLCPU;
  exec.flags = GRAFT_X_DETERMINISTIC;
  exec.seed = setup_.seed;
  exec.offset = static_cast<std::uint64_t>(setup_.layer->info.layer) << 32;
  graft_initializer* const handle = initializer.get();
  return outcome_of([&](graft_error* e) { return handle->v->run(handle, &exec, &args, e); });
}

InitResult InitRig::run(Initializer& initializer) {
  Random random(setup_.seed + 2);
  InitResult result;
  result.start = setup_.random_start ? mixer_->random_params(sdk::float32, random)
                                     : mixer_->default_params(sdk::float32, random);
  std::vector<NamedParameter> params = parameters_of(*mixer_, copies(result.start));
  const Parameters teacher(teacher_, setup_.missing_role), student(params, "");
  Tensor marks(sdk::uint8, {static_cast<std::int64_t>(params.size())});
  marks.fill(0);
  Feed feed(*this, initializer, params);
  result.outcome = call(initializer, feed, teacher, student, marks);
  feed.finish();

  teacher.check_intact("teacher");
  student.check_intact("mixer");
  if (!marks.intact()) fail("writes past the end (or before the start) of student_written");
  for (std::size_t i = 0; i < teacher.size(); ++i) {
    if (teacher.changed(i)) fail("changes the teacher's ", teacher.name(i));
  }
  for (std::size_t i = 0; i < student.size(); ++i) {
    const double mark = marks.at(static_cast<std::int64_t>(i));
    if (result.outcome.ok() && mark != 0 && mark != 1)
      fail("student_written of ", student.name(i), " is ", mark, "; expected 0 or 1");
    if (result.outcome.ok() && mark == 0 && student.changed(i))
      fail("changes the mixer's ", student.name(i), " and does not mark it in student_written");
    result.written.push_back(mark != 0);
    result.student.push_back(std::move(params[i].value));
  }
  result.passes = feed.passes;
  result.batches = feed.batches;
  result.probes = feed.probes;
  return result;
}

Tensor InitRig::forward(const std::vector<Tensor>& params) {
  Random random(setup_.seed + 3);
  MixerInputs in = mixer_->random_inputs(2, 33, sdk::float32, random);
  in.params = copies(params);
  MixerOutputs out = mixer_->forward(in);
  check_finite(out.y, "y of the mixer with these parameters");
  return std::move(out.y);
}

// ---------------------------------------------------------------- what a run takes place on

bool starts_from_attention(const Initializer& initializer, const Layer& layer) {
  Random random(1);
  const Teacher teacher(layer, random);
  return std::ranges::all_of(initializer.needs(), [&](const graft_role_need& need) {
    return (need.flags & GRAFT_NEED_TEACHER) == 0 || (need.flags & GRAFT_NEED_REQUIRED) == 0 ||
           has_role(teacher.parameters(), need);
  });
}

namespace {

// Why an initializer cannot fill `to` from `from` (NULL: attention); "" when nothing is against it.
std::string why_not(const Context& context, const Initializer& initializer, const Choice* from,
                    const Choice& to) {
  InitSetup setup;
  setup.source = from;
  setup.batches = {};
  try {
    return InitRig(context, to, setup).missing_role(initializer);
  } catch (const Skipped& why) {
    return why.what();
  }
}

}  // namespace

Bench::Bench(const Context& context, const Initializer& initializer)
    : neighbours(std::make_shared<Neighbours>(context)), seed(context.seed) {
  std::vector<const Choice*> sources;
  if (starts_from_attention(initializer, small_layer())) {
    sources = {nullptr};
  } else {
    for (const Choice& choice : neighbours->mixers()) sources.push_back(&choice);
  }
  std::string refusal;
  for (const Choice* const from : sources) {
    for (const Choice& to : neighbours->mixers()) {
      refusal = why_not(context, initializer, from, to);
      if (!refusal.empty()) continue;
      mixer = &to;
      source = from;
      return;
    }
  }
  skip("no mixer here has the roles it requires (", refusal,
       "); name the plugin of one with --partner");
}

InitSetup Bench::setup(const Layer& layer) const {
  InitSetup out;
  out.layer = &layer;
  out.seed = seed;
  out.source = source;
  return out;
}

}  // namespace graft::conformance
