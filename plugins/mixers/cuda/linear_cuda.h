// Causal linear attention with Hedgehog's feature maps, of ../kernels/linear.h, on a CUDA device:
// hedgehog (no g, no dt) and hedgemamba (both). Plain pointers to device memory, the caller's
// stream, no allocation and no synchronisation.
//
//   1  every chunk           phi_q, phi_k
//   2  chunk after chunk     S = p_n S + phi_k^T diag(D_n dt) V, and z likewise: side by side over
//                            batch, heads and squares of the state, whose numbers are independent
//   3  every chunk           o_i = (p_i S^T phi_q_i + sum_{j<=i} w_ij v_j) / norm_i
//
// Backward mirrors it: the features again, the state's gradient from the last chunk to the first,
// all other gradients from the states at chunk borders, then those of the feature maps.
#pragma once

#include <cstdint>
#include <string>

#include "block.h"

namespace graft::cuda {

struct LinearShape {
  int batch = 1, heads = 1;
  int64_t tokens = 0;
  int head_dim =
      0;  // width of q and k: what the feature maps read; `features` where there are none
  int features = 0;  // width of phi: twice the rows of a feature map
  int value_dim = 0;
  bool maps = true;       // q and k go through feature maps
  bool normalise = true;  // the state has z as a last column

  GRAFT_BOTH int chunks() const { return blocks_of(tokens, kChunk); }
  GRAFT_BOTH int64_t all_heads() const { return static_cast<int64_t>(batch) * heads; }
  GRAFT_BOTH int64_t all_chunks() const { return all_heads() * chunks(); }
  GRAFT_BOTH int state_row() const { return value_dim + (normalise ? 1 : 0); }
  GRAFT_BOTH int64_t state_size() const { return static_cast<int64_t>(features) * state_row(); }
  // Floats.
  int64_t states_size() const { return all_heads() * state_size(); }
  int64_t borders_size() const { return all_chunks() * state_size(); }
  int64_t norm_size() const { return all_chunks() * kChunk; }
  int64_t forward_scratch_size() const { return all_chunks() * kChunk * (2 * features + 2); }
  int64_t backward_scratch_size() const {
    const int64_t rows = 2 * features + 4 + (maps ? 2 * features : 0);
    return all_chunks() * (kChunk * rows + state_size());
  }
  int64_t step_scratch_size() const {
    return all_heads() * (tokens * (2 * features + 1) + features);
  }
};

// W [heads, features / 2, head_dim] and b [heads, features / 2]; b nullptr: 0.
struct FeatureMaps {
  const float *weight_q = nullptr, *bias_q = nullptr, *weight_k = nullptr, *bias_k = nullptr;
};

// Rows of E: float or bf16; everything else, and all arithmetic, is float. States are [batch,
// heads, features, state_row()], contiguous; g and dt have rows of one number.
template <class E>
struct LinearForward {
  Tensor<const E> q, k, v;
  Tensor<const float> g, dt;  // absent: 0, 1
  FeatureMaps maps;
  float floor = 0, eps = 0;
  const float* state_in = nullptr;  // nullptr: zero
  Tensor<E> o;
  float* state_out = nullptr;  // or nullptr; may be state_in
  // Worked in, and what backward reads: borders_size(), norm_size() (`normalise`).
  float* borders = nullptr;
  float* norm = nullptr;
  Tensor<float>
      o_kept;  // o before it is rounded to E, for backward (`normalise`); absent: not kept
  float* scratch = nullptr;  // forward_scratch_size()
};

template <class E>
struct LinearBackward {
  Tensor<const E> q, k, v;
  Tensor<const float> g, dt;
  FeatureMaps maps;
  float floor = 0;
  const float* borders = nullptr;  // as forward left them
  const float* norm = nullptr;
  Tensor<const float> o;  // o_kept of forward, or its o where E is float (`normalise`)
  Tensor<const E> d_o;
  const float* d_state_out = nullptr;  // nullptr: zero
  Tensor<E> dq, dk, dv;                // written
  Tensor<float> dg, ddt;               // written, or absent
  // Added to (`maps`), or nullptr.
  float *d_weight_q = nullptr, *d_bias_q = nullptr, *d_weight_k = nullptr, *d_bias_k = nullptr;
  float* d_state_in = nullptr;  // written unless nullptr
  float* scratch = nullptr;     // backward_scratch_size()
};

// Token by token; the state is read and written once a token, in place where state_out is state_in.
template <class E>
struct LinearStep {
  Tensor<const E> q, k, v;
  Tensor<const float> g, dt;
  FeatureMaps maps;
  float floor = 0, eps = 0;
  const float* state_in = nullptr;  // nullptr: zero
  Tensor<E> o;
  float* state_out = nullptr;
  float* scratch = nullptr;  // step_scratch_size()
};

// On `stream`, a cudaStream_t of the current device. What went wrong, or "".
std::string linear_forward(const LinearShape& shape, const LinearForward<float>& io, void* stream);
std::string linear_forward(const LinearShape& shape, const LinearForward<bf16>& io, void* stream);
std::string linear_backward(const LinearShape& shape, const LinearBackward<float>& io,
                            void* stream);
std::string linear_backward(const LinearShape& shape, const LinearBackward<bf16>& io, void* stream);
std::string linear_step(const LinearShape& shape, const LinearStep<float>& io, void* stream);
std::string linear_step(const LinearShape& shape, const LinearStep<bf16>& io, void* stream);

}  // namespace graft::cuda
