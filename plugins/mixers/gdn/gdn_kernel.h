// The gated delta rule of one head, chunked, on plain pointers: no LibTorch, no allocation, no
// threads.
//
//   S_t = e_t S_{t-1} + beta_t k_t (v_t - e_t S_{t-1}^T k_t)^T          e_t = exp(g_t), S [key_dim,
//   value_dim] o_t = scale S_t^T q_t
//
// A chunk of C tokens that starts from S_0 obeys, with D_ij = e_{j+1} ... e_i (D_ii = 1), p_i = e_1
// ... e_i,
//
//   err_i = v_i - p_i S_0^T k_i - sum_{j<i} D_ij (k_i . k_j) u_j,       u_i = beta_i err_i (unit
//   lower triangular) o_i   = scale (p_i S_0^T q_i + sum_{j<=i} D_ij (q_i . k_j) u_j) S_C   = p_C
//   S_0 + sum_j D_Cj k_j u_j^T
//
// (the WY form of arXiv 2412.06464, section 3.3, with the decay inside the triangular system). D is
// a running product of factors in [0, 1]: nothing is ever divided by a decay, a full reset (g =
// -inf, e = 0) and an identity step (g = 0, beta = 0) are exact, and so are their gradients.
#pragma once

#include <cstdint>
#include <string_view>

#include "matrix.h"

namespace graft::gdn {

using kernels::Rows;

struct HeadShape {
  int64_t tokens = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t chunk = 64;

  [[gnu::always_inline]] int64_t chunks() const { return (tokens + chunk - 1) / chunk; }
};

// g, beta: one value a token. States are contiguous [key_dim, value_dim].
template <class T>
struct HeadForward {
  Rows<const T> q, k, v, g, beta;
  T scale = 1;
  const T* state_in = nullptr;  // nullptr: zero
  Rows<T> o;
  T* state_out = nullptr;  // [key_dim, value_dim] or nullptr; may be state_in in step()
  // What backward reads, or both nullptr: the state at the start of each chunk [chunks, key_dim,
  // value_dim] and err.
  T* borders = nullptr;
  Rows<T> err;
};

template <class T>
struct HeadBackward {
  Rows<const T> q, k, v, g, beta;
  T scale = 1;
  bool zero_state_in = false;  // the forward had no state_in: the first border is zero
  const T* borders = nullptr;  // as forward left them
  Rows<const T> err;
  Rows<const T> d_o;               // absent: zero
  const T* d_state_out = nullptr;  // nullptr: zero
  Rows<T> dq, dk, dv, dg, dbeta;   // written
  T* d_state_in = nullptr;         // written unless nullptr
};

template <class T>
struct HeadKernels {
  // `scratch` has scratch_size() elements, 64-byte aligned, one per thread.
  int64_t (*scratch_size)(const HeadShape&);
  void (*forward)(const HeadShape&, const HeadForward<T>&, T* scratch);
  void (*backward)(const HeadShape&, const HeadBackward<T>&, T* scratch);
  // The recurrence itself, token by token: one pass over the state a token and no chunk overhead.
  void (*step)(const HeadShape&, const HeadForward<T>&, T* scratch);
};

struct Kernels {
  const char* isa;  // "baseline", "avx2", "avx512"
  HeadKernels<float> f32;
  HeadKernels<double> f64;

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

}  // namespace graft::gdn
