#include "kit/sequences.h"

#include <algorithm>

#include "kit/checks.h"

namespace graft::conformance {

MixerInputs piece(const MixerInputs& in, std::int64_t from, std::int64_t to,
                  const std::vector<Tensor>& state) {
  MixerInputs out;
  out.x = tokens(in.x, from, to);
  out.params = copies(in.params);
  out.state = copies(state);
  if (in.positions.there()) out.positions = tokens(in.positions, from, to);
  if (in.pad_mask.there()) out.pad_mask = tokens(in.pad_mask, from, to);
  out.flags = in.flags;
  return out;
}

Whole run_pieces(Mixer& mixer, const MixerInputs& in, const std::vector<std::int64_t>& lengths,
                 bool steps) {
  const std::int64_t batch = in.batch(), all = in.tokens();
  const std::int64_t model = mixer.layer().info.model_dim;
  Whole out;
  out.y.resize(static_cast<std::size_t>(batch * all * model));
  out.state = copies(in.state);
  // A step starts from a state: zeros are the start of a sequence.
  if (steps && out.state.empty()) out.state = mixer.zero_state(batch, in.x.dtype());
  std::int64_t at = 0;
  for (const std::int64_t length : lengths) {
    const MixerInputs part = piece(in, at, at + length, out.state);
    MixerOutputs result = steps && length == 1 ? mixer.step(part) : mixer.forward(part);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t i = 0; i < length * model; ++i) {
        out.y[static_cast<std::size_t>((b * all + at) * model + i)] =
            result.y.at(b * length * model + i);
      }
    }
    out.state = std::move(result.state);
    at += length;
  }
  return out;
}

std::vector<std::int64_t> random_split(std::int64_t tokens, Random& random) {
  std::vector<std::int64_t> lengths;
  while (tokens > 0) {
    lengths.push_back(
        std::min<std::int64_t>(tokens, 1 + random.below(std::max<std::int64_t>(tokens / 2, 1))));
    tokens -= lengths.back();
  }
  return lengths;
}

void check_same_run(const Context& context, const Whole& got, const MixerOutputs& expected,
                    DLDataType dtype, std::int64_t tokens, const std::string& what) {
  const double allowed = context.tolerance * tolerance(dtype, tokens);
  const std::string problem = not_close(got.y, expected.y.values(), allowed);
  if (!problem.empty()) fail(what, ", y: ", problem);
  if (got.state.size() != expected.state.size())
    fail(what, ": ", got.state.size(), " states, expected ", expected.state.size());
  for (std::size_t i = 0; i < got.state.size(); ++i) {
    check_close(got.state[i], expected.state[i], allowed, sdk::cat(what, ", state ", i));
  }
}

}  // namespace graft::conformance
