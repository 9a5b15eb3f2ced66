// Products of small matrices in scratch whose result stays in registers until it is done with: a
// panel of kPanelRows rows and one or two vectors. Matrices have their rows and columns padded by
// zeros to whole panels, so that no panel is partial. For one instruction set; see vector-inl.h.
#pragma once

#include "matrix-inl.h"

#define GRAFT_INLINE [[gnu::always_inline]] inline

namespace graft::kernels::GRAFT_ISA {
namespace {

// With two vectors a row: 16 of AVX-512's 32 registers accumulate, 8 of 16 elsewhere.
inline constexpr int64_t kPanelRows = GRAFT_VECTOR_BYTES == 64 ? 8 : 4;

// Rows that a matrix in scratch has at least: whole panels, and whole vectors where it is
// transposed.
template <class T>
inline int64_t padded_rows(int64_t n) {
  constexpr int64_t kUnit = kLanes < T >> kPanelRows ? kLanes<T> : kPanelRows;
  return (n + kUnit - 1) / kUnit * kUnit;
}

template <class T, unsigned V>
struct Panel {
  Vector<T> at[kPanelRows][V] = {};

  GRAFT_INLINE void scale(const T* factors) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) at[r][v] *= factors[r];
    }
  }
  GRAFT_INLINE void scale_all(T factor) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) at[r][v] *= factor;
    }
  }
  GRAFT_INLINE void add_row(const T* row) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) at[r][v] += vec(row + v * kLanes<T>);
    }
  }
  // at += column row
  GRAFT_INLINE void add_outer(const T* column, const T* row) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) at[r][v] += column[r] * vec(row + v * kLanes<T>);
    }
  }
  GRAFT_INLINE void multiply_by(const Panel& other) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) at[r][v] *= other.at[r][v];
    }
  }
  GRAFT_INLINE void multiply_by(Matrix<const T> other) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) at[r][v] *= vec(other.row(r) + v * kLanes<T>);
    }
  }
  GRAFT_INLINE void add(Matrix<const T> other) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) at[r][v] += vec(other.row(r) + v * kLanes<T>);
    }
  }
  // at = given - factors at, row by row
  GRAFT_INLINE void subtract_from(Matrix<const T> given, const T* factors) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v)
        at[r][v] = vec(given.row(r) + v * kLanes<T>) - factors[r] * at[r][v];
    }
  }
  GRAFT_INLINE void load(Matrix<const T> in) {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) at[r][v] = vec(in.row(r) + v * kLanes<T>);
    }
  }
  GRAFT_INLINE void store(Matrix<T> out) const {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      for (unsigned v = 0; v < V; ++v) vec(out.row(r) + v * kLanes<T>) = at[r][v];
    }
  }
  // sums[r] += at_r . other_r
  GRAFT_INLINE void add_dots(Matrix<const T> other, T* sums) const {
    for (unsigned r = 0; r < kPanelRows; ++r) {
      Vector<T> products = {};
      for (unsigned v = 0; v < V; ++v) products += at[r][v] * vec(other.row(r) + v * kLanes<T>);
      sums[r] += sum<T>(products);
    }
  }
};

enum class Left { kRows, kColumns };  // the left operand as it lies, or its transpose
enum class Sign { kPlus, kMinus };

// s += or -= op(a) b over `depth`: the panel's rows of op(a) start at a, its columns of b at b.
template <Left kLeft = Left::kRows, Sign kSign = Sign::kPlus, class T, unsigned V>
GRAFT_INLINE void multiply(Panel<T, V>& s, int64_t depth, Matrix<const T> a, Matrix<const T> b) {
  // Two pointers and one distance reach every row of a panel: more would not stay in registers.
  const T* upper = a.data;
  const T* lower = a.data + (kLeft == Left::kRows ? a.ld : 1) * (kPanelRows / 2);
  const T* row = b.data;
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> right[V];
#pragma GCC unroll 2
    for (unsigned v = 0; v < V; ++v) right[v] = vec(row + v * kLanes<T>);
#pragma GCC unroll 8
    for (unsigned r = 0; r < kPanelRows; ++r) {
      constexpr unsigned kHalf = kPanelRows / 2;
      const T* half = r < kHalf ? upper : lower;
      const T left = kLeft == Left::kRows ? half[r % kHalf * a.ld] : half[r % kHalf];
#pragma GCC unroll 2
      for (unsigned v = 0; v < V; ++v) {
        if constexpr (kSign == Sign::kPlus) {
          s.at[r][v] += left * right[v];
        } else {
          s.at[r][v] -= left * right[v];
        }
      }
    }
    const int64_t next = kLeft == Left::kRows ? 1 : a.ld;
    upper += next;
    lower += next;
    row += b.ld;
  }
}

// body.operator()<V>(c) for panels of columns from c on that cover `columns`.
template <class T, class Body>
GRAFT_INLINE void for_columns(int64_t columns, const Body& body) {
  int64_t c = 0;
  for (; c + kLanes<T> < columns; c += 2 * kLanes<T>) body.template operator()<2>(c);
  if (c < columns) body.template operator()<1>(c);
}
// Columns in whole panels of two vectors.
template <class T>
inline int64_t panel_columns(int64_t n) {
  return (n + 2 * kLanes<T> - 1) / (2 * kLanes<T>)*2 * kLanes<T>;
}
// body(c, width) for each panel of two vectors; the last one may be narrower.
template <class T, class Body>
void for_column_panels(int64_t columns, const Body& body) {
  for (int64_t c = 0; c < columns; c += 2 * kLanes<T>)
    body(c, columns - c < 2 * kLanes<T> ? columns - c : 2 * kLanes<T>);
}
template <class Body>
GRAFT_INLINE void for_rows(int64_t rows, const Body& body) {
  for (int64_t i = 0; i < rows; i += kPanelRows) body(i);
}

template <class T>
GRAFT_INLINE Matrix<T> from(const Matrix<T>& m, int64_t row, int64_t column = 0) {
  return {m.data + row * m.ld + column, m.ld};
}
template <class T>
GRAFT_INLINE Matrix<const T> of(const Matrix<T>& m, int64_t row = 0, int64_t column = 0) {
  return {m.data + row * m.ld + column, m.ld};
}

// A block of kLanes rows, each a vector, transposed in registers.
template <class T>
GRAFT_INLINE void transpose_block(Vector<T> (&x)[kLanes<T>]) {
  typedef typename VectorOf<T>::Lane Lane;
  typedef Lane Lanes __attribute__((vector_size(GRAFT_VECTOR_BYTES)));
  constexpr auto kN = static_cast<unsigned>(kLanes<T>);
#pragma GCC unroll 4
  for (unsigned d = 1; d < kN; d *= 2) {
    Lanes low, high;  // of the pair (a, b): lanes without and with bit d
    for (unsigned lane = 0; lane < kN; ++lane) {
      low[lane] = static_cast<Lane>((lane & d) == 0 ? lane : kN + lane - d);
      high[lane] = static_cast<Lane>((lane & d) == 0 ? lane + d : kN + lane);
    }
#pragma GCC unroll 16
    for (unsigned i = 0; i < kN; ++i) {
      if ((i & d) != 0) continue;
      const Vector<T> a = x[i], b = x[i + d];
      x[i] = __builtin_shuffle(a, b, low);
      x[i + d] = __builtin_shuffle(a, b, high);
    }
  }
}

// out = in^T, in whole blocks of vectors: both matrices have padded rows, and what pads `in` is
// zero.
template <class T>
void transpose_padded(int64_t rows, int64_t columns, Matrix<T> in, Matrix<T> out) {
  for (int64_t i = 0; i < rows; i += kLanes<T>) {
    for (int64_t j = 0; j < columns; j += kLanes<T>) {
      Vector<T> block[kLanes<T>];
#pragma GCC unroll 16
      for (int64_t r = 0; r < kLanes<T>; ++r) block[r] = vec(in.row(i + r) + j);
      transpose_block<T>(block);
#pragma GCC unroll 16
      for (int64_t r = 0; r < kLanes<T>; ++r) vec(out.row(j + r) + i) = block[r];
    }
  }
}

}  // namespace
}  // namespace graft::kernels::GRAFT_ISA
