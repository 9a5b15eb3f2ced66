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
    for (std::size_t i = 0; i < out.taps.size(); ++i) {
      compare(context, GRAFT_CAP_BATCH_INVARIANT, row(together.taps[i], b), out.taps[i], kTokens,
              sdk::cat("tap ", i, " of row ", b, " among 3 and alone"));
    }
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

// The numbers of `tensor` [B,T,width] as a window of a wider one whose first two axes are swapped:
// strides (wide, B * wide, 1).
struct Window {
  Tensor memory;
  std::int64_t shape[3], strides[3];
  DLTensor view;

  explicit Window(const Tensor& tensor) {
    const std::int64_t batch = tensor.shape()[0], length = tensor.shape()[1],
                       width = tensor.shape()[2], wide = width + 5;
    memory = Tensor(tensor.dtype(), {length, batch, wide});
    for (std::int64_t i = 0; i < tensor.size(); ++i) {
      const std::int64_t b = i / (length * width), t = i / width % length;
      memory.set((t * batch + b) * wide + i % width, tensor.at(i));
    }
    for (int axis = 0; axis < 3; ++axis)
      shape[axis] = tensor.shape()[static_cast<std::size_t>(axis)];
    strides[0] = wide;
    strides[1] = batch * wide;
    strides[2] = 1;
    view = *memory.c();
    view.shape = shape;
    view.strides = strides;
  }
  Window(const Window&) = delete;
};

void strides(Context& context) {
  if (!context.has(GRAFT_CAP_STRIDED)) skip("takes contiguous inputs only (GRAFT_CAP_STRIDED)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 33, dtype, random);
  const MixerOutputs plain = mixer.forward(in);
  const Window window(in.x);
  in.x_view = &window.view;
  const double allowed = context.tolerance * tolerance(dtype, 33);
  check_close(mixer.forward(in).y, plain.y, allowed,
              "y of an x with strides and of its contiguous copy");
}

// A dy of stride 0 is what the gradient of a mean looks like in some frameworks.
void strided_gradients(Context& context) {
  if (!context.has(GRAFT_CAP_STRIDED)) skip("takes contiguous inputs only (GRAFT_CAP_STRIDED)");
  if (!context.has(GRAFT_CAP_BACKWARD)) skip("does not train (GRAFT_CAP_BACKWARD)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 33, dtype, random);
  in.flags = GRAFT_X_TRAINING;
  Cotangents from, of_ones;
  from.dy = Tensor(dtype, in.x.shape(), random.normals(in.x.size()));
  of_ones.dy = Tensor(dtype, in.x.shape());
  of_ones.dy.fill(1);
  const double allowed = context.tolerance * gradient_tolerance(dtype, 33);
  const auto run = [&](const Cotangents& cotangents) {
    return mixer.backward(in, mixer.forward(in), cotangents);
  };
  const auto compare = [&](const Gradients& got, const Gradients& expected, const std::string& of) {
    check_close(got.dx, expected.dx, allowed, "dx of " + of);
    for (std::size_t i = 0; i < got.dparams.size(); ++i) {
      if (!got.dparams[i].there()) continue;
      check_close(got.dparams[i], expected.dparams[i], allowed,
                  sdk::cat("the gradient of '", mixer.specs()[i]->name, "' of ", of));
    }
  };
  const Gradients expected = run(from), expected_of_ones = run(of_ones);
  std::int64_t none[] = {0, 0, 0};
  DLTensor one = *of_ones.dy.c();
  one.strides = none;
  of_ones.dy_view = &one;
  compare(run(of_ones), expected_of_ones, "a dy of stride 0");
  const Window x(in.x), dy(from.dy);
  in.x_view = &x.view;
  from.dy_view = &dy.view;
  compare(run(from), expected, "an x and a dy with strides");
}

}  // namespace

std::vector<Test> invariance_tests() {
  return {
      {"invariance.batch", Kind::mixer, "A row is the same alone and among others.", batch},
      {"invariance.threads", Kind::mixer,
       "Results do not depend on the number of threads the host has.", threads},
      {"invariance.strides", Kind::mixer, "An x with strides gives what its contiguous copy gives.",
       strides},
      {"invariance.strided_gradients", Kind::mixer,
       "An x and a dy with strides, 0 among them, have the gradients of their contiguous copies.",
       strided_gradients},
  };
}

}  // namespace graft::conformance
