// Causal linear attention of one head with Hedgehog's feature maps, chunked, on plain pointers: no
// LibTorch, no allocation, no threads.
//
//   phi(u) = max(softmax([W u + b, -(W u + b)]), floor)                                    arXiv
//   2402.04347, section 4.2 S_t = e_t S_{t-1} + dt_t phi_k(k_t) v_t^T      z_t = e_t z_{t-1} + dt_t
//   phi_k(k_t)     e_t = exp(g_t) o_t = S_t^T phi_q(q_t) / (z_t . phi_q(q_t) + eps)
//
// Without g there is no decay, without dt every token is written with weight 1 (Hedgehog); with
// both it is the scan of Mamba-2 (arXiv 2405.21060, section 6; HedgeMamba, arXiv 2604.14191).
// Without feature maps q and k are the features themselves; without the normaliser o_t is the plain
// sum and there is no z.
//
// Inside a chunk that starts from S_0, z_0, with D_ij = e_{j+1} ... e_i and p_i = e_1 ... e_i,
//
//   w_ij = D_ij dt_j phi_q(q_i) . phi_k(k_j)       o_i = (p_i S_0^T phi_q(q_i) + sum_{j<=i} w_ij
//   v_j) / (...)
//
// D is a running product of factors in [0, 1]: nothing is divided by a decay, g = -inf forgets
// everything, and g = 0 with dt = 0 (a pad) leaves the state as it is, both exactly, as are their
// gradients.
#pragma once

#include <cstdint>
#include <string_view>

#include "matrix.h"

namespace graft::linear {

using kernels::bf16;
using kernels::Rows;

struct HeadShape {
  int64_t tokens = 0;
  int64_t head_dim =
      0;  // width of q and k: what the feature maps read; `features` where there are none
  int64_t features = 0;  // width of phi: twice the rows of a feature map
  int64_t value_dim = 0;
  int64_t chunk = 64;
  bool maps = true;       // q and k go through feature maps
  bool normalise = true;  // the state has z as a last column

  int64_t chunks() const { return (tokens + chunk - 1) / chunk; }
  int64_t state_row() const { return value_dim + (normalise ? 1 : 0); }
  int64_t state_size() const { return features * state_row(); }
};

// W [features / 2, head_dim] and b [features / 2], contiguous; b nullptr: 0.
template <class T>
struct FeatureMap {
  const T* weight = nullptr;
  const T* bias = nullptr;
};

// Rows are of type E; everything else, and all arithmetic, of type T. g, dt: one value a token.
template <class T, class E = T>
struct HeadForward {
  Rows<const E> q, k, v;
  Rows<const T> g, dt;  // absent: 0, 1
  FeatureMap<T> map_q, map_k;
  T floor = 0, eps = 0;
  const T* state_in = nullptr;  // [features, state_row()]; nullptr: zero
  Rows<E> o;
  T* state_out = nullptr;  // or nullptr; may be state_in
  // What backward reads, or both nullptr: the state at the start of each chunk, and z_t .
  // phi_q(q_t) + eps (`normalise`).
  T* borders = nullptr;
  Rows<T> norm;
  Rows<T> o_kept;  // o before it is rounded to E, for the backward of a `normalise`; absent where E
                   // is T: o serves
};

template <class T, class E = T>
struct HeadBackward {
  Rows<const E> q, k, v;
  Rows<const T> g, dt;
  FeatureMap<T> map_q, map_k;
  T floor = 0;
  bool zero_state_in = false;  // the forward had no state_in: the first border is zero
  const T* borders = nullptr;  // as forward left them
  Rows<const T> norm;
  Rows<const T> o;                 // o_kept of forward (`normalise`)
  Rows<const E> d_o;               // absent: zero
  const T* d_state_out = nullptr;  // nullptr: zero
  Rows<E> dq, dk, dv;              // written
  Rows<T> dg, ddt;                 // written where there is a g, a dt
  // Added to (`maps`): gradients of the feature maps.
  T *d_weight_q = nullptr, *d_bias_q = nullptr, *d_weight_k = nullptr, *d_bias_k = nullptr;
  T* d_state_in = nullptr;  // written unless nullptr
};

template <class T, class E = T>
struct HeadKernels {
  // Of one thread that does so many heads at once: elements, to lie at 64 bytes.
  int64_t (*scratch_size)(const HeadShape&, int64_t heads);
  // `count` heads of one sequence, chunk by chunk side by side (see gdn_kernel.h for why). Results
  // do not depend on the grouping.
  void (*forward)(const HeadShape&, const HeadForward<T, E>* heads, int64_t count, T* scratch);
  void (*backward)(const HeadShape&, const HeadBackward<T, E>* heads, int64_t count, T* scratch);
  // Token by token, of one head: the state is read and written once a token.
  void (*step)(const HeadShape&, const HeadForward<T, E>&, T* scratch);
};

// How many heads of a sequence a thread best does at once: as many as leave work for every thread
// and states in the second-level cache.
int64_t heads_at_once(const HeadShape& shape, int64_t heads, int64_t sequences, int threads);

struct Kernels {
  const char* isa;
  HeadKernels<float> f32;
  HeadKernels<double> f64;
  HeadKernels<float, bf16> bf16_rows;  // gates, states and sums are float32

  template <class T>
  const HeadKernels<T>& of() const;
};
template <>
inline const HeadKernels<float>& Kernels::of() const {
  return f32;
}
template <>
inline const HeadKernels<double>& Kernels::of() const {
  return f64;
}

// Of the instruction set that isa.h picks.
const Kernels& kernels();
// By name, or nullptr when it is unknown or this processor cannot run it.
const Kernels* find_kernels(std::string_view isa);

}  // namespace graft::linear
