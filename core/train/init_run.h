#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/abi/component.h"
#include "core/student/token_mixer.h"
#include "core/teacher/backbone.h"

namespace graft {

// What the teacher does at one layer on the calibration sequences, [N,T,...] float32. Tensors an
// initializer did not ask for are undefined.
struct LayerSignals {
  at::Tensor block_input;   // [N,T,D]
  at::Tensor block_output;  // [N,T,D]
  at::Tensor residual;      // [N,T,D]
  at::Tensor head_context;  // [n,T,H,d_v], n <= N sequences
  // [count,H,T,T] of sequences from `first` on; computed when asked for, since it is large.
  std::function<at::Tensor(std::int64_t first, std::int64_t count)> attention_probs;
};

struct InitReport {
  std::vector<std::string> written;  // parameters the initializer set
  std::vector<std::string> left;     // parameters that keep their defaults
  double seconds = 0;
};

// Calibration sequences in one batch of an initializer's pass. Of 256 tokens each: large enough for
// a GEMM, small enough that [B,H,T,T] stays near 10 MB.
inline constexpr std::int64_t kSequencesInABatch = 4;

// Error(plugin) for a calibration signal that the initializer cannot do without and no host has.
void check_calibration(const Initializer& initializer);

// Does the initializer want this signal, and of how many sequences (0 = all)?
bool wants_signal(const Initializer& initializer, const std::string& name,
                  std::int64_t* max_sequences = nullptr);
bool wants_calibration(const Initializer& initializer);

// Runs `initializer` on one layer: the teacher's parameters by role and the signals in, the mixer's
// parameters out. Throws what the initializer reports as Error(plugin), with the layer.
InitReport run_initializer(const Initializer& initializer, const Backbone& teacher,
                           std::int64_t layer, TokenMixer& mixer, const LayerSignals& signals,
                           std::uint64_t seed);

// The same with another mixer's block as the source, for initializers that go from one student to
// the next: its parameters take the place of the teacher's, under their own roles. `layer` is what
// both blocks replace; `source` and `mixer` may be of different plugins. Error(plugin) names a role
// that the initializer needs of its source and that `source` has not.
InitReport run_initializer(const Initializer& initializer, const TokenMixer& source,
                           const LayerInfo& layer, TokenMixer& mixer, const LayerSignals& signals,
                           std::uint64_t seed);

}  // namespace graft
