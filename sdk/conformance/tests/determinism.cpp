// The same call, the same bytes.
#include "kit/checks.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

constexpr int kRuns = 20;

void check_same(const MixerOutputs& got, const MixerOutputs& first, const std::string& run) {
  check_equal(got.y, first.y, run + ", y");
  for (std::size_t i = 0; i < first.state.size(); ++i)
    check_equal(got.state[i], first.state[i], sdk::cat(run, ", state ", i));
}

void check_runs(Context& context, DLDataType dtype) {
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 67, dtype, random);
  const bool trains = context.has(GRAFT_CAP_BACKWARD);
  in.flags = GRAFT_X_DETERMINISTIC | (trains ? GRAFT_X_TRAINING : 0);
  context.library.host().set_threads(2);
  Cotangents from;
  from.dy = Tensor(dtype, in.x.shape(), random.normals(in.x.size()));
  const MixerOutputs first = mixer.forward(in);
  Gradients first_gradients;
  if (trains) first_gradients = mixer.backward(in, first, from);
  for (int n = 1; n < kRuns; ++n) {
    const std::string run = sdk::cat("run ", n + 1);
    // What changes with every other call shows only when the calls are not of a period themselves.
    if (n % 3 == 0) mixer.forward(in);
    const MixerOutputs again = mixer.forward(in);
    check_same(again, first, run);
    if (!trains) continue;
    const Gradients gradients = mixer.backward(in, again, from);
    check_equal(gradients.dx, first_gradients.dx, run + ", dx");
    for (std::size_t i = 0; i < gradients.dparams.size(); ++i) {
      if (gradients.dparams[i].there()) {
        check_equal(gradients.dparams[i], first_gradients.dparams[i],
                    sdk::cat(run, ", the gradient of '", mixer.specs()[i]->name, "'"));
      }
    }
  }
}

// The type in use, and the one in which no rounding hides another order of additions.
void runs(Context& context) {
  if (!context.has(GRAFT_CAP_DETERMINISTIC)) skip("does not promise it (GRAFT_CAP_DETERMINISTIC)");
  const DLDataType exact = exact_dtype(context);
  if (!sdk::same_dtype(exact, sdk::float32) && offers(context, sdk::float32)) {
    check_runs(context, sdk::float32);
  }
  check_runs(context, exact);
}

void seed(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 20, dtype, random);
  in.flags = GRAFT_X_TRAINING;
  if (!context.has(GRAFT_CAP_BACKWARD)) in.flags = 0;
  check_close(mixer.forward(in).y, mixer.forward(in).y, context.tolerance * tolerance(dtype, 20),
              "y of two calls with one seed");
  // Another offset may give other numbers, and does where the mixer draws any.
  const Plan sizes = mixer.plan(2, 20, dtype, in.flags);
  MixerOutputs out = mixer.allocate(in, sizes);
  Mixer::Call call;
  mixer.fill(call, in, out, sizes, sizes.workspace_forward);
  call.exec.offset = std::uint64_t{1} << 32;
  must(mixer.try_forward(call), "forward at another offset");
  check_finite(out.y, "y at another offset");
  context.note("another offset gives ",
               out.y.same_bytes(mixer.forward(in).y) ? "the same" : "other", " numbers");
}

}  // namespace

std::vector<Test> determinism_tests() {
  return {
      {"determinism.runs", Kind::mixer, "With GRAFT_X_DETERMINISTIC, 20 runs give the same bytes.",
       runs},
      {"determinism.seed", Kind::mixer, "One seed and offset give one result, in training too.",
       seed},
  };
}

}  // namespace graft::conformance
