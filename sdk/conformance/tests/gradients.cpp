// The backward pass against differences of the forward pass, and its contract.
#include <algorithm>
#include <cmath>

#include "kit/checks.h"
#include "kit/sequences.h"

namespace graft::conformance {
namespace {

void need_backward(const Context& context) {
  if (!context.has(GRAFT_CAP_BACKWARD)) skip("does not train (GRAFT_CAP_BACKWARD)");
}

double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) sum += a.at(i) * b.at(i);
  return sum;
}

Tensor like(const Tensor& tensor, Random& random) {
  return Tensor(tensor.dtype(), tensor.shape(), random.normals(tensor.size()));
}

Tensor zeros(const Tensor& tensor) {
  Tensor out(tensor.dtype(), tensor.shape());
  out.fill(0);
  return out;
}

// One backward to be proved: inputs, and the gradients that come in from each kind of output.
struct Problem {
  MixerInputs in;
  Cotangents from;

  // What the gradients are gradients of.
  double loss(Mixer& mixer) const {
    const MixerOutputs out = mixer.forward(in);
    double sum = dot(out.y, from.dy);
    for (std::size_t i = 0; i < from.dstate.size(); ++i) {
      if (from.dstate[i].there()) sum += dot(out.state[i], from.dstate[i]);
    }
    for (std::size_t i = 0; i < from.dtaps.size(); ++i) {
      if (from.dtaps[i].there()) sum += dot(out.taps[i], from.dtaps[i]);
    }
    return sum;
  }
};

struct Through {
  bool y = true, state_out = false, taps = false, state_in = false;
};

Problem make(Mixer& mixer, std::int64_t length, DLDataType dtype, Random& random, Through through) {
  Problem out;
  out.in = mixer.random_inputs(2, length, dtype, random);
  if (through.state_in) {
    // A state of the kind that comes up, not any numbers.
    out.in.state = mixer.forward(mixer.random_inputs(2, 9, dtype, random)).state;
  }
  out.in.flags = GRAFT_X_TRAINING;
  const MixerOutputs shapes = mixer.forward(out.in);
  out.from.dy = through.y ? like(shapes.y, random) : zeros(shapes.y);
  for (std::size_t i = 0; through.state_out && i < shapes.state.size(); ++i) {
    out.from.dstate.push_back(shapes.state[i].floating() ? like(shapes.state[i], random)
                                                         : Tensor());
  }
  for (std::size_t i = 0; through.taps && i < shapes.taps.size(); ++i) {
    out.from.dtaps.push_back(shapes.taps[i].floating() ? like(shapes.taps[i], random) : Tensor());
  }
  return out;
}

// How the difference quotient is taken, and how exact it can be.
struct Step {
  double size, allowed;
};
Step step_for(DLDataType dtype) {
  return sdk::same_dtype(dtype, sdk::float64) ? Step{kDifferenceStep, kDifferenceTolerance}
                                              : Step{1e-2, 2e-2};
}

// loss_at'(0) from two central differences, extrapolated: what is left is of the fourth order in
// the step. The plain difference takes a sharp bend, as that of the norm of a small vector, for a
// wrong gradient.
template <class LossAt>
double difference_quotient(const LossAt& loss_at, double step) {
  const auto central = [&](double h) { return (loss_at(h) - loss_at(-h)) / (2 * h); };
  return (4 * central(step / 2) - central(step)) / 3;
}

// d loss along a random direction of `input`, by the gradient and by differences.
void check_direction(Context& context, Mixer& mixer, const Problem& problem, Tensor& input,
                     const Tensor& gradient, Random& random, const std::string& what) {
  const Step step = step_for(problem.in.x.dtype());
  const Tensor direction = like(input, random);
  const Tensor at = input.copy();
  const auto loss_at = [&](double distance) {
    for (std::int64_t i = 0; i < input.size(); ++i)
      input.set(i, at.at(i) + distance * direction.at(i));
    return problem.loss(mixer);
  };
  const double numeric = difference_quotient(loss_at, step.size);
  input = at.copy();
  const double analytic = dot(gradient, direction);
  // Relative to what the direction could give at most, so that a small product of large vectors
  // does not count as wrong.
  const double size = std::max({std::fabs(numeric), std::sqrt(dot(gradient, gradient)), 1e-3});
  if (!(std::fabs(numeric - analytic) <= context.tolerance * step.allowed * size)) {
    fail("the gradient of ", what, " along a random direction is ", analytic,
         ", by differences of the forward pass ", numeric, " (", step.allowed * size, " allowed)");
  }
}

void check_problem(Context& context, Mixer& mixer, Problem& problem, Random& random,
                   const std::string& what) {
  const Gradients gradients = mixer.backward(problem.in, mixer.forward(problem.in), problem.from);
  check_direction(context, mixer, problem, problem.in.x, gradients.dx, random,
                  sdk::cat("x (", what, ")"));
  for (std::size_t i = 0; i < problem.in.params.size(); ++i) {
    if (!gradients.dparams[i].there()) continue;
    check_direction(context, mixer, problem, problem.in.params[i], gradients.dparams[i], random,
                    sdk::cat("parameter '", mixer.specs()[i]->name, "' (", what, ")"));
  }
  for (std::size_t i = 0; i < gradients.dstate.size(); ++i) {
    if (!gradients.dstate[i].there()) continue;
    check_direction(context, mixer, problem, problem.in.state[i], gradients.dstate[i], random,
                    sdk::cat("state_in ", i, " (", what, ")"));
  }
}

void finite_differences(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const bool states = context.has(GRAFT_CAP_STATEFUL_GRAD);
  if (!states) context.note("without states (GRAFT_CAP_STATEFUL_GRAD)");
  for (const std::int64_t length : {1, 5, 18}) {
    const std::string of = sdk::cat(length, " tokens");
    Problem plain = make(mixer, length, dtype, random, {});
    check_problem(context, mixer, plain, random, of);
    Problem taps = make(mixer, length, dtype, random, {.y = false, .taps = true});
    check_problem(context, mixer, taps, random, of + ", through the taps");
    if (!states) continue;
    Problem all = make(mixer, length, dtype, random, {.state_out = true, .state_in = true});
    check_problem(context, mixer, all, random, of + ", from a state and through the state");
  }
}

// Through each tap alone, the others' gradients NULL.
void taps(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const Plan plan = mixer.plan(2, 18, dtype);
  if (plan.taps.empty()) skip("names no taps");
  for (std::size_t tap = 0; tap < plan.taps.size(); ++tap) {
    Problem problem = make(mixer, 18, dtype, random, {.y = false, .taps = true});
    for (std::size_t i = 0; i < problem.from.dtaps.size(); ++i) {
      if (i != tap) problem.from.dtaps[i] = Tensor();
    }
    check_problem(context, mixer, problem, random,
                  sdk::cat("through the tap '", plan.taps[tap].name, "'"));
  }
}

Tensor widened(const Tensor& tensor) {
  if (!tensor.there() || !tensor.floating()) return tensor.copy();
  return Tensor(sdk::float64, tensor.shape(), tensor.values());
}
std::vector<Tensor> widened(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> out;
  for (const Tensor& tensor : tensors) out.push_back(widened(tensor));
  return out;
}

// The same numbers in float32 and in float64, through everything gradients go through.
void float_32(Context& context) {
  need_backward(context);
  if (!offers(context, sdk::float32)) skip("does not compute in float32");
  if (!offers(context, sdk::float64))
    skip("has no float64 to compare with; gradient.finite_differences takes float32");
  Random random(context.seed);
  Mixer mixer(context);
  const bool states = context.has(GRAFT_CAP_STATEFUL_GRAD);
  for (const std::int64_t length : {1, 18, 129}) {
    const Through all{.state_out = states, .taps = true, .state_in = states};
    const Problem narrow = make(mixer, length, sdk::float32, random, all);
    Problem wide;
    wide.in.x = widened(narrow.in.x);
    wide.in.params = widened(narrow.in.params);
    wide.in.state = widened(narrow.in.state);
    wide.in.flags = narrow.in.flags;
    wide.from.dy = widened(narrow.from.dy);
    wide.from.dstate = widened(narrow.from.dstate);
    wide.from.dtaps = widened(narrow.from.dtaps);
    const Gradients got = mixer.backward(narrow.in, mixer.forward(narrow.in), narrow.from);
    const Gradients expected = mixer.backward(wide.in, mixer.forward(wide.in), wide.from);
    const double allowed = context.tolerance * gradient_tolerance(sdk::float32, length);
    const std::string of = sdk::cat(" of ", length, " tokens in float32");
    check_close(got.dx, expected.dx, allowed, "dx" + of);
    for (std::size_t i = 0; i < got.dparams.size(); ++i) {
      if (got.dparams[i].there())
        check_close(got.dparams[i], expected.dparams[i], allowed,
                    sdk::cat("the gradient of '", mixer.specs()[i]->name, "'", of));
    }
    for (std::size_t i = 0; i < got.dstate.size(); ++i) {
      if (got.dstate[i].there())
        check_close(got.dstate[i], expected.dstate[i], allowed, sdk::cat("dstate_in ", i, of));
    }
  }
}

// Each element of the smallest parameters, which a direction could hide.
void coordinates(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  Problem problem = make(mixer, 7, dtype, random, {});
  const Gradients gradients = mixer.backward(problem.in, mixer.forward(problem.in), problem.from);
  const Step step = step_for(dtype);
  for (std::size_t p = 0; p < problem.in.params.size(); ++p) {
    const Tensor& gradient = gradients.dparams[p];
    if (!gradient.there()) continue;
    Tensor& param = problem.in.params[p];
    const double size = std::max(std::sqrt(dot(gradient, gradient)), 1e-3);
    for (std::int64_t n = 0; n < std::min<std::int64_t>(param.size(), 6); ++n) {
      const std::int64_t i = param.size() <= 6 ? n : random.below(param.size());
      const double at = param.at(i);
      const auto loss_at = [&](double distance) {
        param.set(i, at + distance);
        return problem.loss(mixer);
      };
      const double numeric = difference_quotient(loss_at, step.size);
      param.set(i, at);
      if (!(std::fabs(numeric - gradient.at(i)) <= context.tolerance * step.allowed * size)) {
        fail("the gradient of element ", i, " of parameter '", mixer.specs()[p]->name, "' is ",
             gradient.at(i), ", by differences of the forward pass ", numeric);
      }
    }
  }
}

void accumulate(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  Problem problem = make(mixer, 19, dtype, random, {});
  const MixerOutputs kept = mixer.forward(problem.in);
  const Gradients written = mixer.backward(problem.in, kept, problem.from);
  for (const Tensor& param : problem.in.params)
    problem.from.accumulate_onto.push_back(like(param, random));
  const Gradients added = mixer.backward(problem.in, kept, problem.from);
  const double allowed = context.tolerance * tolerance(dtype, 1);
  check_close(added.dx, written.dx, allowed,
              "dx with GRAFT_X_ACCUMULATE, which is for parameters alone,");
  for (std::size_t i = 0; i < written.dparams.size(); ++i) {
    if (!written.dparams[i].there()) continue;
    Tensor expected = written.dparams[i].copy();
    for (std::int64_t n = 0; n < expected.size(); ++n) {
      expected.set(n, expected.at(n) + problem.from.accumulate_onto[i].at(n));
    }
    check_close(added.dparams[i], expected, allowed,
                sdk::cat("the gradient of '", mixer.specs()[i]->name, "' added to what was there"));
  }
}

void frozen(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  Problem problem = make(mixer, 19, dtype, random, {});
  const MixerOutputs kept = mixer.forward(problem.in);
  const Gradients all = mixer.backward(problem.in, kept, problem.from);
  const double allowed = context.tolerance * tolerance(dtype, 19);
  const auto compare = [&](const Gradients& some, const std::string& when) {
    if (some.dx.there()) check_close(some.dx, all.dx, allowed, "dx " + when);
    for (std::size_t i = 0; i < some.dparams.size(); ++i) {
      if (some.dparams[i].there())
        check_close(some.dparams[i], all.dparams[i], allowed,
                    sdk::cat("the gradient of '", mixer.specs()[i]->name, "' ", when));
    }
  };
  for (const bool even : {true, false}) {
    problem.from.frozen.clear();
    for (std::size_t i = 0; i < mixer.specs().size(); ++i)
      problem.from.frozen.push_back((i % 2 == 0) == even);
    compare(mixer.backward(problem.in, kept, problem.from), "with every other parameter frozen");
  }
  problem.from.frozen.clear();
  problem.from.want_dx = false;
  compare(mixer.backward(problem.in, kept, problem.from), "without dx");
  problem.from.frozen.assign(mixer.specs().size(), true);
  mixer.backward(problem.in, kept, problem.from);
  problem.from.want_dparams = false;
  mixer.backward(problem.in, kept, problem.from);
  problem.from.want_dx = true;
  compare(mixer.backward(problem.in, kept, problem.from),
          "without a list of parameters' gradients");
}

void repeated(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  Problem problem = make(mixer, 33, dtype, random, {});
  const MixerOutputs kept = mixer.forward(problem.in);
  const Gradients first = mixer.backward(problem.in, kept, problem.from);
  // What is saved belongs to its forward, whatever was computed since.
  Problem other = make(mixer, 6, dtype, random, {});
  mixer.backward(other.in, mixer.forward(other.in), other.from);
  const Gradients again = mixer.backward(problem.in, kept, problem.from);
  const double allowed = context.tolerance * tolerance(dtype, 33);
  check_close(again.dx, first.dx, allowed, "dx of the same backward after another forward");
  for (std::size_t i = 0; i < first.dparams.size(); ++i) {
    if (first.dparams[i].there())
      check_close(again.dparams[i], first.dparams[i], allowed,
                  sdk::cat("the gradient of '", mixer.specs()[i]->name,
                           "' of the same backward after another forward"));
  }
}

// A host that keeps its activations on a disk brings them back at other addresses.
void moved(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  Problem problem = make(mixer, 33, dtype, random, {});
  const MixerOutputs kept = mixer.forward(problem.in);
  const Gradients expected = mixer.backward(problem.in, kept, problem.from);
  const MixerOutputs again = mixer.forward(problem.in);
  const MixerInputs elsewhere = problem.in.copy();
  problem.in.x.poison();
  for (Tensor& param : problem.in.params) param.poison();
  const Gradients got = mixer.backward(elsewhere, again, problem.from);
  const double allowed = context.tolerance * tolerance(dtype, 33);
  check_close(got.dx, expected.dx, allowed, "dx of inputs that were moved");
  for (std::size_t i = 0; i < got.dparams.size(); ++i) {
    if (got.dparams[i].there())
      check_close(got.dparams[i], expected.dparams[i], allowed,
                  sdk::cat("the gradient of '", mixer.specs()[i]->name, "' of inputs that moved"));
  }
}

void state_chain(Context& context) {
  need_backward(context);
  if (!context.has(GRAFT_CAP_STATEFUL_GRAD))
    skip("passes no gradient through states (GRAFT_CAP_STATEFUL_GRAD)");
  constexpr std::int64_t kTokens = 40, kFirst = 23;
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  Problem whole = make(mixer, kTokens, dtype, random, {});
  const Gradients expected = mixer.backward(whole.in, mixer.forward(whole.in), whole.from);
  const MixerInputs first = piece(whole.in, 0, kFirst, {});
  const MixerOutputs first_out = mixer.forward(first);
  const MixerInputs second = piece(whole.in, kFirst, kTokens, first_out.state);
  Cotangents of_second, of_first;
  of_second.dy = tokens(whole.from.dy, kFirst, kTokens);
  Gradients late = mixer.backward(second, mixer.forward(second), of_second);
  of_first.dy = tokens(whole.from.dy, 0, kFirst);
  of_first.dstate = std::move(late.dstate);
  // The second piece was computed on the same instance since: a forward of the first again, as a
  // host that recomputes does.
  const Gradients early = mixer.backward(first, mixer.forward(first), of_first);
  const double allowed = context.tolerance * gradient_tolerance(dtype, kTokens);
  check_close(early.dx, tokens(expected.dx, 0, kFirst), allowed,
              "dx of the first of two pieces, chained through the state");
  check_close(late.dx, tokens(expected.dx, kFirst, kTokens), allowed,
              "dx of the second of two pieces");
  for (std::size_t i = 0; i < expected.dparams.size(); ++i) {
    if (!expected.dparams[i].there()) continue;
    Tensor sum = early.dparams[i].copy();
    for (std::int64_t n = 0; n < sum.size(); ++n) sum.set(n, sum.at(n) + late.dparams[i].at(n));
    check_close(sum, expected.dparams[i], allowed,
                sdk::cat("the gradient of '", mixer.specs()[i]->name, "' over two pieces"));
  }
}

void zero_dy(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  Problem problem = make(mixer, 20, dtype, random, {.y = false});
  const Gradients gradients = mixer.backward(problem.in, mixer.forward(problem.in), problem.from);
  const auto all_zero = [](const Tensor& tensor, const std::string& what) {
    for (std::int64_t i = 0; i < tensor.size(); ++i) {
      if (tensor.at(i) != 0) fail(what, " is ", tensor.at(i), " where dy is zero");
    }
  };
  all_zero(gradients.dx, "dx");
  for (std::size_t i = 0; i < gradients.dparams.size(); ++i) {
    if (gradients.dparams[i].there())
      all_zero(gradients.dparams[i], sdk::cat("the gradient of '", mixer.specs()[i]->name, "'"));
  }
}

void sizes(Context& context) {
  need_backward(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  for (const std::int64_t batch : {0, 1, 2}) {
    for (const std::int64_t length : {0, 1, 15, 16, 17, 63, 64, 65, 129}) {
      MixerInputs in = mixer.random_inputs(batch, length, dtype, random);
      in.flags = GRAFT_X_TRAINING;
      Cotangents from;
      from.dy = like(in.x, random);
      const Gradients gradients = mixer.backward(in, mixer.forward(in), from);
      const std::string of = sdk::cat(" of ", batch, " x ", length, " tokens");
      check_finite(gradients.dx, "dx" + of);
      for (std::size_t i = 0; i < gradients.dparams.size(); ++i) {
        const Tensor& gradient = gradients.dparams[i];
        if (!gradient.there()) continue;
        check_finite(gradient, sdk::cat("the gradient of '", mixer.specs()[i]->name, "'", of));
        if (batch * length == 0 && dot(gradient, gradient) != 0)
          fail("the gradient of '", mixer.specs()[i]->name, "'", of, " is not zero");
      }
    }
  }
}

}  // namespace

std::vector<Test> gradient_tests() {
  return {
      {"gradient.finite_differences", Kind::mixer,
       "Gradients of x, parameters and states are the forward pass's, through y, states and taps.",
       finite_differences},
      {"gradient.coordinates", Kind::mixer, "So is each element of a parameter's gradient.",
       coordinates},
      {"gradient.taps", Kind::mixer, "So are the gradients that come through each tap alone.",
       taps},
      {"gradient.float32", Kind::mixer,
       "Gradients in float32 are those in float64 up to rounding, through states and taps too.",
       float_32},
      {"gradient.accumulate", Kind::mixer,
       "GRAFT_X_ACCUMULATE adds to parameters' gradients, and is otherwise without effect.",
       accumulate},
      {"gradient.frozen", Kind::mixer,
       "Gradients that are not wanted change nothing about the others.", frozen},
      {"gradient.repeated", Kind::mixer, "A backward can be run again, after other calls too.",
       repeated},
      {"gradient.moved", Kind::mixer,
       "A backward goes by the numbers of its forward, not by where they lay.", moved},
      {"gradient.state_chain", Kind::mixer,
       "Two pieces chained through the state have the gradients of the whole.", state_chain},
      {"gradient.zero_dy", Kind::mixer, "Where no gradient comes in, none goes out.", zero_dy},
      {"gradient.sizes", Kind::mixer,
       "Any number of rows and tokens, none too, has complete, finite gradients.", sizes},
  };
}

}  // namespace graft::conformance
