// Pieces of sequences, for tests that run one in another way.
#pragma once

#include <vector>

#include "kit/mixer.h"

namespace graft::conformance {

// The inputs of tokens [from, to), with `state` in front.
MixerInputs piece(const MixerInputs& in, std::int64_t from, std::int64_t to,
                  const std::vector<Tensor>& state);

// Runs pieces of these lengths one after the other, each from the state the last one left. `steps`:
// a piece of one token goes through step().
struct Whole {
  std::vector<double> y;  // [B,T,model]
  std::vector<Tensor> state;
};
Whole run_pieces(Mixer& mixer, const MixerInputs& in, const std::vector<std::int64_t>& lengths,
                 bool steps);

// As many random lengths, 1 or more, as it takes.
std::vector<std::int64_t> random_split(std::int64_t tokens, Random& random);

// Equal y and states, with the rounding that a sequence of this length may have.
void check_same_run(const Context& context, const Whole& got, const MixerOutputs& expected,
                    DLDataType dtype, std::int64_t tokens, const std::string& what);

}  // namespace graft::conformance
