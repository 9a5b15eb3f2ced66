// Small matrices in scratch: views, products, transposes and rows, for one instruction set; see
// vector-inl.h.
#pragma once

#include "matrix.h"
#include "vector-inl.h"

namespace graft::kernels::GRAFT_ISA {
namespace {

// Scratch matrices are row-major with rows padded by zeros to whole vectors.
template <class T>
struct Matrix {
  T* data;
  int64_t ld;
  T* row(int64_t i) const { return data + i * ld; }
};

// Hands out scratch; over nullptr it only counts.
template <class T>
class Carver {
 public:
  explicit Carver(T* base) : base_(base) {}
  Matrix<T> matrix(int64_t rows, int64_t columns) {
    Matrix<T> m{base_ == nullptr ? nullptr : base_ + used_, padded<T>(columns)};
    used_ += rows * m.ld;
    return m;
  }
  T* row(int64_t n) { return matrix(1, n).data; }
  int64_t used() const { return used_; }

 private:
  T* base_;
  int64_t used_ = 0;
};

// ------------------------------------------------------------------ products

enum class Store { kSet, kAdd, kSubtract };
// Which part of a product with triangular matrices is worth computing. Blocks of rows are rounded
// outwards, so a triangular operand holds zeros in its other half.
enum class Part {
  kAll,
  kLowerResult,  // columns up to the row
  kLowerLeft,    // the left operand is lower triangular
  kUpperLeft,    // the left operand is upper triangular
};

template <class T, unsigned R, unsigned V, bool kTransposed>
inline void tile(int64_t k_begin, int64_t k_end, const T* a, int64_t lda, Matrix<const T> b, T* c,
                 int64_t ldc, Store store) {
  Vector<T> sums[R][V] = {};
  for (int64_t k = k_begin; k < k_end; ++k) {
    Vector<T> right[V];
#pragma GCC unroll 16
    for (unsigned v = 0; v < V; ++v) right[v] = vec(b.row(k) + v * kLanes<T>);
#pragma GCC unroll 16
    for (unsigned r = 0; r < R; ++r) {
      const T left = kTransposed ? a[k * lda + r] : a[r * lda + k];
#pragma GCC unroll 16
      for (unsigned v = 0; v < V; ++v) sums[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 16
  for (unsigned r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (unsigned v = 0; v < V; ++v) {
      Vector<T>& out = vec(c + r * ldc + v * kLanes<T>);
      if (store == Store::kSet) {
        out = sums[r][v];
      } else if (store == Store::kAdd) {
        out += sums[r][v];
      } else {
        out -= sums[r][v];
      }
    }
  }
}

// R rows of the result, all its columns.
template <class T, unsigned R, bool kTransposed>
inline void tile_row(int64_t k_begin, int64_t k_end, int64_t columns, const T* a, int64_t lda,
                     Matrix<const T> b, T* c, int64_t ldc, Store store) {
  constexpr int64_t kWide = GRAFT_TILE_VECTORS * kLanes<T>;
  int64_t n = 0;
  for (; n + kWide <= columns; n += kWide) {
    tile<T, R, GRAFT_TILE_VECTORS, kTransposed>(k_begin, k_end, a, lda, {b.data + n, b.ld}, c + n,
                                                ldc, store);
  }
  for (; n < columns; n += kLanes<T>) {
    tile<T, R, 1, kTransposed>(k_begin, k_end, a, lda, {b.data + n, b.ld}, c + n, ldc, store);
  }
}

template <class T, unsigned R, bool kTransposed>
void tile_rows(int64_t rows, int64_t k_begin, int64_t k_end, int64_t columns, const T* a,
               int64_t lda, Matrix<const T> b, T* c, int64_t ldc, Store store) {
  if constexpr (R > 0) {
    if (rows == int64_t{R}) {
      tile_row<T, R, kTransposed>(k_begin, k_end, columns, a, lda, b, c, ldc, store);
    } else {
      tile_rows<T, R - 1, kTransposed>(rows, k_begin, k_end, columns, a, lda, b, c, ldc, store);
    }
  }
}

// c (=, +=, -=) op(a) b with c [m, n], op(a) [m, k], b [k, n]; columns of c up to the padding are
// written too.
template <class T, bool kTransposed>
void product(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, Matrix<T> c, Store store,
             Part part = Part::kAll) {
  for (int64_t i = 0; i < m; i += GRAFT_TILE_ROWS) {
    const int64_t rows = m - i < GRAFT_TILE_ROWS ? m - i : GRAFT_TILE_ROWS;
    const int64_t k_begin = part == Part::kUpperLeft ? i : 0;
    const int64_t k_end = part == Part::kLowerLeft ? i + rows : k;
    const int64_t columns = part == Part::kLowerResult ? i + rows : n;
    const T* left = kTransposed ? a.data + i : a.row(i);
    tile_rows<T, GRAFT_TILE_ROWS, kTransposed>(rows, k_begin, k_end, padded<T>(columns), left, a.ld,
                                               {b.data, b.ld}, c.row(i), c.ld, store);
  }
}
template <class T>
void multiply(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, Matrix<T> c, Store store,
              Part part = Part::kAll) {
  product<T, false>(m, n, k, a, b, c, store, part);
}
template <class T>
void multiply_transposed(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, Matrix<T> c,
                         Store store, Part part = Part::kAll) {
  product<T, true>(m, n, k, a, b, c, store, part);
}

// out [columns, rows] = in [rows, columns]^T, in blocks that stay in the first-level cache.
template <class T>
void transpose(int64_t rows, int64_t columns, Matrix<T> in, Matrix<T> out) {
  constexpr int64_t kBlock = 8;
  for (int64_t i = 0; i < rows; i += kBlock) {
    const int64_t i_end = i + kBlock < rows ? i + kBlock : rows;
    for (int64_t j = 0; j < columns; j += kBlock) {
      const int64_t j_end = j + kBlock < columns ? j + kBlock : columns;
      for (int64_t c = j; c < j_end; ++c) {
        for (int64_t r = i; r < i_end; ++r) out.row(c)[r] = in.row(r)[c];
      }
    }
  }
  const int64_t end = padded<T>(rows);
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = rows; r < end; ++r) out.row(c)[r] = 0;
  }
}

// ------------------------------------------------------------------ rows

// Rows of one head lie a whole token apart: too far for the hardware to foresee.
template <class T>
inline void prefetch_row(const T* row, int64_t columns) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t c = 0; c < columns; c += kLine) __builtin_prefetch(row + c);
}

template <class T>
void load(Rows<const T> in, int64_t first, int64_t rows, int64_t columns, T factor, Matrix<T> out) {
  constexpr int64_t kAhead = 8;
  const T* source = in.data + first * in.stride;
  for (int64_t i = 0; i < rows; ++i, source += in.stride) {
    if (i + kAhead < rows) prefetch_row(source + kAhead * in.stride, columns);
    T* target = out.row(i);
    for (int64_t c = 0; c < columns; ++c) target[c] = factor * source[c];
    for (int64_t c = columns; c < out.ld; ++c) target[c] = 0;
  }
}

template <class T>
void store(Matrix<T> in, int64_t first, int64_t rows, int64_t columns, T factor, Rows<T> out) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* source = in.row(i);
    T* target = out.data + (first + i) * out.stride;
    for (int64_t c = 0; c < columns; ++c) target[c] = factor * source[c];
  }
}

template <class T>
void fill_zero(int64_t rows, Matrix<T> m) {
  for (int64_t i = 0; i < rows * m.ld; ++i) m.data[i] = 0;
}

// out_i = factor_i in_i; out may be in.
template <class T>
void scale_rows(int64_t rows, const T* factor, Matrix<T> in, Matrix<T> out) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < in.ld; c += kLanes<T>)
      vec(out.row(i) + c) = factor[i] * vec(in.row(i) + c);
  }
}

template <class T>
void scale_all(int64_t rows, T factor, Matrix<T> m) {
  for (int64_t i = 0; i < rows * m.ld; i += kLanes<T>) vec(m.data + i) *= factor;
}

// y -= factor x
template <class T>
inline void subtract(int64_t n_padded, T factor, const T* x, T* y) {
  for (int64_t c = 0; c < n_padded; c += kLanes<T>) vec(y + c) -= factor * vec(x + c);
}

}  // namespace
}  // namespace graft::kernels::GRAFT_ISA
