// The gated delta rule of ../gdn/gdn_kernel.h on a CUDA device: forward, backward and decode step
// of all heads of a batch. Plain pointers to device memory, the caller's stream, no allocation and
// no synchronisation.
//
// Where the CPU takes a chunk from its gates to its outputs in one go, a device takes four steps,
// so that all but one of them run every chunk at once. With L_ij = D_ij k_i.k_j beta_j below the
// diagonal, w = (I + L)^{-1} diag(p) K and err_0 = (I + L)^{-1} V,
//
//   1  every chunk           w, err_0
//   2  chunk after chunk     err = err_0 - w S; S = p_n S + K^T diag(D_n beta) err
//   3  every chunk           o_i = scale (p_i S^T q_i + sum_{j<=i} D_ij (q_i . k_j) beta_j err_j)
//
// Step 2 runs side by side over batch, heads and tiles of value columns. Backward mirrors it: z,
// the gradient of v, and that of the state from the last chunk to the first, then all other
// gradients, from the states at chunk borders.
#pragma once

#include <cstdint>
#include <string>

#include "block.h"

namespace graft::cuda {

struct GdnShape {
  int batch = 1, heads = 1;
  int64_t tokens = 0;
  int key_dim = 0, value_dim = 0;

  GRAFT_BOTH int chunks() const { return blocks_of(tokens, kChunk); }
  GRAFT_BOTH int64_t all_heads() const { return static_cast<int64_t>(batch) * heads; }
  GRAFT_BOTH int64_t all_chunks() const { return all_heads() * chunks(); }
  GRAFT_BOTH int64_t state_size() const { return static_cast<int64_t>(key_dim) * value_dim; }
  // Floats.
  int64_t states_size() const { return all_heads() * state_size(); }
  int64_t borders_size() const { return all_chunks() * state_size(); }
  int64_t err_size() const { return all_chunks() * kChunk * value_dim; }
  int64_t forward_scratch_size() const { return all_chunks() * kChunk * (key_dim + 2); }
  int64_t backward_scratch_size() const {
    return all_chunks() * (static_cast<int64_t>(kChunk) * (key_dim + value_dim + 1) + state_size());
  }
};

// Rows of E: float or bf16; everything else, and all arithmetic, is float. States are [batch,
// heads, key_dim, value_dim], contiguous; g and beta have rows of one number.
template <class E>
struct GdnForward {
  Tensor<const E> q, k, v;
  Tensor<const float> g, beta;
  float scale = 1;
  const float* state_in = nullptr;  // nullptr: zero
  Tensor<E> o;
  float* state_out = nullptr;  // or nullptr; may be state_in
  // Worked in, and what backward reads: borders_size(), err_size().
  float* borders = nullptr;
  float* err = nullptr;
  float* scratch = nullptr;  // forward_scratch_size()
};

template <class E>
struct GdnBackward {
  Tensor<const E> q, k;
  Tensor<const float> g, beta;
  float scale = 1;
  const float* borders = nullptr;  // as forward left them
  const float* err = nullptr;
  Tensor<const E> d_o;
  const float* d_state_out = nullptr;  // nullptr: zero
  Tensor<E> dq, dk, dv;                // written
  Tensor<float> dg, dbeta;             // written, or absent
  float* d_state_in = nullptr;         // written unless nullptr
  float* scratch = nullptr;            // backward_scratch_size()
};

// Token by token; the state is read and written once a token, in place where state_out is state_in.
template <class E>
struct GdnStep {
  Tensor<const E> q, k, v;
  Tensor<const float> g, beta;
  float scale = 1;
  const float* state_in = nullptr;  // nullptr: zero
  Tensor<E> o;
  float* state_out = nullptr;
};

// On `stream`, a cudaStream_t of the current device. What went wrong, or "".
std::string gdn_forward(const GdnShape& shape, const GdnForward<float>& io, void* stream);
std::string gdn_forward(const GdnShape& shape, const GdnForward<bf16>& io, void* stream);
std::string gdn_backward(const GdnShape& shape, const GdnBackward<float>& io, void* stream);
std::string gdn_backward(const GdnShape& shape, const GdnBackward<bf16>& io, void* stream);
std::string gdn_step(const GdnShape& shape, const GdnStep<float>& io, void* stream);
std::string gdn_step(const GdnShape& shape, const GdnStep<bf16>& io, void* stream);

}  // namespace graft::cuda
