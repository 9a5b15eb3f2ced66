// What a row's result may not depend on: the other rows, the threads, the layout.
#include "kit/checks.h"
#include "kit/sequences.h"

namespace graft::conformance {
namespace {

// To the last bit where the mixer says so, else up to rounding.
void compare(const Context& context, std::uint64_t cap, const Tensor& got, const Tensor& expected,
             std::int64_t tokens, const std::string& what) {
  if (context.has(cap)) return check_equal(got, expected, what);
  check_close(got, expected, context.tolerance * tolerance(got.dtype(), tokens), what);
}

void batch(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  constexpr std::int64_t kTokens = 69;
  const MixerInputs in = mixer.random_inputs(3, kTokens, dtype, random);
  const MixerOutputs together = mixer.forward(in);
  for (std::int64_t b = 0; b < 3; ++b) {
    MixerInputs alone;
    alone.x = row(in.x, b);
    alone.params = copies(in.params);
    const MixerOutputs out = mixer.forward(alone);
    compare(context, GRAFT_CAP_BATCH_INVARIANT, row(together.y, b), out.y, kTokens,
            sdk::cat("y of row ", b, " among 3 and alone"));
    for (std::size_t i = 0; i < out.state.size(); ++i) {
      compare(context, GRAFT_CAP_BATCH_INVARIANT, row(together.state[i], b), out.state[i], kTokens,
              sdk::cat("state ", i, " of row ", b, " among 3 and alone"));
    }
  }
}

void threads(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(3, 69, dtype, random);
  in.flags = context.has(GRAFT_CAP_BACKWARD) ? GRAFT_X_TRAINING : 0;
  Cotangents from;
  from.dy = Tensor(dtype, in.x.shape(), random.normals(in.x.size()));
  const auto run = [&](int count) {
    context.library.host().set_threads(count);
    MixerOutputs out = mixer.forward(in);
    Gradients gradients;
    if (in.flags != 0) gradients = mixer.backward(in, out, from);
    context.library.host().set_threads(1);
    return std::pair(std::move(out), std::move(gradients));
  };
  const auto [one, one_gradients] = run(1);
  const auto [three, three_gradients] = run(3);
  compare(context, GRAFT_CAP_THREAD_INVARIANT, three.y, one.y, 69, "y with 3 threads and with 1");
  if (!one_gradients.dx.there()) return;
  compare(context, GRAFT_CAP_THREAD_INVARIANT, three_gradients.dx, one_gradients.dx, 69,
          "dx with 3 threads and with 1");
  for (std::size_t i = 0; i < one_gradients.dparams.size(); ++i) {
    if (!one_gradients.dparams[i].there()) continue;
    compare(context, GRAFT_CAP_THREAD_INVARIANT, three_gradients.dparams[i],
            one_gradients.dparams[i], 69,
            sdk::cat("the gradient of '", mixer.specs()[i]->name, "' with 3 threads and with 1"));
  }
}

void strides(Context& context) {
  if (!context.has(GRAFT_CAP_STRIDED)) skip("takes contiguous inputs only (GRAFT_CAP_STRIDED)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const MixerInputs in = mixer.random_inputs(2, 33, dtype, random);
  const MixerOutputs plain = mixer.forward(in);
  // x as a window of a wider tensor whose first two axes are swapped: strides (wide, 2 * wide, 1).
  const std::int64_t model = mixer.layer().info.model_dim, wide = model + 5;
  Tensor wider(dtype, {33, 2, wide});
  for (std::int64_t t = 0; t < 33; ++t) {
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t c = 0; c < model; ++c)
        wider.set((t * 2 + b) * wide + c, in.x.at((b * 33 + t) * model + c));
    }
  }
  const Plan sizes = mixer.plan(2, 33, dtype);
  MixerOutputs out = mixer.allocate(in, sizes);
  Mixer::Call call;
  mixer.fill(call, in, out, sizes, sizes.workspace_forward);
  std::int64_t shape[] = {2, 33, model}, stride[] = {wide, 2 * wide, 1};
  DLTensor view = *wider.c();
  view.shape = shape;
  view.strides = stride;
  call.args.x = &view;
  must(mixer.try_forward(call), "forward of an x with strides");
  const double allowed = context.tolerance * tolerance(dtype, 33);
  check_close(out.y, plain.y, allowed, "y of an x with strides and of its contiguous copy");
}

}  // namespace

std::vector<Test> invariance_tests() {
  return {
      {"invariance.batch", Kind::mixer, "A row is the same alone and among others.", batch},
      {"invariance.threads", Kind::mixer,
       "Results do not depend on the number of threads the host has.", threads},
      {"invariance.strides", Kind::mixer, "An x with strides gives what its contiguous copy gives.",
       strides},
  };
}

}  // namespace graft::conformance
