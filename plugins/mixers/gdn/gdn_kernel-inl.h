// The delta rule of gdn_kernel.h for one instruction set; see vector-inl.h and chunk-inl.h.
#pragma once

#include "chunk-inl.h"
#include "gdn_kernel.h"

namespace graft::gdn::GRAFT_ISA {
namespace {

using namespace kernels::GRAFT_ISA;

inline StateShape state_of(const HeadShape& s) { return {s.key_dim, s.value_dim, s.state_row()}; }

template <class T>
struct Scratch {
  State<T> state;  // of the head at hand; not carved here
  Matrix<T> q, k, k_t, v, err, u, u_end, o, write, read, decay, u_panel, u_end_panel;
  T *from_start, *to_end, *beta, *e;

  Scratch(const HeadShape& s, Carver<T>& carve) {
    const int64_t c = padded_rows<T>(s.chunk), dk = padded_rows<T>(s.key_dim);
    const int64_t dv = padded_rows<T>(s.value_dim);
    q = carve.matrix(c, dk);
    k = carve.matrix(c, dk);
    k_t = carve.matrix(dk, c);
    v = carve.matrix(c, dv);
    err = carve.matrix(c, dv);
    u = carve.matrix(c, dv);
    u_end = carve.matrix(c, dv);
    o = carve.matrix(c, dv);
    u_panel = carve.matrix(c, 2 * kLanes<T>);
    u_end_panel = carve.matrix(c, 2 * kLanes<T>);
    write = carve.matrix(c, c);
    read = carve.matrix(c, c);
    decay = carve.matrix(c, c);
    from_start = carve.row(c);
    to_end = carve.row(c);
    beta = carve.row(c);
    e = carve.row(c);
  }

  Chunk<T> chunk(const HeadShape& s, int64_t index) const {
    const int64_t first = index * s.chunk;
    const int64_t left = s.tokens - first;
    return {first, left < s.chunk ? left : s.chunk, from_start, to_end, beta, decay};
  }
};

template <class T, unsigned V>
GRAFT_INLINE void decayed_scores(const HeadShape& shape, const Chunk<T>& chunk, Matrix<T> left,
                                 Matrix<T> k_t, int64_t i, int64_t c, Matrix<T> out) {
  Panel<T, V> x;
  multiply(x, shape.key_dim, of(left, i), of(k_t, 0, c));
  x.multiply_by(of(chunk.decay, i, c));
  x.store(from(out, i, c));
}

// write_ij = D_ij k_i.k_j below the diagonal, read_ij = D_ij q_i.k_j (q comes scaled) on and below
// it.
template <class T>
void chunk_scores(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s) {
  transpose_padded(chunk.rows(), shape.key_dim, s.k, s.k_t);
  for_rows(
      chunk.rows(), [&](int64_t i) __attribute__((always_inline)) {
        for_columns<T>(
            i + kPanelRows, [&]<unsigned V>(int64_t c) __attribute__((always_inline)) {
              decayed_scores<T, V>(shape, chunk, s.k, s.k_t, i, c, s.write);
              decayed_scores<T, V>(shape, chunk, s.q, s.k_t, i, c, s.read);
            });
        for (int64_t r = i; r < i + kPanelRows; ++r) s.write.row(r)[r] = 0;
      });
}

// ------------------------------------------------------------------ forward

// What the first pass over a chunk asks for ahead of its use, a few rows at each panel: the next
// chunk's queries, keys and values, and the outputs about to be written. Rows of one head lie a
// whole token apart, which the hardware does not foresee.
template <class T, class E>
struct Ahead {
  const HeadShape& shape;
  const HeadForward<T, E>& io;
  int64_t first;  // of the chunk

  GRAFT_INLINE void values(int64_t i) const {
    rows(io.v, first + shape.chunk + i, shape.value_dim);
  }
  GRAFT_INLINE void keys(int64_t i) const { rows(io.k, first + shape.chunk + i, shape.key_dim); }
  GRAFT_INLINE void queries(int64_t i) const { rows(io.q, first + shape.chunk + i, shape.key_dim); }
  GRAFT_INLINE void outputs(int64_t i) const { rows(io.o, first + i, shape.value_dim); }

 private:
  template <class Element>
  GRAFT_INLINE void rows(Rows<Element> rows, int64_t begin, int64_t columns) const {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(E));
    for (int64_t i = begin; i < begin + kPanelRows && i < shape.tokens; ++i) {
      for (int64_t c = 0; c < columns; c += kLine)
        __builtin_prefetch(rows.data + i * rows.stride + c);
    }
  }
};

// The value columns from c on of what a chunk computes: no column depends on another.
template <class T, class E, unsigned V>
struct ValueColumns {
  const HeadShape& shape;
  const Chunk<T>& chunk;
  const Scratch<T>& s;
  Matrix<const T> v;
  Matrix<T> o;
  Matrix<T> err;  // no data: nobody wants it
  Ahead<T, E> ahead;
  bool zero_state;
  int64_t c;

  // err_i = v_i - p_i S^T k_i - sum_{j<i} write_ij u_j, u_i = beta_i err_i: the rows before the
  // panel as a product, those inside it by substitution.
  GRAFT_INLINE void solve(int64_t i) const {
    Panel<T, V> x;
    if (zero_state) {
      x.load(at(v, i));
    } else {
      multiply(x, shape.key_dim, of(s.k, i), of(s.state.columns(c)));
      x.subtract_from(at(v, i), chunk.from_start + i);
    }
    multiply<Left::kRows, Sign::kMinus>(x, i, of(s.write, i), of(s.u_panel));
#pragma GCC unroll 8
    for (unsigned j = 0; j < kPanelRows; ++j) {
      Vector<T> u[V];
      for (unsigned v_ = 0; v_ < V; ++v_) {
        u[v_] = chunk.beta[i + j] * x.at[j][v_];
        vec(s.u_panel.row(i + j) + v_ * kLanes<T>) = u[v_];
        vec(s.u_end_panel.row(i + j) + v_ * kLanes<T>) = chunk.to_end[i + j] * u[v_];
      }
#pragma GCC unroll 8
      for (unsigned r = j + 1; r < kPanelRows; ++r) {
        const T write = s.write.row(i + r)[i + j];
        for (unsigned v_ = 0; v_ < V; ++v_) x.at[r][v_] -= write * u[v_];
      }
    }
    if (err.data != nullptr) x.store(from(err, i, c));
  }

  // o_i = p_i S^T q_i + sum_{j<=i} read_ij u_j
  GRAFT_INLINE void output(int64_t i) const {
    Panel<T, V> x;
    if (!zero_state) {
      multiply(x, shape.key_dim, of(s.q, i), of(s.state.columns(c)));
      x.scale(chunk.from_start + i);
    }
    multiply(x, i + kPanelRows, of(s.read, i), of(s.u_panel));
    x.store(from(o, i, c));
  }

  // S = p_n S + sum_j D_nj k_j u_j^T, kPanelRows keys from r on
  GRAFT_INLINE void advance(int64_t r) const {
    Panel<T, V> x;
    if (!zero_state) {
      x.load(of(s.state.columns(c), r));
      x.scale_all(chunk.total());
    }
    multiply(x, chunk.n, of(s.k_t, r), of(s.u_end_panel));
    x.store(from(s.state.columns(c), r));
  }

  GRAFT_INLINE void run() const {
    for_rows(
        chunk.n, [&](int64_t i) __attribute__((always_inline)) {
          if (c == 0) {
            ahead.values(i);
            ahead.outputs(i);
          }
          solve(i);
        });
    for_rows(
        chunk.n, [&](int64_t i) __attribute__((always_inline)) {
          if (c == 0) ahead.keys(i);
          output(i);
        });
    for_rows(
        shape.key_dim, [&](int64_t r) __attribute__((always_inline)) {
          if (c == 0 && r < shape.chunk) ahead.queries(r);
          advance(r);
        });
  }

 private:
  GRAFT_INLINE Matrix<const T> at(Matrix<const T> m, int64_t i) const {
    return {m.data + i * m.ld + c, m.ld};
  }
};

template <class T, class E>
void forward_chunk(const HeadShape& shape, const HeadForward<T, E>& io, int64_t index,
                   bool zero_state, const Scratch<T>& s) {
  const Chunk<T> chunk = s.chunk(shape, index);
  const int64_t dv = shape.value_dim;
  load_gates(io.g, io.beta, chunk, s.e);
  load_rows(io.q, chunk, shape.key_dim, io.scale, s.q);
  load_rows(io.k, chunk, shape.key_dim, T(1), s.k);
  chunk_scores(shape, chunk, s);
  const Matrix<const T> v = panels_of(io.v, chunk, dv, s.v);
  const Matrix<T> o = panels_for(io.o, chunk, dv, s.o);
  const Matrix<T> err =
      io.err.data != nullptr ? panels_for(io.err, chunk, dv, s.err) : Matrix<T>{nullptr, 0};
  for_columns<T>(dv, [&]<unsigned V>(int64_t c) {
    ValueColumns<T, E, V>{shape, chunk, s, v, o, err, {shape, io, chunk.first}, zero_state, c}
        .run();
  });
  finish_panels(o, s.o, chunk, dv, io.o);
  if (err.data != nullptr) finish_panels(err, s.err, chunk, dv, io.err);
}

// Chunk by chunk, all heads of a chunk one after the other: what they read and write lies side by
// side.
template <class T, class E>
void forward(const HeadShape& shape, const HeadForward<T, E>* heads, int64_t count, T* scratch) {
  Carver<T> carve(scratch);
  Scratch<T> s(shape, carve);
  const States<T> states(state_of(shape), count, carve);
  for (int64_t h = 0; h < count; ++h) load_state(state_of(shape), heads[h].state_in, states.of(h));
  for (int64_t index = 0; index < shape.chunks(); ++index) {
    for (int64_t h = 0; h < count; ++h) {
      const HeadForward<T, E>& io = heads[h];
      s.state = states.of(h);
      if (io.borders != nullptr)
        store_state(state_of(shape), s.state, io.borders + index * shape.state_size());
      forward_chunk(shape, io, index, index == 0 && io.state_in == nullptr, s);
    }
  }
  for (int64_t h = 0; h < count; ++h) {
    if (heads[h].state_out != nullptr)
      store_state(state_of(shape), states.of(h), heads[h].state_out);
  }
}

// ------------------------------------------------------------------ backward

template <class T>
struct BackwardScratch {
  State<T> d_state;  // of the head at hand; not carved here
  Matrix<T> state_t, d_state_t, z, u_t, d_read, d_write, dq, dk, decayed_d_o, decayed_z;
  T *from_state, *to_state, *range, *dbeta;

  BackwardScratch(const HeadShape& s, Carver<T>& carve) {
    const int64_t c = padded_rows<T>(s.chunk), k = padded_rows<T>(s.key_dim),
                  v = padded_rows<T>(s.value_dim);
    state_t = carve.matrix(v, k);
    d_state_t = carve.matrix(v, k);
    z = carve.matrix(c, v);
    u_t = carve.matrix(v, c);
    d_read = carve.matrix(c, c);
    d_write = carve.matrix(c, c);
    dq = carve.matrix(c, k);
    dk = carve.matrix(c, k);
    decayed_d_o = carve.matrix(c, 2 * kLanes<T>);
    decayed_z = carve.matrix(c, 2 * kLanes<T>);
    from_state = carve.row(c);
    to_state = carve.row(c);
    range = carve.row(c);
    dbeta = carve.row(c);
  }
};

// The value columns from c on of what flows back through u, err and the state.
template <class T, unsigned V>
struct ValueGradients {
  const HeadShape& shape;
  const Chunk<T>& chunk;
  const Scratch<T>& s;
  const BackwardScratch<T>& b;
  Matrix<const T> d_o;
  Matrix<T> z;
  ChunkEnds ends;
  int64_t c;

  // The gradient y of u_j, y_j = to_end_j dS^T k_j + sum_{i>=j} read_ij d_o_i - sum_{i>j} write_ij
  // z_i, and z = beta y, which is also that of v: the rows behind the panel as products, those
  // inside it by substitution.
  GRAFT_INLINE void solve(int64_t i) const {
    Panel<T, V> y;
    if (!ends.zero_d_end) {
      multiply(y, shape.key_dim, of(s.k, i), of(b.d_state.columns(c)));
      y.scale(chunk.to_end + i);
      y.add_dots(of(s.u, i, c), b.to_state + i);
    }
    const int64_t behind = i + kPanelRows;
    multiply<Left::kColumns>(y, chunk.n - i, of(s.read, i, i), {d_o.data + i * d_o.ld + c, d_o.ld});
    multiply<Left::kColumns, Sign::kMinus>(y, chunk.n - behind, of(s.write, behind, i),
                                           of(z, behind, c));
#pragma GCC unroll 8
    for (unsigned back = 1; back <= kPanelRows; ++back) {
      const unsigned j = kPanelRows - back;
      Vector<T> z_j[V];
      for (unsigned v = 0; v < V; ++v) {
        const int64_t column = c + v * kLanes<T>;
        z_j[v] = chunk.beta[i + j] * y.at[j][v];
        vec(z.row(i + j) + column) = z_j[v];
        vec(b.decayed_z.row(i + j) + v * kLanes<T>) = chunk.from_start[i + j] * z_j[v];
        vec(b.decayed_d_o.row(i + j) + v * kLanes<T>) =
            chunk.from_start[i + j] * vec(d_o.data + (i + j) * d_o.ld + column);
      }
#pragma GCC unroll 8
      for (unsigned r = 0; r < j; ++r) {
        const T write = s.write.row(i + j)[i + r];
        for (unsigned v = 0; v < V; ++v) y.at[r][v] -= write * z_j[v];
      }
    }
    y.add_dots(of(s.err, i, c), b.dbeta + i);
  }

  // dS at the chunk's start: p_n dS + sum_i p_i (q_i d_o_i^T - k_i z_i^T), kPanelRows keys from r
  // on.
  GRAFT_INLINE void retreat(int64_t r) const {
    Panel<T, V> x;
    if (!ends.zero_d_end) {
      x.load(of(b.d_state.columns(c), r));
      x.scale_all(chunk.total());
    }
    multiply<Left::kColumns>(x, chunk.n, of(s.q, 0, r), of(b.decayed_d_o));
    multiply<Left::kColumns, Sign::kMinus>(x, chunk.n, of(s.k, 0, r), of(b.decayed_z));
    x.store(from(b.d_state.columns(c), r));
  }

  GRAFT_INLINE void run() const {
    for (int64_t i = (chunk.n - 1) / kPanelRows * kPanelRows; i >= 0; i -= kPanelRows) solve(i);
    if (ends.zero_start) return;
    for_rows(
        shape.key_dim, [&](int64_t r) __attribute__((always_inline)) { retreat(r); });
  }
};

// The gradients of q.k and k.k from those of the decayed scores, d_read = d_o u^T and d_write = -z
// u^T; and in s.read the X_ij of DecayGradient.
template <class T>
void score_gradients(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s,
                     const BackwardScratch<T>& b, Matrix<const T> d_o, Matrix<T> z) {
  transpose_padded(chunk.rows(), shape.value_dim, s.u, b.u_t);
  for_rows(
      chunk.n, [&](int64_t i) __attribute__((always_inline)) {
        for_columns<T>(
            i + kPanelRows, [&]<unsigned V>(int64_t c) __attribute__((always_inline)) {
              Panel<T, V> x, inside;
              multiply(x, shape.value_dim, {d_o.data + i * d_o.ld, d_o.ld}, of(b.u_t, 0, c));
              inside.load(of(s.read, i, c));
              inside.multiply_by(x);
              x.multiply_by(of(chunk.decay, i, c));
              x.store(from(b.d_read, i, c));
              inside.store(from(s.read, i, c));
            });
        for_columns<T>(
            i + kPanelRows, [&]<unsigned V>(int64_t c) __attribute__((always_inline)) {
              Panel<T, V> x, inside;
              multiply<Left::kRows, Sign::kMinus>(x, shape.value_dim, of(z, i), of(b.u_t, 0, c));
              inside.load(of(s.write, i, c));
              inside.multiply_by(x);
              inside.add(of(s.read, i, c));
              inside.store(from(s.read, i, c));
              x.multiply_by(of(chunk.decay, i, c));
              x.store(from(b.d_write, i, c));
            });
        for (int64_t r = i; r < i + kPanelRows; ++r) b.d_write.row(r)[r] = 0;
      });
}

// The key columns from c on of dq and dk.
template <class T, unsigned V>
struct KeyGradients {
  const HeadShape& shape;
  const Chunk<T>& chunk;
  const Scratch<T>& s;
  const BackwardScratch<T>& b;
  Matrix<const T> d_o;
  Matrix<T> z, dq, dk;
  ChunkEnds ends;
  T scale;
  int64_t c;

  // dq_i = scale (p_i S d_o_i + sum_{j<=i} d_read_ij k_j)
  GRAFT_INLINE void queries(int64_t i) const {
    Panel<T, V> x;
    if (!ends.zero_start) {
      multiply(x, shape.value_dim, {d_o.data + i * d_o.ld, d_o.ld}, of(b.state_t, 0, c));
      x.scale(chunk.from_start + i);
      x.add_dots(of(s.q, i, c), b.from_state + i);
    }
    multiply(x, i + kPanelRows, of(b.d_read, i), of(s.k, 0, c));
    x.scale_all(scale);
    x.store(from(dq, i, c));
  }

  // dk_i = -p_i S z_i + D_ni dS u_i + sum_{j<i} d_write_ij k_j + sum_{j>i} d_write_ji k_j +
  // sum_{j>=i} d_read_ji q_j
  GRAFT_INLINE void keys(int64_t i) const {
    Panel<T, V> x;
    if (!ends.zero_start) {
      multiply<Left::kRows, Sign::kMinus>(x, shape.value_dim, of(z, i), of(b.state_t, 0, c));
      x.scale(chunk.from_start + i);
      x.add_dots(of(s.k, i, c), b.from_state + i);
    }
    if (!ends.zero_d_end) multiply(x, shape.value_dim, of(s.u_end, i), of(b.d_state_t, 0, c));
    multiply(x, i + kPanelRows, of(b.d_write, i), of(s.k, 0, c));
    multiply<Left::kColumns>(x, chunk.n - i, of(b.d_write, i, i), of(s.k, i, c));
    multiply<Left::kColumns>(x, chunk.n - i, of(b.d_read, i, i), of(s.q, i, c));
    x.store(from(dk, i, c));
  }

  GRAFT_INLINE void run() const {
    for_rows(
        chunk.n, [&](int64_t i) __attribute__((always_inline)) { queries(i); });
    for_rows(
        chunk.n, [&](int64_t i) __attribute__((always_inline)) { keys(i); });
  }
};

// Everything of a chunk that the forward pass had, but for what its backward pass has no use for.
template <class T, class E>
void reload_chunk(const HeadShape& shape, const HeadBackward<T, E>& io, int64_t index,
                  ChunkEnds ends, const Chunk<T>& chunk, const Scratch<T>& s) {
  load_gates(io.g, io.beta, chunk, s.e);
  load_rows(io.q, chunk, shape.key_dim, io.scale, s.q);
  load_rows(io.k, chunk, shape.key_dim, T(1), s.k);
  load_rows(io.err, chunk, shape.value_dim, T(1), s.err);
  for (int64_t i = 0; i < chunk.rows(); ++i) {
    for (int64_t c = 0; c < s.u.ld; c += kLanes<T>) {
      vec(s.u.row(i) + c) = chunk.beta[i] * vec(s.err.row(i) + c);
      vec(s.u_end.row(i) + c) = chunk.to_end[i] * vec(s.u.row(i) + c);
    }
  }
  if (!ends.zero_start)
    load_state(state_of(shape), io.borders + index * shape.state_size(), s.state);
  chunk_scores(shape, chunk, s);
}

template <class T, class E>
void backward_chunk(const HeadShape& shape, const HeadBackward<T, E>& io, int64_t index,
                    ChunkEnds ends, const Scratch<T>& s, const BackwardScratch<T>& b) {
  const Chunk<T> chunk = s.chunk(shape, index);
  const int64_t dk = shape.key_dim, dv = shape.value_dim;
  reload_chunk(shape, io, index, ends, chunk, s);
  const Matrix<const T> d_o = panels_of(io.d_o, chunk, dv, s.o);
  const Matrix<T> z = panels_for(io.dv, chunk, dv, b.z);
  fill_zero<T>(1, {b.from_state, chunk.rows()});
  fill_zero<T>(1, {b.to_state, chunk.rows()});
  fill_zero<T>(1, {b.dbeta, chunk.rows()});
  DecayGradient<T> x{b.from_state, b.to_state, 0, s.read};
  if (!ends.zero_start) transpose_state(state_of(shape), s.state, b.state_t);
  if (!ends.zero_d_end) transpose_state(state_of(shape), b.d_state, b.d_state_t);
  if (!ends.zero_start && !ends.zero_d_end)
    x.across = chunk.total() * dot(s.state.size(dv), s.state.data, b.d_state.data);

  for_columns<T>(dv, [&]<unsigned V>(int64_t c) {
    ValueGradients<T, V>{shape, chunk, s, b, d_o, z, ends, c}.run();
  });
  score_gradients(shape, chunk, s, b, d_o, z);
  const Matrix<T> dq = panels_for(io.dq, chunk, dk, b.dq),
                  dk_rows = panels_for(io.dk, chunk, dk, b.dk);
  for_columns<T>(dk, [&]<unsigned V>(int64_t c) {
    KeyGradients<T, V>{shape, chunk, s, b, d_o, z, dq, dk_rows, ends, io.scale, c}.run();
  });
  decay_gradient(chunk, x, b.range, io.dg);
  store<T, T>({b.dbeta, 1}, 0, chunk.n, 1, T(1),
              {io.dbeta.data + chunk.first * io.dbeta.stride, io.dbeta.stride});
  finish_panels(z, b.z, chunk, dv, io.dv);
  finish_panels(dq, b.dq, chunk, dk, io.dq);
  finish_panels(dk_rows, b.dk, chunk, dk, io.dk);
}

template <class T>
int64_t scratch_size(const HeadShape& shape, int64_t heads) {
  Carver<T> carve(nullptr);
  Scratch<T> forward(shape, carve);
  BackwardScratch<T> backward(shape, carve);
  States<T> states(state_of(shape), heads + 1, carve);
  return carve.used();
}

template <class T, class E>
void backward(const HeadShape& shape, const HeadBackward<T, E>* heads, int64_t count, T* scratch) {
  Carver<T> carve(scratch);
  Scratch<T> s(shape, carve);
  BackwardScratch<T> b(shape, carve);
  const States<T> d_states(state_of(shape), count, carve), state(state_of(shape), 1, carve);
  s.state = state.of(0);
  for (int64_t h = 0; h < count; ++h)
    load_state(state_of(shape), heads[h].d_state_out, d_states.of(h));
  const int64_t last = shape.chunks() - 1;
  for (int64_t index = last; index >= 0; --index) {
    for (int64_t h = 0; h < count; ++h) {
      const HeadBackward<T, E>& io = heads[h];
      const ChunkEnds ends{index == 0 && io.zero_state_in && io.d_state_in == nullptr,
                           index == last && io.d_state_out == nullptr};
      b.d_state = d_states.of(h);
      backward_chunk(shape, io, index, ends, s, b);
    }
  }
  for (int64_t h = 0; h < count; ++h) {
    if (heads[h].d_state_in != nullptr)
      store_state(state_of(shape), d_states.of(h), heads[h].d_state_in);
  }
}

// ------------------------------------------------------------------ step

// One token of a head, on plain numbers.
template <class T>
struct Token {
  const T *q, *k;  // q scaled
  T e, beta, q_k;  // q_k: q . k
};

// The value columns [c, c + V vectors): S^T k and S^T q in one pass over the state, then S = e S +
// k u^T with u = beta (v - e S^T k), and o = e S^T q + (q . k) u.
template <class T, unsigned V>
GRAFT_INLINE void step_columns(const HeadShape& shape, const Token<T>& t, const T* v, const T* in,
                               T* out, T* o) {
  const int64_t ld = shape.state_row();
  Vector<T> seen[2][V] = {},
            read[2][V] = {};  // even and odd keys: enough sums that none waits for another
  int64_t r = 0;
  for (; r + 2 <= shape.key_dim; r += 2) {
    for (unsigned odd = 0; odd < 2; ++odd) {
      for (unsigned x = 0; x < V; ++x) {
        const Vector<T> row = vec(in + (r + odd) * ld + x * kLanes<T>);
        seen[odd][x] += t.k[r + odd] * row;
        read[odd][x] += t.q[r + odd] * row;
      }
    }
  }
  Vector<T> u[V];
  for (unsigned x = 0; x < V; ++x) {
    if (r < shape.key_dim) {
      const Vector<T> row = vec(in + r * ld + x * kLanes<T>);
      seen[0][x] += t.k[r] * row;
      read[0][x] += t.q[r] * row;
    }
    u[x] = t.beta * (vec(v + x * kLanes<T>) - t.e * (seen[0][x] + seen[1][x]));
    vec(o + x * kLanes<T>) = t.e * (read[0][x] + read[1][x]) + t.q_k * u[x];
  }
  for (r = 0; r < shape.key_dim; ++r) {
    for (unsigned x = 0; x < V; ++x)
      vec(out + r * ld + x * kLanes<T>) = t.e * vec(in + r * ld + x * kLanes<T>) + t.k[r] * u[x];
  }
}

// The same for one value column: what is left of a row that is no whole number of vectors.
template <class T>
void step_column(const HeadShape& shape, const Token<T>& t, T v, const T* in, T* out, T* o) {
  const int64_t ld = shape.state_row();
  T seen = 0, read = 0;
  for (int64_t r = 0; r < shape.key_dim; ++r) {
    seen += t.k[r] * in[r * ld];
    read += t.q[r] * in[r * ld];
  }
  const T u = t.beta * (v - t.e * seen);
  *o = t.e * read + t.q_k * u;
  for (int64_t r = 0; r < shape.key_dim; ++r) out[r * ld] = t.e * in[r * ld] + t.k[r] * u;
}

template <class T>
void step_token(const HeadShape& shape, const Token<T>& t, const T* v, const T* in, T* out, T* o) {
  constexpr int64_t kWide = 4 * kLanes<T>;
  int64_t c = 0;
  for (; c + kWide <= shape.value_dim; c += kWide)
    step_columns<T, 4>(shape, t, v + c, in + c, out + c, o + c);
  for (; c + kLanes<T> <= shape.value_dim; c += kLanes<T>)
    step_columns<T, 1>(shape, t, v + c, in + c, out + c, o + c);
  for (; c < shape.value_dim; ++c) step_column(shape, t, v[c], in + c, out + c, o + c);
}

template <class T>
void copy_state(const HeadShape& shape, const T* in, T* out, int64_t out_row) {
  for (int64_t i = 0; i < shape.key_dim; ++i) {
    for (int64_t c = 0; c < shape.value_dim; ++c)
      out[i * out_row + c] = in == nullptr ? T(0) : in[i * shape.state_row() + c];
  }
}

template <class T, class E>
void step(const HeadShape& given, const HeadForward<T, E>& io, T* scratch) {
  Carver<T> carve(scratch);
  Scratch<T> s(given, carve);
  s.state = States<T>(state_of(given), 1, carve).of(0);
  HeadShape shape = given;
  const T* in = io.state_in;
  T* out = io.state_out;
  if (out == nullptr) {  // then it is updated in scratch
    copy_state(given, in, s.state.data, given.value_dim);
    shape.state_stride = 0;
    in = out = s.state.data;
  } else if (in == nullptr || shape.tokens == 0) {
    if (in != out) copy_state(given, in, out, given.state_row());
    in = out;
  }
  for (int64_t i = 0; i < shape.tokens; ++i, in = out) {
    load(io.q, i, 1, shape.key_dim, io.scale, s.q);
    load(io.k, i, 1, shape.key_dim, T(1), s.k);
    load(io.v, i, 1, shape.value_dim, T(1), s.v);
    const Token<T> token{s.q.data, s.k.data, VectorOf<T>::exp(io.g.data[i * io.g.stride]),
                         io.beta.data[i * io.beta.stride], dot(s.q.ld, s.q.data, s.k.data)};
    step_token(shape, token, s.v.data, in, out, s.o.data);
    store<T, E>(s.o, 0, 1, shape.value_dim, T(1), {io.o.data + i * io.o.stride, io.o.stride});
  }
}

}  // namespace
}  // namespace graft::gdn::GRAFT_ISA
