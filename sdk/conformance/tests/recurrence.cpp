// The same sequence as a whole, in pieces, and token by token.
#include "kit/checks.h"
#include "kit/sequences.h"

namespace graft::conformance {
namespace {

constexpr std::int64_t kLengths[] = {1, 2, 17, 63, 64, 65, 130};

void need_state(const Context& context) {
  if (!context.has(GRAFT_CAP_STATE_IO)) skip("does not go on from states (GRAFT_CAP_STATE_IO)");
}
void need_step(const Context& context) {
  need_state(context);
  if (!context.has(GRAFT_CAP_STEP)) skip("does not decode step by step (GRAFT_CAP_STEP)");
}

void steps_in(Context& context, DLDataType dtype) {
  Random random(context.seed);
  Mixer mixer(context);
  for (const std::int64_t length : kLengths) {
    const MixerInputs in = mixer.random_inputs(2, length, dtype, random);
    const MixerOutputs whole = mixer.forward(in);
    const std::vector<std::int64_t> ones(static_cast<std::size_t>(length), 1);
    check_same_run(context, run_pieces(mixer, in, ones, true), whole, dtype, length,
                   sdk::cat(length, " tokens step by step in ", sdk::dtype_name(dtype)));
  }
}

void pieces_in(Context& context, DLDataType dtype) {
  Random random(context.seed);
  Mixer mixer(context);
  for (const std::int64_t length : kLengths) {
    const MixerInputs in = mixer.random_inputs(2, length, dtype, random);
    const MixerOutputs whole = mixer.forward(in);
    for (int round = 0; round < 3; ++round) {
      const std::vector<std::int64_t> lengths = random_split(length, random);
      check_same_run(context, run_pieces(mixer, in, lengths, false), whole, dtype, length,
                     sdk::cat(length, " tokens in pieces of ", sdk::shape_string(lengths), " in ",
                              sdk::dtype_name(dtype)));
    }
  }
}

void prefill_then_steps_in(Context& context, DLDataType dtype) {
  Random random(context.seed);
  Mixer mixer(context);
  const MixerInputs in = mixer.random_inputs(3, 77, dtype, random);
  std::vector<std::int64_t> lengths{67};
  lengths.insert(lengths.end(), 10, 1);
  check_same_run(context, run_pieces(mixer, in, lengths, true), mixer.forward(in), dtype, 77,
                 sdk::cat("67 tokens at once and 10 steps in ", sdk::dtype_name(dtype)));
}

void steps(Context& context) {
  need_step(context);
  for (const DLDataType dtype : exact_dtypes(context)) steps_in(context, dtype);
}
void pieces(Context& context) {
  need_state(context);
  for (const DLDataType dtype : exact_dtypes(context)) pieces_in(context, dtype);
}
void prefill_then_steps(Context& context) {
  need_step(context);
  for (const DLDataType dtype : exact_dtypes(context)) prefill_then_steps_in(context, dtype);
}

}  // namespace

std::vector<Test> recurrence_tests() {
  return {
      {"recurrence.steps", Kind::mixer, "A sequence step by step is the sequence at once.", steps},
      {"recurrence.pieces", Kind::mixer,
       "A sequence in pieces, each from the state the last one left, is the sequence at once.",
       pieces},
      {"recurrence.prefill_then_steps", Kind::mixer,
       "Steps go on where a forward over the prompt ended.", prefill_then_steps},
  };
}

}  // namespace graft::conformance
