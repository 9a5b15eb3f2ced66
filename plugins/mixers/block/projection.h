// y = x W^T + b and its gradients, through the host's GEMM; for a few rows, as in decoding, a
// matrix-vector product of our own.
#pragma once

#include <cstdint>

namespace graft::mixers {

// weight [out,in] and bias [out] as PyTorch stores them.
template <class T>
struct Projection {
  int64_t in = 0, out = 0;
  const T* weight = nullptr;
  const T* bias = nullptr;  // nullptr: none
};

// Where the gradients of a projection's parameters go; nullptr: not wanted.
template <class T>
struct ProjectionGradient {
  T* weight = nullptr;
  T* bias = nullptr;
  bool accumulate = false;
};

// x [rows,in] -> y [rows,out].
template <class T>
void project(const Projection<T>& p, int64_t rows, const T* x, T* y);

// dx (+)= dy W; dx nullptr: not wanted.
template <class T>
void project_backward_input(const Projection<T>& p, int64_t rows, const T* dy, bool add, T* dx);

// dW (+)= dy^T x, db (+)= sum of dy.
template <class T>
void project_backward_params(const Projection<T>& p, int64_t rows, const T* x, const T* dy,
                             const ProjectionGradient<T>& d);

// out (+)= the sum of `rows` rows of `width`, in their order.
template <class T>
void sum_rows(int64_t rows, int64_t width, const T* in, bool accumulate, T* out);

}  // namespace graft::mixers
