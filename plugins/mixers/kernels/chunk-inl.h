// What mixers with a state per head share: a chunk's gates, rows that go in and out in panels,
// states, and the gradient of the decays. For one instruction set; see vector-inl.h and
// panel-inl.h.
#pragma once

#include "panel-inl.h"

namespace graft::kernels::GRAFT_ISA {
namespace {

// ------------------------------------------------------------------ one chunk

// The tokens [first, first + n) and what their gates come to. Tokens n .. padded_rows(n) are there
// too, as tokens that do nothing: keys, queries, values and beta are 0.
template <class T>
struct Chunk {
  int64_t first, n;
  T* from_start;  // p_i
  T* to_end;      // D_{n-1,j}
  T* beta;
  Matrix<T> decay;  // D, zero above the diagonal as far as panels reach
  T total() const { return from_start[n - 1]; }
  int64_t rows() const { return padded_rows<T>(n); }
};

// Products below the smallest normal number become 0: they are no part of any sum in T, and
// arithmetic on subnormals is a hundred times slower.
template <class T>
inline T flushed(T x) {
  return x < VectorOf<T>::kSmallestNormal ? T(0) : x;
}
template <class T>
GRAFT_INLINE Vector<T> flushed_all(const Vector<T>& x) {
  return x < VectorOf<T>::kSmallestNormal ? Vector<T>{} : x;
}

// Columns of D, a vector of them at a time, from the top: each row is the one above it times e.
// Above the diagonal it is 0 from the first row of a column panel on.
template <class T>
void fill_decay(const Chunk<T>& chunk, const T* e) {
  Vector<T> lane;
  for (int64_t l = 0; l < kLanes<T>; ++l) lane[l] = static_cast<T>(l);
  for (int64_t c = 0; c < chunk.rows(); c += kLanes<T>) {
    Vector<T> run = {};
    for (int64_t i = c / (2 * kLanes<T>)*2 * kLanes<T>; i < chunk.rows(); ++i) {
      run = flushed_all<T>(run * e[i]);
      run = lane == static_cast<T>(i - c) ? Vector<T>{} + T(1) : run;
      vec(chunk.decay.row(i) + c) = run;
    }
  }
}

// Without g nothing decays, without beta everything is written. `e` has room for a chunk.
template <class T>
void load_gates(Rows<const T> g, Rows<const T> beta, const Chunk<T>& chunk, T* e) {
  T product = 1;
  for (int64_t i = 0; i < chunk.n; ++i) {
    e[i] = g.data == nullptr ? T(1) : VectorOf<T>::exp(g.data[(chunk.first + i) * g.stride]);
    chunk.beta[i] = beta.data == nullptr ? T(1) : beta.data[(chunk.first + i) * beta.stride];
    product = flushed(product * e[i]);
    chunk.from_start[i] = product;
  }
  for (int64_t i = chunk.n; i < chunk.rows(); ++i) e[i] = chunk.beta[i] = chunk.from_start[i] = 0;
  fill_decay(chunk, e);
  const T* last = chunk.decay.row(chunk.n - 1);
  for (int64_t j = 0; j < chunk.rows(); ++j) chunk.to_end[j] = j < chunk.n ? last[j] : T(0);
}

// Rows [first, first + n) of a head, followed by rows of zeros.
template <class T, class E>
void load_rows(Rows<const E> in, const Chunk<T>& chunk, int64_t columns, T factor, Matrix<T> out) {
  if (in.data == nullptr) return fill_zero(chunk.rows(), out);
  load(in, chunk.first, chunk.n, columns, factor, out);
  fill_zero(chunk.rows() - chunk.n, from(out, chunk.n));
}

// Rows as panels read them: where they lie, if whole panels do, else copied to `scratch`.
template <class T, class E>
Matrix<const T> panels_of(Rows<const E> in, const Chunk<T>& chunk, int64_t columns,
                          Matrix<T> scratch) {
  if constexpr (kSame<T, E>) {
    if (in.data != nullptr && columns % kLanes<T> == 0 && chunk.n % kPanelRows == 0)
      return {in.data + chunk.first * in.stride, in.stride};
  }
  load_rows(in, chunk, columns, T(1), scratch);
  return of(scratch);
}
// Likewise where panels write them; finish_panels() brings home what went to `scratch`.
template <class T, class E>
Matrix<T> panels_for(Rows<E> out, const Chunk<T>& chunk, int64_t columns, Matrix<T> scratch) {
  if constexpr (kSame<T, E>) {
    if (columns % kLanes<T> == 0 && chunk.n % kPanelRows == 0)
      return {out.data + chunk.first * out.stride, out.stride};
  }
  return scratch;
}
template <class T, class E>
void finish_panels(Matrix<T> written, Matrix<T> scratch, const Chunk<T>& chunk, int64_t columns,
                   Rows<E> out) {
  if (written.data == scratch.data) store(scratch, chunk.first, chunk.n, columns, T(1), out);
}

// ------------------------------------------------------------------ states

// A state [keys, values] as callers hold it: `row` numbers from one key to the next.
struct StateShape {
  int64_t keys, values, row;
};

// The states of several heads; the rest of a scratch serves one head after the other. A state lies
// in columns of panels, each dense: a panel's walk through it then takes no more of the first-level
// cache than it has to.
template <class T>
struct State {
  T* data;
  int64_t rows;  // padded

  GRAFT_INLINE Matrix<T> columns(int64_t c) const {
    return {data + c * rows,
            2 * kLanes<T>};  // c is a multiple of two vectors, but for the last column of panels
  }
  int64_t size(int64_t value_dim) const { return rows * panel_columns<T>(value_dim); }
};

template <class T>
struct States {
  T* all;
  int64_t rows, size;

  States(const StateShape& s, int64_t heads, Carver<T>& carve)
      : rows(padded_rows<T>(s.keys)), size(rows * panel_columns<T>(s.values)) {
    all = carve.row(heads * size);
  }
  State<T> of(int64_t head) const { return {all + head * size, rows}; }
};

template <class T>
void load_state(const StateShape& shape, const T* state, State<T> out) {
  for (int64_t i = 0; i < out.size(shape.values); ++i) out.data[i] = 0;
  if (state == nullptr) return;
  for_column_panels<T>(shape.values, [&](int64_t c, int64_t width) {
    load<T, T>({state + c, shape.row}, 0, shape.keys, width, T(1), out.columns(c));
  });
}

template <class T>
void store_state(const StateShape& shape, State<T> in, T* state) {
  for_column_panels<T>(shape.values, [&](int64_t c, int64_t width) {
    store<T, T>(in.columns(c), 0, shape.keys, width, T(1), {state + c, shape.row});
  });
}

template <class T>
void transpose_state(const StateShape& shape, State<T> in, Matrix<T> out) {
  for_column_panels<T>(shape.values, [&](int64_t c, int64_t width) {
    transpose_padded(shape.keys, width, in.columns(c), from(out, c));
  });
}

// ------------------------------------------------------------------ gradients

struct ChunkEnds {
  bool zero_start;  // the state at the chunk's start is zero and nobody wants its gradient
  bool zero_d_end;  // nothing flows back from the state at the chunk's end
};

// What the decays of a chunk receive. With X_ij = dL/dD_ij D_ij, where j = -1 stands for the state
// at the chunk's start and i = n for the one at its end, dL/dg_m = sum of X_ij over j < m <= i:
// running sums of rows from the bottom, so that every term of dg_m truly contains e_m and a reset
// gets exactly 0.
template <class T>
struct DecayGradient {
  const T* from_state;  // X_{i,-1}
  const T* to_state;    // X_{n,j}
  T across;             // X_{n,-1}
  Matrix<T> inside;     // X_ij, read below the diagonal
};

template <class T>
void decay_gradient(const Chunk<T>& chunk, const DecayGradient<T>& x, T* range, Rows<T> dg) {
  for (int64_t j = 0; j < chunk.rows(); ++j) range[j] = j < chunk.n ? x.to_state[j] : T(0);
  T from_state = x.across;
  for (int64_t m = chunk.n - 1; m >= 0; --m) {
    const T* row = x.inside.row(m);
    from_state += x.from_state[m];
    Vector<T> sums = {};
    int64_t c = 0;
    for (; c + kLanes<T> <= m; c += kLanes<T>) {
      vec(range + c) += vec(row + c);
      sums += vec(range + c);
    }
    T total = from_state + sum<T>(sums);
    for (; c < m; ++c) total += (range[c] += row[c]);
    dg.data[(chunk.first + m) * dg.stride] = total;
  }
}

}  // namespace
}  // namespace graft::kernels::GRAFT_ISA
