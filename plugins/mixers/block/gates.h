// The gates of a head that are functions of the token, from the outputs of their projections
// [B,T,H].
#pragma once

#include <cstdint>

#include "tokens.h"

namespace graft::mixers {

// Log decay g = -exp(A_log) softplus(a + dt_bias) and write gate beta = sigmoid(b); both 0 at
// padded tokens.
template <class T>
struct DeltaGates {
  int64_t heads = 0;
  const T *A_log = nullptr, *dt_bias = nullptr;  // [H]
  const T *a = nullptr, *b = nullptr;            // [B,T,H]
};

// g and beta may be a and b.
template <class T>
void delta_gates(const DeltaGates<T>& gates, const Tokens& tokens, T* g, T* beta);

template <class T>
struct DeltaGatesGradient {
  const T *g = nullptr, *beta = nullptr;   // [B,T,H]
  T *a = nullptr, *b = nullptr;            // written; may be g and beta
  T *A_log = nullptr, *dt_bias = nullptr;  // [H]; nullptr: not wanted
  bool accumulate = false;                 // of A_log and dt_bias
};

template <class T>
void delta_gates_backward(const DeltaGates<T>& gates, const Tokens& tokens,
                          const DeltaGatesGradient<T>& d);

}  // namespace graft::mixers
