// Small matrices in scratch: views, and rows that go in and out, for one instruction set; see
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

// ------------------------------------------------------------------ rows

// Rows of one head lie a whole token apart: too far for the hardware to foresee.
template <class T>
inline void prefetch_row(const T* row, int64_t columns) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t c = 0; c < columns; c += kLine) __builtin_prefetch(row + c);
}

template <class T, class E>
void load(Rows<const E> in, int64_t first, int64_t rows, int64_t columns, T factor, Matrix<T> out) {
  constexpr int64_t kAhead = 8;
  const E* source = in.data + first * in.stride;
  for (int64_t i = 0; i < rows; ++i, source += in.stride) {
    if (i + kAhead < rows) prefetch_row(source + kAhead * in.stride, columns);
    T* target = out.row(i);
    for (int64_t c = 0; c < columns; ++c) target[c] = factor * number<T>(source[c]);
    for (int64_t c = columns; c < out.ld; ++c) target[c] = 0;
  }
}

template <class T, class E>
void store(Matrix<T> in, int64_t first, int64_t rows, int64_t columns, T factor, Rows<E> out) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* source = in.row(i);
    E* target = out.data + (first + i) * out.stride;
    for (int64_t c = 0; c < columns; ++c) target[c] = stored<E>(factor * source[c]);
  }
}

template <class T>
void fill_zero(int64_t rows, Matrix<T> m) {
  for (int64_t i = 0; i < rows * m.ld; ++i) m.data[i] = 0;
}

}  // namespace
}  // namespace graft::kernels::GRAFT_ISA
