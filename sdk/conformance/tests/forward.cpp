// What holds of any forward pass.
#include "kit/checks.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

// Around the chunk sizes in use, and 0, 1, long.
constexpr std::int64_t kTokens[] = {0,  1,  2,  15, 16,  17,  31,  32,
                                    33, 63, 64, 65, 127, 128, 129, 195};
constexpr std::int64_t kBatches[] = {0, 1, 3};
constexpr std::int64_t kLong = 2048;

// Outputs start as NaN: a place that is not written shows.
void check_complete(const MixerOutputs& out, std::string_view call) {
  check_finite(out.y, sdk::cat(call, ", y"));
  for (std::size_t i = 0; i < out.state.size(); ++i)
    check_finite(out.state[i], sdk::cat(call, ", state_out ", i));
  for (std::size_t i = 0; i < out.taps.size(); ++i)
    check_finite(out.taps[i], sdk::cat(call, ", tap ", i));
}

void sizes(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  for (const std::int64_t batch : kBatches) {
    for (const std::int64_t tokens : kTokens) {
      const MixerInputs in = mixer.random_inputs(batch, tokens, dtype, random);
      check_complete(mixer.forward(in), sdk::cat(batch, " x ", tokens, " tokens"));
    }
  }
  check_complete(mixer.forward(mixer.random_inputs(1, kLong, dtype, random)),
                 sdk::cat(kLong, " tokens"));
}

void layers(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  int refused = 0;
  for (const Layer& layer : all_layers()) {
    try {
      Mixer mixer(context, layer);
      check_complete(mixer.forward(mixer.random_inputs(2, 19, dtype, random)), layer.name);
    } catch (const Skipped& why) {
      context.note(why.what());
      ++refused;
    }
  }
  if (refused > 0) context.note("refuses ", refused, " of ", all_layers().size(), " layers");
}

void zero_state(Context& context) {
  if (!context.has(GRAFT_CAP_STATE_IO)) skip("does not start from states (GRAFT_CAP_STATE_IO)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 21, dtype, random);
  const MixerOutputs without = mixer.forward(in);
  for (const Plan::Spec& spec : mixer.plan(2, 21, dtype).state) {
    in.state.emplace_back(spec.dtype, spec.shape);
    in.state.back().fill(0);
  }
  const MixerOutputs with = mixer.forward(in);
  check_equal(with.y, without.y, "y from a state of zeros and from none");
  for (std::size_t i = 0; i < with.state.size(); ++i) {
    check_equal(with.state[i], without.state[i],
                sdk::cat("state ", i, " from a state of zeros and from none"));
  }
}

void repeated(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const MixerInputs in = mixer.random_inputs(2, 37, dtype, random);
  const MixerOutputs first = mixer.forward(in);
  // Something else in between: nothing of it may stay.
  mixer.forward(mixer.random_inputs(1, 70, dtype, random));
  const MixerOutputs second = mixer.forward(in);
  const double allowed = context.tolerance * tolerance(dtype, 37);
  check_close(second.y, first.y, allowed, "y of the same call again");
  for (std::size_t i = 0; i < first.state.size(); ++i) {
    check_close(second.state[i], first.state[i], allowed,
                sdk::cat("state ", i, " of the same call again"));
  }
}

}  // namespace

std::vector<Test> forward_tests() {
  return {
      {"forward.sizes", Kind::mixer,
       "Any number of rows and tokens, none too, gives complete, finite outputs.", sizes},
      {"forward.layers", Kind::mixer,
       "Blocks of all shapes of teachers are served, or refused when the mixer is made.", layers},
      {"forward.zero_state", Kind::mixer, "A state of zeros and no state are the same start.",
       zero_state},
      {"forward.repeated", Kind::mixer,
       "A call depends on its arguments alone, not on the calls before it.", repeated},
  };
}

}  // namespace graft::conformance
