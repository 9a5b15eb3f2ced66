// What a host may do with states: keep, move, reorder, update in place.
#include <algorithm>
#include <cmath>

#include "kit/checks.h"
#include "kit/sequences.h"

namespace graft::conformance {
namespace {

void need_state(const Context& context) {
  if (!context.has(GRAFT_CAP_STATE_IO)) skip("does not go on from states (GRAFT_CAP_STATE_IO)");
}

void other_instance(Context& context) {
  need_state(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer one(context), other(context);
  const MixerInputs in = one.random_inputs(2, 40, dtype, random);
  const MixerOutputs first = one.forward(piece(in, 0, 25, {}));
  const MixerOutputs same = one.forward(piece(in, 25, 40, first.state));
  const MixerOutputs moved = other.forward(piece(in, 25, 40, first.state));
  check_equal(moved.y, same.y, "y from a state that another instance made");
  for (std::size_t i = 0; i < same.state.size(); ++i) {
    check_equal(moved.state[i], same.state[i],
                sdk::cat("state ", i, " from a state that another instance made"));
  }
}

void in_place(Context& context) {
  need_state(context);
  if (!context.has(GRAFT_CAP_STEP)) skip("does not decode step by step (GRAFT_CAP_STEP)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const MixerInputs in = mixer.random_inputs(2, 21, dtype, random);
  const MixerOutputs before = mixer.forward(piece(in, 0, 20, {}));
  const MixerInputs last = piece(in, 20, 21, before.state);
  const MixerOutputs apart = mixer.step(last);
  const Plan sizes = mixer.plan(2, 1, dtype, last.flags);
  MixerOutputs together = mixer.allocate(last, sizes);
  together.state = copies(last.state);
  Mixer::Call call;
  mixer.fill(call, last, together, sizes, sizes.workspace_step);
  std::copy(call.state_out.begin(), call.state_out.end(), call.state_in.begin());
  must(outcome_of([&](graft_error* e) {
         return mixer.get()->v->step(mixer.get(), &call.exec, &call.args, e);
       }),
       "step in place");
  check_equal(together.y, apart.y, "y of a step whose state_out is its state_in");
  for (std::size_t i = 0; i < apart.state.size(); ++i) {
    check_equal(together.state[i], apart.state[i], sdk::cat("state ", i, " updated in place"));
  }
}

// The rows of a tensor in another order.
Tensor reversed(const Tensor& tensor) {
  Tensor out = tensor.copy();
  const std::int64_t rows = tensor.shape()[0], per_row = tensor.size() / rows;
  for (std::int64_t b = 0; b < rows; ++b) {
    for (std::int64_t i = 0; i < per_row; ++i)
      out.set(b * per_row + i, tensor.at((rows - 1 - b) * per_row + i));
  }
  return out;
}

void batch_order(Context& context) {
  need_state(context);
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const MixerInputs in = mixer.random_inputs(3, 30, dtype, random);
  const MixerOutputs before = mixer.forward(piece(in, 0, 20, {}));
  const MixerInputs rest = piece(in, 20, 30, before.state);
  MixerInputs turned = rest.copy();
  turned.x = reversed(rest.x);
  for (Tensor& state : turned.state) state = reversed(state);
  const MixerOutputs straight = mixer.forward(rest), swapped = mixer.forward(turned);
  const double allowed = context.tolerance * tolerance(dtype, 30);
  check_close(swapped.y, reversed(straight.y), allowed, "y of a batch whose rows were reordered");
  for (std::size_t i = 0; i < straight.state.size(); ++i) {
    check_close(swapped.state[i], reversed(straight.state[i]), allowed,
                sdk::cat("state ", i, " of reordered rows"));
  }
}

void no_tokens(Context& context) {
  need_state(context);
  for (const DLDataType dtype : exact_dtypes(context)) {
    Random random(context.seed);
    Mixer mixer(context);
    const MixerInputs in = mixer.random_inputs(2, 20, dtype, random);
    const MixerOutputs before = mixer.forward(in);
    const MixerOutputs after = mixer.forward(piece(in, 20, 20, before.state));
    for (std::size_t i = 0; i < before.state.size(); ++i) {
      check_equal(after.state[i], before.state[i],
                  sdk::cat("state ", i, " in ", sdk::dtype_name(dtype), " after no token more"));
    }
  }
}

double largest(const Tensor& tensor) {
  double out = 0;
  for (const double value : tensor.values()) out = std::max(out, std::fabs(value));
  return out;
}

void bounded(Context& context) {
  need_state(context);
  constexpr std::int64_t kPiece = 2048, kPieces = 8;
  const DLDataType dtype = offers(context, sdk::float32) ? sdk::float32 : exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(1, kPiece, dtype, random);
  std::vector<Tensor> state;
  double first = 0, last = 0, largest_y = 0;
  for (std::int64_t n = 0; n < kPieces; ++n) {
    in.state = copies(state);
    MixerOutputs out = mixer.forward(in);
    check_finite(out.y, sdk::cat("y after ", (n + 1) * kPiece, " tokens"));
    largest_y = std::max(largest_y, largest(out.y));
    last = 0;
    for (const Tensor& s : out.state) {
      check_finite(s, sdk::cat("the state after ", (n + 1) * kPiece, " tokens"));
      if (s.floating()) last = std::max(last, largest(s));
    }
    if (n == 0) first = last;
    state = std::move(out.state);
    in.x.set(random.normals(in.x.size()));
  }
  context.note("largest state after ", kPiece, " tokens ", first, ", after ", kPiece * kPieces, " ",
               last, "; largest y ", largest_y);
  // A sum without decay grows in proportion to the tokens, and no further.
  if (last > 4.0 * static_cast<double>(kPieces) * std::max(first, 1e-30)) {
    fail("the state grows from ", first, " after ", kPiece, " tokens to ", last, " after ",
         kPiece * kPieces);
  }
}

void shapes(Context& context) {
  need_state(context);
  Mixer mixer(context);
  const DLDataType dtype = exact_dtype(context);
  const Plan one = mixer.plan(3, 1, dtype), many = mixer.plan(3, 100, dtype);
  if (one.state.empty()) skip("has no state tensors");
  if (one.state.size() != many.state.size())
    fail("has ", one.state.size(), " states for 1 token and ", many.state.size(), " for 100");
  for (std::size_t i = 0; i < one.state.size(); ++i) {
    const Plan::Spec &a = one.state[i], &b = many.state[i];
    if (a.name != b.name || a.shape != b.shape || !sdk::same_dtype(a.dtype, b.dtype)) {
      fail("state '", a.name, "' is ", sdk::shape_string(a.shape), " for 1 token and ",
           sdk::shape_string(b.shape), " for 100");
    }
    if (a.shape.empty() || a.shape[0] != 3)
      fail("state '", a.name, "' of shape ", sdk::shape_string(a.shape),
           ": the first axis is not the batch of 3");
  }
}

}  // namespace

std::vector<Test> state_tests() {
  return {
      {"state.shapes", Kind::mixer,
       "The size of a state depends on the batch, its first axis, and not on the tokens.", shapes},
      {"state.other_instance", Kind::mixer,
       "A state goes on in another instance of the same configuration.", other_instance},
      {"state.in_place", Kind::mixer, "A step may write the new state over the old one.", in_place},
      {"state.no_tokens", Kind::mixer, "A call without tokens hands on the state it was given.",
       no_tokens},
      {"state.batch_order", Kind::mixer,
       "Rows of a batch and of its states can be reordered together.", batch_order},
      {"state.bounded", Kind::mixer,
       "16,384 tokens of noise leave a finite state that has not run away.", bounded},
  };
}

}  // namespace graft::conformance
