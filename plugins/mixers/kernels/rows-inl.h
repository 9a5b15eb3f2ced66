// The rows of rows.h for one instruction set; see vector-inl.h.
#pragma once

#include "rows.h"
#include "vector-inl.h"

namespace graft::kernels::GRAFT_ISA {
namespace {

template <class T>
inline T inverse_root(T x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return T(1) / __builtin_sqrtf(x);
  } else {
    return T(1) / __builtin_sqrt(x);
  }
}

// A row in scratch: padded with zeros, and every operation below leaves the padding zero.
template <class T>
inline void load_row(int64_t dim, const T* in, T* row) {
  for (int64_t c = 0; c < dim; ++c) row[c] = in[c];
  for (int64_t c = dim; c < padded<T>(dim); ++c) row[c] = 0;
}
template <class T>
inline void store_row(int64_t dim, const T* row, T* out) {
  for (int64_t c = 0; c < dim; ++c) out[c] = row[c];
}

template <class T>
inline void scale_row(int64_t n, T factor, T* row) {
  for (int64_t c = 0; c < n; c += kLanes<T>) vec(row + c) *= factor;
}
template <class T>
inline void multiply_row(int64_t n, const T* factor, T* row) {
  for (int64_t c = 0; c < n; c += kLanes<T>) vec(row + c) *= vec(factor + c);
}

template <class T>
inline void silu_row(int64_t n, T* row) {
  for (int64_t c = 0; c < n; c += kLanes<T>) vec(row + c) *= sigmoid<T>(vec(row + c));
}
// d *= silu'(x)
template <class T>
inline void silu_backward_row(int64_t n, const T* x, T* d) {
  for (int64_t c = 0; c < n; c += kLanes<T>) {
    const Vector<T> s = sigmoid<T>(vec(x + c));
    vec(d + c) *= s * (T(1) + vec(x + c) * (T(1) - s));
  }
}

// With n = x r, r = (mean x^2 + eps)^{-1/2}: d (of n) becomes d of x.
template <class T>
inline void normalize_backward_row(int64_t n, int64_t dim, T r, const T* x, T* d) {
  const T inner = r * r * dot(n, x, d) / static_cast<T>(dim);
  for (int64_t c = 0; c < n; c += kLanes<T>) vec(d + c) = r * (vec(d + c) - inner * vec(x + c));
}

// Rotates (x_i, x_{i+m}) by the angle, or by its negative for the transpose.
template <class T, bool kTransposed>
inline void rotate_row(int64_t m, const T* cos, const T* sin, T* row) {
  for (int64_t i = 0; i < m; ++i) {
    const T a = row[i], b = row[i + m], s = kTransposed ? -sin[i] : sin[i];
    row[i] = a * cos[i] - b * s;
    row[i + m] = b * cos[i] + a * s;
  }
}

// What the forward pass of one row leaves for its backward pass.
template <class T>
struct FeatureFactors {
  T rms = 1;  // 1 / root mean square of the silu's output
  T l2 = 1;   // 1 / norm of `row`, which is not yet divided by it
};

// From `row` = in to the row before its L2 normalisation; `activated`, where given, keeps the
// silu's output.
template <class T>
inline FeatureFactors<T> feature_row(const FeatureRows<T>& op, int64_t n, int64_t index,
                                     const T* weight, T* row, T* activated) {
  FeatureFactors<T> factors;
  if (op.silu) silu_row(n, row);
  if (activated != nullptr) {
    for (int64_t c = 0; c < n; c += kLanes<T>) vec(activated + c) = vec(row + c);
  }
  if (op.norm_weight != nullptr) {
    factors.rms = inverse_root(dot(n, row, row) / static_cast<T>(op.dim) + op.norm_eps);
    scale_row(n, factors.rms, row);
    multiply_row(n, weight, row);
  }
  if (op.cos != nullptr) {
    const int64_t token = index / op.heads * op.frequencies;
    rotate_row<T, false>(op.frequencies, op.cos + token, op.sin + token, row);
  }
  if (op.l2norm) factors.l2 = inverse_root(dot(n, row, row) + op.l2_eps);
  return factors;
}

template <class T>
void features(const FeatureRows<T>& op, int64_t begin, int64_t end, const T* in, T* out,
              T* scratch) {
  const int64_t n = padded<T>(op.dim);
  T *row = scratch, *weight = scratch + n;
  if (op.norm_weight != nullptr) load_row(op.dim, op.norm_weight, weight);
  for (int64_t i = begin; i < end; ++i) {
    load_row(op.dim, in + i * op.dim, row);
    const FeatureFactors<T> factors = feature_row<T>(op, n, i, weight, row, nullptr);
    if (op.l2norm) scale_row(n, factors.l2, row);
    store_row(op.dim, row, out + i * op.dim);
  }
}

template <class T>
void features_backward(const FeatureRows<T>& op, int64_t begin, int64_t end, const T* in,
                       const T* d_out, T* d_in, T* d_norm_weight, T* scratch) {
  const int64_t n = padded<T>(op.dim);
  T *row = scratch, *weight = scratch + n, *activated = scratch + 2 * n, *d = scratch + 3 * n;
  if (op.norm_weight != nullptr) load_row(op.dim, op.norm_weight, weight);
  for (int64_t i = begin; i < end; ++i) {
    load_row(op.dim, in + i * op.dim, row);
    const FeatureFactors<T> factors = feature_row<T>(op, n, i, weight, row, activated);
    load_row(op.dim, d_out + i * op.dim, d);
    if (op.l2norm) {
      const T inner = factors.l2 * factors.l2 * dot(n, row, d);
      for (int64_t c = 0; c < n; c += kLanes<T>)
        vec(d + c) = factors.l2 * (vec(d + c) - inner * vec(row + c));
    }
    if (op.cos != nullptr) {
      const int64_t token = i / op.heads * op.frequencies;
      rotate_row<T, true>(op.frequencies, op.cos + token, op.sin + token, d);
    }
    if (op.norm_weight != nullptr) {
      for (int64_t c = 0; c < op.dim; ++c) d_norm_weight[c] += d[c] * activated[c] * factors.rms;
      multiply_row(n, weight, d);
      normalize_backward_row(n, op.dim, factors.rms, activated, d);
    }
    if (op.silu) {
      load_row(op.dim, in + i * op.dim, row);
      silu_backward_row(n, row, d);
    }
    store_row(op.dim, d, d_in + i * op.dim);
  }
}

template <class T>
void gated_norm(const GatedNormRows<T>& op, int64_t begin, int64_t end, const T* in, T* out,
                T* scratch) {
  const int64_t n = padded<T>(op.dim);
  T *row = scratch, *weight = scratch + n, *gate = scratch + 2 * n;
  if (op.norm_weight != nullptr) load_row(op.dim, op.norm_weight, weight);
  for (int64_t i = begin; i < end; ++i) {
    load_row(op.dim, in + i * op.dim, row);
    if (op.norm_weight != nullptr) {
      scale_row(n, inverse_root(dot(n, row, row) / static_cast<T>(op.dim) + op.norm_eps), row);
      multiply_row(n, weight, row);
    }
    if (op.gate != nullptr) {
      load_row(op.dim, op.gate + i * op.dim, gate);
      silu_row(n, gate);
      multiply_row(n, gate, row);
    }
    store_row(op.dim, row, out + i * op.dim);
  }
}

template <class T>
void gated_norm_backward(const GatedNormRows<T>& op, int64_t begin, int64_t end, const T* in,
                         const T* d_out, T* d_in, T* d_gate, T* d_norm_weight, T* scratch) {
  const int64_t n = padded<T>(op.dim);
  T *row = scratch, *weight = scratch + n, *gate = scratch + 2 * n, *d = scratch + 3 * n;
  if (op.norm_weight != nullptr) load_row(op.dim, op.norm_weight, weight);
  for (int64_t i = begin; i < end; ++i) {
    load_row(op.dim, in + i * op.dim, row);
    load_row(op.dim, d_out + i * op.dim, d);
    T r = 1;
    if (op.norm_weight != nullptr)
      r = inverse_root(dot(n, row, row) / static_cast<T>(op.dim) + op.norm_eps);
    if (op.gate != nullptr) {
      // d_gate = d normed silu'(gate); d becomes d silu(gate).
      const T* g = op.gate + i * op.dim;
      T* dg = d_gate + i * op.dim;
      load_row(op.dim, g, gate);
      for (int64_t c = 0; c < n; c += kLanes<T>) {
        const Vector<T> x = vec(gate + c), s = sigmoid<T>(x), upstream = vec(d + c);
        Vector<T> normed = r * vec(row + c);
        if (op.norm_weight != nullptr) normed *= vec(weight + c);
        vec(d + c) = upstream * x * s;
        vec(gate + c) = upstream * normed * s * (T(1) + x * (T(1) - s));
      }
      store_row(op.dim, gate, dg);
    }
    if (op.norm_weight != nullptr) {
      for (int64_t c = 0; c < op.dim; ++c) d_norm_weight[c] += d[c] * row[c] * r;
      multiply_row(n, weight, d);
      normalize_backward_row(n, op.dim, r, row, d);
    }
    store_row(op.dim, d, d_in + i * op.dim);
  }
}

}  // namespace
}  // namespace graft::kernels::GRAFT_ISA
