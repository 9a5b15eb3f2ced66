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

#include "isa.h"
#include "matrix.h"

namespace graft::gdn {

using kernels::Rows;

struct HeadShape {
  int64_t tokens = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t chunk = 64;
  // From one row of a state to the next. More than value_dim where a call computes some of a head's
  // value columns: those are independent of each other, given queries, keys and gates.
  int64_t state_stride = 0;  // 0: value_dim

  [[gnu::always_inline]] int64_t chunks() const { return (tokens + chunk - 1) / chunk; }
  [[gnu::always_inline]] int64_t state_row() const {
    return state_stride > 0 ? state_stride : value_dim;
  }
  [[gnu::always_inline]] int64_t state_size() const { return key_dim * state_row(); }
};

// Rows are of type E; everything else, and all arithmetic, of type T. g, beta: one value a token.
template <class T, class E = T>
struct HeadForward {
  Rows<const E> q, k, v;
  Rows<const T> g, beta;
  T scale = 1;
  const T* state_in = nullptr;  // nullptr: zero
  Rows<E> o;
  T* state_out = nullptr;  // [key_dim, state_row()] or nullptr; may be state_in
  // What backward reads, or both nullptr: the state at the start of each chunk, [chunks, key_dim,
  // state_row()], and err.
  T* borders = nullptr;
  Rows<T> err;
};

// Of whole heads: all value columns.
template <class T, class E = T>
struct HeadBackward {
  Rows<const E> q, k;
  Rows<const T> g, beta;
  T scale = 1;
  bool zero_state_in = false;  // the forward had no state_in: the first border is zero
  const T* borders = nullptr;  // as forward left them
  Rows<const T> err;
  Rows<const E> d_o;               // absent: zero
  const T* d_state_out = nullptr;  // nullptr: zero
  Rows<E> dq, dk, dv;              // written
  Rows<T> dg, dbeta;
  T* d_state_in = nullptr;  // written unless nullptr
};

template <class T, class E = T>
struct HeadKernels {
  // Of one thread that does so many heads at once: elements, to lie at 64 bytes.
  int64_t (*scratch_size)(const HeadShape&, int64_t heads);
  // `count` heads of one sequence, chunk by chunk side by side: their rows lie next to each other,
  // and going through memory once for all of them is what keeps caches and page tables warm.
  // Results do not depend on the grouping.
  void (*forward)(const HeadShape&, const HeadForward<T, E>* heads, int64_t count, T* scratch);
  void (*backward)(const HeadShape&, const HeadBackward<T, E>* heads, int64_t count, T* scratch);
  // The recurrence itself, token by token, of one head: the state is read and written once a token,
  // in place where state_out is state_in, and there is no chunk's overhead.
  void (*step)(const HeadShape&, const HeadForward<T, E>&, T* scratch);
};

// How many heads of a sequence a thread best does at once; see isa.h.
using kernels::kHeadsAtOnce;
int64_t heads_at_once(const HeadShape& shape, int64_t heads, int64_t sequences, int threads);

struct Kernels {
  const char* isa;  // "baseline", "avx2", "avx512"
  HeadKernels<float> f32;
  HeadKernels<double> f64;
  HeadKernels<float, kernels::bf16> bf16;  // rows of bfloat16; gates, states and sums are float32

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
