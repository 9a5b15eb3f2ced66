// Linear attention as linear.h has it, for one instruction set; see vector-inl.h and chunk-inl.h.
#pragma once

#include "chunk-inl.h"
#include "linear.h"

namespace graft::linear::GRAFT_ISA {
namespace {

using namespace kernels::GRAFT_ISA;

// S alone; z lies in the last column of the callers' states and in a row of ours.
inline StateShape state_of(const HeadShape& s) { return {s.features, s.value_dim, s.state_row()}; }

// ------------------------------------------------------------------ feature maps

// One of the two maps: weights as the products want them, [rows, head_dim] and its transpose,
// padded.
template <class T>
struct Map {
  Matrix<T> weight, weight_t;
  T* bias;
  int64_t rows, columns;

  Map(const HeadShape& s, Carver<T>& carve)
      : rows(s.maps ? s.features / 2 : 0), columns(s.head_dim) {
    weight = carve.matrix(padded_rows<T>(rows), padded_rows<T>(s.maps ? columns : 0));
    weight_t = carve.matrix(padded_rows<T>(s.maps ? columns : 0), padded_rows<T>(rows));
    bias = carve.row(padded_rows<T>(rows));
  }
  void load_weights(const FeatureMap<T>& map) const {
    if (rows == 0) return;
    fill_zero(padded_rows<T>(rows), weight);
    load<T, T>({map.weight, columns}, 0, rows, columns, T(1), weight);
    transpose_padded(rows, columns, weight, weight_t);
    for (int64_t r = 0; r < padded_rows<T>(rows); ++r)
      bias[r] = r < rows && map.bias != nullptr ? map.bias[r] : T(0);
  }
};

template <class T>
inline T largest_size(int64_t n, const T* x) {
  Vector<T> most = {};
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) {
    const Vector<T> size = vec(x + i) < T(0) ? -vec(x + i) : vec(x + i);
    most = size > most ? size : most;
  }
  T all = largest<T>(most);
  for (; i < n; ++i) {
    const T size = x[i] < 0 ? -x[i] : x[i];
    all = size > all ? size : all;
  }
  return all;
}

// [exp(z - m), exp(-z - m)] / their sum into out [2 n], m = max |z|.
template <class T>
void softmax_of_both_signs(int64_t n, const T* z, T* out) {
  const T most = largest_size(n, z);
  int64_t i = 0;
  Vector<T> sums = {};
  for (; i + kLanes<T> <= n; i += kLanes<T>) {
    const Vector<T> plus = exp(vec(z + i) - most), minus = exp(-vec(z + i) - most);
    vec(out + i) = plus;
    vec(out + n + i) = minus;
    sums += plus + minus;
  }
  T total = sum<T>(sums);
  for (; i < n; ++i) {
    out[i] = VectorOf<T>::exp(z[i] - most);
    out[n + i] = VectorOf<T>::exp(-z[i] - most);
    total += out[i] + out[n + i];
  }
  const T share = T(1) / total;
  for (i = 0; i + kLanes<T> <= 2 * n; i += kLanes<T>) vec(out + i) *= share;
  for (; i < 2 * n; ++i) out[i] *= share;
}

// out = max(in, floor), n numbers
template <class T>
inline void raise_to(int64_t n, T floor, const T* in, T* out) {
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) {
    const Vector<T> x = vec(in + i);
    vec(out + i) = x < floor ? Vector<T>{} + floor : x;
  }
  for (; i < n; ++i) out[i] = in[i] < floor ? floor : in[i];
}

// W u + b of a chunk's rows, padded, into z.
template <class T>
void map_rows(const HeadShape& shape, const Chunk<T>& chunk, const Map<T>& map, Matrix<T> u,
              Matrix<T> z) {
  for_columns<T>(
      map.rows, [&]<unsigned V>(int64_t c) __attribute__((always_inline)) {
        for_rows(
            chunk.rows(), [&](int64_t i) __attribute__((always_inline)) {
              Panel<T, V> x;
              multiply(x, shape.head_dim, of(u, i), of(map.weight_t, 0, c));
              x.add_row(map.bias + c);
              x.store(from(z, i, c));
            });
      });
}

// The features of a chunk from its rows u: the softmax in `soft`, with the floor in `phi` (which
// may be `soft`). Rows behind the chunk's are 0.
template <class T>
void features(const HeadShape& shape, const Chunk<T>& chunk, const Map<T>& map, T floor,
              Matrix<T> u, Matrix<T> z, Matrix<T> soft, Matrix<T> phi) {
  map_rows(shape, chunk, map, u, z);
  for (int64_t i = 0; i < chunk.rows(); ++i) {
    T *p = soft.row(i), *out = phi.row(i);
    if (i < chunk.n) {
      softmax_of_both_signs(map.rows, z.row(i), p);
      raise_to(shape.features, floor, p, out);
    }
    for (int64_t c = i < chunk.n ? shape.features : 0; c < phi.ld; ++c) p[c] = out[c] = 0;
  }
}

// ------------------------------------------------------------------ one chunk

template <class T>
struct Scratch {
  State<T> state;  // of the head at hand, and its z; not carved here
  T* z;
  Map<T> map_q, map_k;
  Matrix<T> u, logits, q, k, k_t, v, v_end, o, read, decay;
  T *from_start, *to_end, *dt, *e, *norm, *inverse_norm;

  Scratch(const HeadShape& s, Carver<T>& carve) : map_q(s, carve), map_k(s, carve) {
    const int64_t c = padded_rows<T>(s.chunk), f = padded_rows<T>(s.features),
                  v_ = padded_rows<T>(s.value_dim);
    u = carve.matrix(c, padded_rows<T>(s.head_dim));
    logits = carve.matrix(c, padded_rows<T>(s.features / 2));
    q = carve.matrix(c, f);
    k = carve.matrix(c, f);
    k_t = carve.matrix(f, c);
    v = carve.matrix(c, v_);
    v_end = carve.matrix(c, 2 * kLanes<T>);
    o = carve.matrix(c, v_);
    read = carve.matrix(c, c);
    decay = carve.matrix(c, c);
    from_start = carve.row(c);
    to_end = carve.row(c);
    dt = carve.row(c);
    e = carve.row(c);
    norm = carve.row(c);
    inverse_norm = carve.row(c);
  }

  Chunk<T> chunk(const HeadShape& s, int64_t index) const {
    const int64_t first = index * s.chunk;
    const int64_t left = s.tokens - first;
    return {first, left < s.chunk ? left : s.chunk, from_start, to_end, dt, decay};
  }
};

// States and z of several heads.
template <class T>
struct HeadStates {
  States<T> s;
  T* z;
  int64_t z_size;

  HeadStates(const HeadShape& shape, int64_t heads, Carver<T>& carve)
      : s(kernels::GRAFT_ISA::States<T>(state_of(shape), heads, carve)),
        z_size(padded_rows<T>(shape.features)) {
    z = carve.row(heads * z_size);
  }
  T* z_of(int64_t head) const { return z + head * z_size; }
};

template <class T>
void load_head_state(const HeadShape& shape, const T* given, State<T> s, T* z) {
  load_state(state_of(shape), given, s);
  for (int64_t f = 0; f < padded_rows<T>(shape.features); ++f) {
    const bool has = given != nullptr && shape.normalise && f < shape.features;
    z[f] = has ? given[f * shape.state_row() + shape.value_dim] : T(0);
  }
}
template <class T>
void store_head_state(const HeadShape& shape, State<T> s, const T* z, T* out) {
  store_state(state_of(shape), s, out);
  if (!shape.normalise) return;
  for (int64_t f = 0; f < shape.features; ++f) out[f * shape.state_row() + shape.value_dim] = z[f];
}

// D_ij phi_q(q_i) . phi_k(k_j), on and below the diagonal, into s.read.
template <class T>
void chunk_scores(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s) {
  transpose_padded(chunk.rows(), shape.features, s.k, s.k_t);
  for_columns<T>(
      chunk.rows(), [&]<unsigned V>(int64_t c) __attribute__((always_inline)) {
        for (int64_t i = c / kPanelRows * kPanelRows; i < chunk.rows(); i += kPanelRows) {
          Panel<T, V> x;
          multiply(x, shape.features, of(s.q, i), of(s.k_t, 0, c));
          x.multiply_by(of(s.decay, i, c));
          x.store(from(s.read, i, c));
        }
      });
}

// Queries and keys of a chunk as features, in s.q and s.k.
template <class T, class Call>
void load_features(const HeadShape& shape, const Call& io, const Chunk<T>& chunk,
                   const Scratch<T>& s) {
  if (!shape.maps) {
    load_rows(io.q, chunk, shape.features, T(1), s.q);
    load_rows(io.k, chunk, shape.features, T(1), s.k);
    return;
  }
  load_rows(io.q, chunk, shape.head_dim, T(1), s.u);
  features(shape, chunk, s.map_q, io.floor, s.u, s.logits, s.q, s.q);
  load_rows(io.k, chunk, shape.head_dim, T(1), s.u);
  features(shape, chunk, s.map_k, io.floor, s.u, s.logits, s.k, s.k);
}

// ------------------------------------------------------------------ forward

// norm_i = p_i z_0 . phi_q(q_i) + sum_{j<=i} w_ij + eps, from s.read that holds the w_ij.
template <class T>
void chunk_norms(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s, T eps) {
  const int64_t f = padded_rows<T>(shape.features);
  for (int64_t i = 0; i < chunk.rows(); ++i) {
    Vector<T> sums = {};
    for (int64_t c = 0; c <= i; c += kLanes<T>) sums += vec(s.read.row(i) + c);
    s.norm[i] = chunk.from_start[i] * dot(f, s.z, s.q.row(i)) + sum<T>(sums) + eps;
    s.inverse_norm[i] = i < chunk.n ? T(1) / s.norm[i] : T(0);
  }
}

// z at the chunk's end.
template <class T>
void advance_z(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s) {
  for (int64_t f = 0; f < padded_rows<T>(shape.features); f += kLanes<T>) {
    Vector<T> x = chunk.total() * vec(s.z + f);
    for (int64_t j = 0; j < chunk.n; ++j)
      x += (chunk.to_end[j] * chunk.beta[j]) * vec(s.k.row(j) + f);
    vec(s.z + f) = x;
  }
}

// The value columns from c on of what a chunk computes: no column depends on another.
template <class T, unsigned V>
struct ValueColumns {
  const HeadShape& shape;
  const Chunk<T>& chunk;
  const Scratch<T>& s;
  Matrix<const T> v;
  Matrix<T> o;
  bool zero_state;
  int64_t c;

  GRAFT_INLINE void run() const {
    for_rows(
        chunk.n, [&](int64_t i) __attribute__((always_inline)) {
          Panel<T, V> x;
          if (!zero_state) {
            multiply(x, shape.features, of(s.q, i), of(s.state.columns(c)));
            x.scale(chunk.from_start + i);
          }
          multiply(x, i + kPanelRows, of(s.read, i), {v.data + c, v.ld});
          if (shape.normalise) x.scale(s.inverse_norm + i);
          x.store(from(o, i, c));
        });
    for (int64_t j = 0; j < chunk.n; ++j) {
      for (unsigned x = 0; x < V; ++x) {
        vec(s.v_end.row(j) + x * kLanes<T>) =
            (chunk.to_end[j] * chunk.beta[j]) * vec(v.data + j * v.ld + c + x * kLanes<T>);
      }
    }
    for_rows(
        shape.features, [&](int64_t r) __attribute__((always_inline)) {
          Panel<T, V> x;
          if (!zero_state) {
            x.load(of(s.state.columns(c), r));
            x.scale_all(chunk.total());
          }
          multiply(x, chunk.n, of(s.k_t, r), of(s.v_end));
          x.store(from(s.state.columns(c), r));
        });
  }
};

template <class T, class E>
void forward_chunk(const HeadShape& shape, const HeadForward<T, E>& io, int64_t index,
                   bool zero_state, const Scratch<T>& s) {
  const Chunk<T> chunk = s.chunk(shape, index);
  const int64_t dv = shape.value_dim;
  load_gates(io.g, io.dt, chunk, s.e);
  load_features(shape, io, chunk, s);
  chunk_scores(shape, chunk, s);
  if (io.dt.data != nullptr) {
    for (int64_t i = 0; i < chunk.rows(); ++i) {
      for (int64_t c = 0; c < chunk.rows(); c += kLanes<T>)
        vec(s.read.row(i) + c) *= vec(chunk.beta + c);
    }
  }
  if (shape.normalise) {
    chunk_norms(shape, chunk, s, io.eps);
    advance_z(shape, chunk, s);
    if (io.norm.data != nullptr)
      store<T, T>({s.norm, 1}, 0, chunk.n, 1, T(1),
                  {io.norm.data + chunk.first * io.norm.stride, io.norm.stride});
  }
  const Matrix<const T> v = panels_of(io.v, chunk, dv, s.v);
  const Matrix<T> o = panels_for(io.o, chunk, dv, s.o);
  for_columns<T>(dv, [&]<unsigned V>(int64_t c) {
    ValueColumns<T, V>{shape, chunk, s, v, o, zero_state, c}.run();
  });
  finish_panels(o, s.o, chunk, dv, io.o);
  if (io.o_kept.data != nullptr) store(o, chunk.first, chunk.n, dv, T(1), io.o_kept);
}

template <class T, class E>
void forward(const HeadShape& shape, const HeadForward<T, E>* heads, int64_t count, T* scratch) {
  Carver<T> carve(scratch);
  Scratch<T> s(shape, carve);
  const HeadStates<T> states(shape, count, carve);
  for (int64_t h = 0; h < count; ++h)
    load_head_state(shape, heads[h].state_in, states.s.of(h), states.z_of(h));
  for (int64_t index = 0; index < shape.chunks(); ++index) {
    for (int64_t h = 0; h < count; ++h) {
      const HeadForward<T, E>& io = heads[h];
      s.state = states.s.of(h);
      s.z = states.z_of(h);
      s.map_q.load_weights(io.map_q);
      s.map_k.load_weights(io.map_k);
      if (io.borders != nullptr)
        store_head_state(shape, s.state, s.z, io.borders + index * shape.state_size());
      forward_chunk(shape, io, index, index == 0 && io.state_in == nullptr, s);
    }
  }
  for (int64_t h = 0; h < count; ++h) {
    if (heads[h].state_out != nullptr)
      store_head_state(shape, states.s.of(h), states.z_of(h), heads[h].state_out);
  }
}

// ------------------------------------------------------------------ backward

template <class T>
struct BackwardScratch {
  State<T> d_state;  // of the head at hand, and that of z; not carved here
  T* d_z;
  Matrix<T> u_q, u_k, soft_q, soft_k, v_t, dn, decayed_dn, state_t, d_state_t, dv, d_read, d_phi,
      d_logits, d_u;
  T *d_norm, *d_norm_decayed, *weight_end, *from_state, *to_state, *range, *d_dt;

  BackwardScratch(const HeadShape& s, Carver<T>& carve) {
    const int64_t c = padded_rows<T>(s.chunk), f = padded_rows<T>(s.features),
                  v = padded_rows<T>(s.value_dim);
    const int64_t mapped = s.maps ? c : 0;
    u_q = carve.matrix(mapped, padded_rows<T>(s.head_dim));
    u_k = carve.matrix(mapped, padded_rows<T>(s.head_dim));
    soft_q = carve.matrix(mapped, f);
    soft_k = carve.matrix(mapped, f);
    v_t = carve.matrix(v, c);
    dn = carve.matrix(c, v);
    decayed_dn = carve.matrix(c, 2 * kLanes<T>);
    state_t = carve.matrix(v, f);
    d_state_t = carve.matrix(v, f);
    dv = carve.matrix(c, v);
    d_read = carve.matrix(c, c);
    d_phi = carve.matrix(c, f);
    d_logits = carve.matrix(c, padded_rows<T>(s.features / 2));
    d_u = carve.matrix(c, padded_rows<T>(s.head_dim));
    d_norm = carve.row(c);
    d_norm_decayed = carve.row(c);
    weight_end = carve.row(c);
    from_state = carve.row(c);
    to_state = carve.row(c);
    range = carve.row(c);
    d_dt = carve.row(c);
  }
};

// The gradients of numerators and normalisers: dn_i = d_o_i / norm_i, d_norm_i = -(d_o_i . o_i) /
// norm_i.
template <class T, class E>
void output_gradients(const HeadShape& shape, const HeadBackward<T, E>& io, const Chunk<T>& chunk,
                      const Scratch<T>& s, const BackwardScratch<T>& b) {
  load_rows(io.d_o, chunk, shape.value_dim, T(1), b.dn);
  if (shape.normalise) load_rows(io.o, chunk, shape.value_dim, T(1), s.o);
  for (int64_t i = 0; i < chunk.rows(); ++i) {
    b.d_norm[i] = b.d_norm_decayed[i] = 0;
    if (!shape.normalise || i >= chunk.n) continue;
    const T inverse = T(1) / io.norm.data[(chunk.first + i) * io.norm.stride];
    b.d_norm[i] = -inverse * dot(b.dn.ld, b.dn.row(i), s.o.row(i));
    b.d_norm_decayed[i] = chunk.from_start[i] * b.d_norm[i];
    for (int64_t c = 0; c < b.dn.ld; c += kLanes<T>) vec(b.dn.row(i) + c) *= inverse;
  }
}

// The value columns from c on: dv, and dS at the chunk's start.
template <class T, unsigned V>
struct ValueGradients {
  const HeadShape& shape;
  const Chunk<T>& chunk;
  const Scratch<T>& s;
  const BackwardScratch<T>& b;
  Matrix<T> dv;
  ChunkEnds ends;
  int64_t c;

  // dv_j = dt_j (to_end_j dS^T k_j + sum_{i>=j} read_ij dn_i); to_state gets to_end_j k_j . dS v_j.
  GRAFT_INLINE void values(int64_t j) const {
    Panel<T, V> x;
    if (!ends.zero_d_end) {
      multiply(x, shape.features, of(s.k, j), of(b.d_state.columns(c)));
      x.scale(chunk.to_end + j);
      x.add_dots(of(s.v, j, c), b.to_state + j);
    }
    multiply<Left::kColumns>(x, chunk.n - j, of(s.read, j, j), of(b.dn, j, c));
    x.scale(chunk.beta + j);
    x.store(from(dv, j, c));
  }
  GRAFT_INLINE void retreat(int64_t r) const {
    Panel<T, V> x;
    if (!ends.zero_d_end) {
      x.load(of(b.d_state.columns(c), r));
      x.scale_all(chunk.total());
    }
    multiply<Left::kColumns>(x, chunk.n, of(s.q, 0, r), of(b.decayed_dn));
    x.store(from(b.d_state.columns(c), r));
  }
  GRAFT_INLINE void run() const {
    for_rows(
        chunk.n, [&](int64_t j) __attribute__((always_inline)) { values(j); });
    if (ends.zero_start) return;
    for (int64_t i = 0; i < chunk.n; ++i) {
      for (unsigned x = 0; x < V; ++x)
        vec(b.decayed_dn.row(i) + x * kLanes<T>) =
            chunk.from_start[i] * vec(b.dn.row(i) + c + x * kLanes<T>);
    }
    for_rows(
        shape.features, [&](int64_t r) __attribute__((always_inline)) { retreat(r); });
  }
};

// With G_ij = dn_i . v_j + d_norm_i, the gradient of w_ij: d_read = G D dt, the gradient of the
// features' products; in s.read the X_ij = G read dt of DecayGradient; and each dt_j gets sum_i
// G_ij read_ij.
template <class T>
void score_gradients(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s,
                     const BackwardScratch<T>& b) {
  transpose_padded(chunk.rows(), shape.value_dim, s.v, b.v_t);
  for_columns<T>(
      chunk.rows(), [&]<unsigned V>(int64_t c) __attribute__((always_inline)) {
        Vector<T> column[V] = {};
        for (int64_t i = c / kPanelRows * kPanelRows; i < chunk.rows(); i += kPanelRows) {
          Panel<T, V> x;
          multiply(x, shape.value_dim, of(b.dn, i), of(b.v_t, 0, c));
#pragma GCC unroll 8
          for (unsigned r = 0; r < kPanelRows; ++r) {
            for (unsigned v = 0; v < V; ++v) {
              const int64_t at = c + v * kLanes<T>;
              const Vector<T> g = x.at[r][v] + b.d_norm[i + r];
              const Vector<T> product = g * vec(s.read.row(i + r) + at);
              column[v] += product;
              vec(s.read.row(i + r) + at) = product * vec(chunk.beta + at);
              vec(b.d_read.row(i + r) + at) =
                  g * vec(chunk.decay.row(i + r) + at) * vec(chunk.beta + at);
            }
          }
        }
        for (unsigned v = 0; v < V; ++v) vec(b.d_dt + c + v * kLanes<T>) += column[v];
      });
}

// Feature columns from c on of the gradients of phi_q (`queries`) or phi_k.
template <class T, unsigned V>
struct FeatureGradients {
  const HeadShape& shape;
  const Chunk<T>& chunk;
  const Scratch<T>& s;
  const BackwardScratch<T>& b;
  ChunkEnds ends;
  int64_t c;

  // p_i (S_0 dn_i + d_norm_i z_0) + sum_{j<=i} d_read_ij phi_k(k_j)
  GRAFT_INLINE void queries(int64_t i) const {
    Panel<T, V> x;
    if (!ends.zero_start) {
      multiply(x, shape.value_dim, of(b.dn, i), of(b.state_t, 0, c));
      if (shape.normalise) x.add_outer(b.d_norm + i, s.z + c);
      x.scale(chunk.from_start + i);
      x.add_dots(of(s.q, i, c), b.from_state + i);
    }
    multiply(x, i + kPanelRows, of(b.d_read, i), of(s.k, 0, c));
    x.store(from(b.d_phi, i, c));
  }
  // to_end_j dt_j (dS v_j + d_z) + sum_{i>=j} d_read_ij phi_q(q_i)
  GRAFT_INLINE void keys(int64_t j) const {
    Panel<T, V> x;
    if (!ends.zero_d_end) {
      multiply(x, shape.value_dim, of(s.v, j), of(b.d_state_t, 0, c));
      if (shape.normalise) x.add_row(b.d_z + c);
      x.scale(b.weight_end + j);
    }
    multiply<Left::kColumns>(x, chunk.n - j, of(b.d_read, j, j), of(s.q, j, c));
    x.store(from(b.d_phi, j, c));
  }
};

// Through the floor and the softmax: d_logits = d[W u + b] from d_phi.
template <class T>
void softmax_gradient(const HeadShape& shape, const Chunk<T>& chunk, T floor, Matrix<T> soft,
                      Matrix<T> d_phi, Matrix<T> d_logits) {
  const int64_t n = shape.features / 2;
  for (int64_t i = 0; i < chunk.rows(); ++i) {
    const T* p = soft.row(i);
    T *d = d_phi.row(i), *out = d_logits.row(i);
    int64_t c = 0;
    Vector<T> products = {};
    for (; c + kLanes<T> <= shape.features; c += kLanes<T>) {
      const Vector<T> kept = vec(p + c) >= floor ? vec(d + c) : Vector<T>{};
      vec(d + c) = kept;
      products += vec(p + c) * kept;
    }
    T mean = sum<T>(products);
    for (; c < shape.features; ++c) {
      d[c] = p[c] >= floor ? d[c] : T(0);
      mean += p[c] * d[c];
    }
    for (c = 0; c < n; ++c) out[c] = p[c] * (d[c] - mean) - p[n + c] * (d[n + c] - mean);
    for (int64_t c = n; c < d_logits.ld; ++c) out[c] = 0;
  }
}

// From the gradients of the features to those of the rows u, of W and of b; the last two are added
// to.
template <class T>
void map_gradients(const HeadShape& shape, const Chunk<T>& chunk, const BackwardScratch<T>& b,
                   const Map<T>& map, Matrix<T> u, T* d_weight, T* d_bias) {
  for_columns<T>(
      shape.head_dim, [&]<unsigned V>(int64_t c) __attribute__((always_inline)) {
        for_rows(
            chunk.n, [&](int64_t i) __attribute__((always_inline)) {
              Panel<T, V> x;
              multiply(x, map.rows, of(b.d_logits, i), of(map.weight, 0, c));
              x.store(from(b.d_u, i, c));
            });
        for_rows(
            map.rows, [&](int64_t r) __attribute__((always_inline)) {
              Panel<T, V> x;
              multiply<Left::kColumns>(x, chunk.n, of(b.d_logits, 0, r), of(u, 0, c));
              T block[kPanelRows * 2 * kLanes<T>];
              x.store({block, 2 * kLanes<T>});
              for (int64_t row = r; row < r + kPanelRows && row < map.rows; ++row) {
                for (int64_t column = c; column < c + V * kLanes<T> && column < shape.head_dim;
                     ++column)
                  d_weight[row * shape.head_dim + column] +=
                      block[(row - r) * 2 * kLanes<T> + column - c];
              }
            });
      });
  if (d_bias == nullptr) return;
  for (int64_t i = 0; i < chunk.n; ++i) {
    for (int64_t r = 0; r < map.rows; ++r) d_bias[r] += b.d_logits.row(i)[r];
  }
}

// Everything of a chunk that the forward pass had, with the softmax before its floor.
template <class T, class E>
void reload_chunk(const HeadShape& shape, const HeadBackward<T, E>& io, int64_t index,
                  ChunkEnds ends, const Chunk<T>& chunk, const Scratch<T>& s,
                  const BackwardScratch<T>& b) {
  load_gates(io.g, io.dt, chunk, s.e);
  if (shape.maps) {
    s.map_q.load_weights(io.map_q);
    s.map_k.load_weights(io.map_k);
    load_rows(io.q, chunk, shape.head_dim, T(1), b.u_q);
    features(shape, chunk, s.map_q, io.floor, b.u_q, s.logits, b.soft_q, s.q);
    load_rows(io.k, chunk, shape.head_dim, T(1), b.u_k);
    features(shape, chunk, s.map_k, io.floor, b.u_k, s.logits, b.soft_k, s.k);
  } else {
    load_rows(io.q, chunk, shape.features, T(1), s.q);
    load_rows(io.k, chunk, shape.features, T(1), s.k);
  }
  load_rows(io.v, chunk, shape.value_dim, T(1), s.v);
  if (!ends.zero_start)
    load_head_state(shape, io.borders + index * shape.state_size(), s.state, s.z);
  chunk_scores(shape, chunk, s);
  for (int64_t j = 0; j < chunk.rows(); ++j) b.weight_end[j] = chunk.to_end[j] * chunk.beta[j];
}

// d_z at the chunk's start.
template <class T>
void retreat_z(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s,
               const BackwardScratch<T>& b) {
  for (int64_t f = 0; f < padded_rows<T>(shape.features); f += kLanes<T>) {
    Vector<T> x = chunk.total() * vec(b.d_z + f);
    for (int64_t i = 0; i < chunk.n; ++i) x += b.d_norm_decayed[i] * vec(s.q.row(i) + f);
    vec(b.d_z + f) = x;
  }
}

// What the decays, dt and the state's ends are owed beyond the sums inside the chunk; before dS
// moves on.
template <class T>
T across_chunk(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s,
               const BackwardScratch<T>& b) {
  const T z = shape.normalise ? dot(padded_rows<T>(shape.features), s.z, b.d_z) : T(0);
  return chunk.total() * (dot(s.state.size(shape.value_dim), s.state.data, b.d_state.data) + z);
}

template <class T, class E>
void store_feature_gradients(const HeadShape& shape, const HeadBackward<T, E>& io,
                             const Chunk<T>& chunk, const Scratch<T>& s,
                             const BackwardScratch<T>& b, bool queries) {
  const Rows<E> out = queries ? io.dq : io.dk;
  if (!shape.maps) return store(b.d_phi, chunk.first, chunk.n, shape.features, T(1), out);
  softmax_gradient(shape, chunk, io.floor, queries ? b.soft_q : b.soft_k, b.d_phi, b.d_logits);
  map_gradients(shape, chunk, b, queries ? s.map_q : s.map_k, queries ? b.u_q : b.u_k,
                queries ? io.d_weight_q : io.d_weight_k, queries ? io.d_bias_q : io.d_bias_k);
  store(b.d_u, chunk.first, chunk.n, shape.head_dim, T(1), out);
}

// The gradients of g and dt.
template <class T, class E>
void store_gate_gradients(const HeadShape& shape, const HeadBackward<T, E>& io,
                          const Chunk<T>& chunk, T across, const Scratch<T>& s,
                          const BackwardScratch<T>& b, ChunkEnds ends) {
  for (int64_t j = 0; j < chunk.n; ++j) {  // to_state holds to_end_j k_j . dS v_j so far
    if (shape.normalise && !ends.zero_d_end)
      b.to_state[j] += chunk.to_end[j] * dot(padded_rows<T>(shape.features), s.k.row(j), b.d_z);
    b.d_dt[j] += b.to_state[j];
    b.to_state[j] *= chunk.beta[j];
  }
  if (io.g.data != nullptr)
    decay_gradient(chunk, DecayGradient<T>{b.from_state, b.to_state, across, s.read}, b.range,
                   io.dg);
  if (io.dt.data != nullptr)
    store<T, T>({b.d_dt, 1}, 0, chunk.n, 1, T(1),
                {io.ddt.data + chunk.first * io.ddt.stride, io.ddt.stride});
}

template <class T, class E>
void backward_chunk(const HeadShape& shape, const HeadBackward<T, E>& io, int64_t index,
                    ChunkEnds ends, const Scratch<T>& s, const BackwardScratch<T>& b) {
  const Chunk<T> chunk = s.chunk(shape, index);
  const int64_t dv = shape.value_dim;
  reload_chunk(shape, io, index, ends, chunk, s, b);
  output_gradients(shape, io, chunk, s, b);
  fill_zero<T>(1, {b.from_state, chunk.rows()});
  fill_zero<T>(1, {b.to_state, chunk.rows()});
  fill_zero<T>(1, {b.d_dt, chunk.rows()});
  if (!ends.zero_start) transpose_state(state_of(shape), s.state, b.state_t);
  if (!ends.zero_d_end) transpose_state(state_of(shape), b.d_state, b.d_state_t);
  const T across = ends.zero_start || ends.zero_d_end ? T(0) : across_chunk(shape, chunk, s, b);

  const Matrix<T> dv_rows = panels_for(io.dv, chunk, dv, b.dv);
  for_columns<T>(dv, [&]<unsigned V>(int64_t c) {
    ValueGradients<T, V>{shape, chunk, s, b, dv_rows, ends, c}.run();
  });
  finish_panels(dv_rows, b.dv, chunk, dv, io.dv);
  score_gradients(shape, chunk, s, b);
  for_columns<T>(shape.features, [&]<unsigned V>(int64_t c) {
    const FeatureGradients<T, V> part{shape, chunk, s, b, ends, c};
    for_rows(
        chunk.n, [&](int64_t i) __attribute__((always_inline)) { part.queries(i); });
  });
  store_feature_gradients(shape, io, chunk, s, b, true);
  for_columns<T>(shape.features, [&]<unsigned V>(int64_t c) {
    const FeatureGradients<T, V> part{shape, chunk, s, b, ends, c};
    for_rows(
        chunk.n, [&](int64_t j) __attribute__((always_inline)) { part.keys(j); });
  });
  store_feature_gradients(shape, io, chunk, s, b, false);
  store_gate_gradients(shape, io, chunk, across, s, b, ends);
  if (shape.normalise && !ends.zero_start) retreat_z(shape, chunk, s, b);
}

template <class T>
int64_t scratch_size(const HeadShape& shape, int64_t heads) {
  Carver<T> carve(nullptr);
  Scratch<T> forward(shape, carve);
  BackwardScratch<T> backward(shape, carve);
  HeadStates<T> states(shape, heads + 1, carve);
  return carve.used();
}

template <class T, class E>
void backward(const HeadShape& shape, const HeadBackward<T, E>* heads, int64_t count, T* scratch) {
  Carver<T> carve(scratch);
  Scratch<T> s(shape, carve);
  BackwardScratch<T> b(shape, carve);
  const HeadStates<T> d_states(shape, count, carve), state(shape, 1, carve);
  s.state = state.s.of(0);
  s.z = state.z_of(0);
  for (int64_t h = 0; h < count; ++h)
    load_head_state(shape, heads[h].d_state_out, d_states.s.of(h), d_states.z_of(h));
  const int64_t last = shape.chunks() - 1;
  for (int64_t index = last; index >= 0; --index) {
    for (int64_t h = 0; h < count; ++h) {
      const HeadBackward<T, E>& io = heads[h];
      const ChunkEnds ends{index == 0 && io.zero_state_in && io.d_state_in == nullptr,
                           index == last && io.d_state_out == nullptr};
      b.d_state = d_states.s.of(h);
      b.d_z = d_states.z_of(h);
      backward_chunk(shape, io, index, ends, s, b);
    }
  }
  for (int64_t h = 0; h < count; ++h) {
    if (heads[h].d_state_in != nullptr)
      store_head_state(shape, d_states.s.of(h), d_states.z_of(h), heads[h].d_state_in);
  }
}

// ------------------------------------------------------------------ step

// phi of one row, into `phi`; `logits` has room for half as many numbers.
template <class T, class E>
void step_features(const HeadShape& shape, const FeatureMap<T>& map, T floor, Rows<const E> row,
                   int64_t t, Matrix<T> u, T* logits, T* phi) {
  if (!shape.maps)
    return load(row, t, 1, shape.features, T(1), Matrix<T>{phi, padded<T>(shape.features)});
  load(row, t, 1, shape.head_dim, T(1), u);
  const int64_t n = shape.features / 2;
  for (int64_t r = 0; r < n; ++r) {
    const T* weight = map.weight + r * shape.head_dim;
    Vector<T> sums = {};
    int64_t c = 0;
    for (; c + kLanes<T> <= shape.head_dim; c += kLanes<T>)
      sums += vec(weight + c) * vec(u.data + c);
    T total = sum<T>(sums) + (map.bias == nullptr ? T(0) : map.bias[r]);
    for (; c < shape.head_dim; ++c) total += weight[c] * u.data[c];
    logits[r] = total;
  }
  softmax_of_both_signs(n, logits, phi);
  raise_to(shape.features, floor, phi, phi);
}

// One token: S and, as its last column, z. v has a 1 behind its value_dim numbers where there is a
// z.
template <class T>
void step_token(const HeadShape& shape, const T* q, const T* k, T e, T dt, const T* v, const T* in,
                T* out, T* read) {
  const int64_t columns = shape.state_row();
  for (int64_t c = 0; c < columns; ++c) read[c] = 0;
  for (int64_t f = 0; f < shape.features; ++f) {
    const T *row = in + f * columns, written = dt * k[f], seen = q[f];
    T* target = out + f * columns;
    for (int64_t c = 0; c < columns; ++c) {
      const T x = e * row[c] + written * v[c];
      target[c] = x;
      read[c] += seen * x;
    }
  }
}

template <class T, class E>
void step(const HeadShape& shape, const HeadForward<T, E>& io, T* scratch) {
  Carver<T> carve(scratch);
  const Scratch<T> s(shape, carve);
  const HeadStates<T> own(shape, 1, carve);
  const int64_t dv = shape.value_dim;
  T* const v = carve.row(shape.state_row());
  T* const read = carve.row(shape.state_row());
  T* const out = io.state_out != nullptr ? io.state_out : own.s.all;
  const T* in = io.state_in;
  if (in == nullptr || shape.tokens == 0) {
    for (int64_t i = 0; i < shape.state_size() && in != out; ++i)
      out[i] = in == nullptr ? T(0) : in[i];
    in = out;
  }
  for (int64_t t = 0; t < shape.tokens; ++t, in = out) {
    step_features(shape, io.map_q, io.floor, io.q, t, s.u, s.logits.data, s.q.data);
    step_features(shape, io.map_k, io.floor, io.k, t, s.u, s.logits.data, s.k.data);
    for (int64_t c = 0; c < dv; ++c) v[c] = number<T>(io.v.data[t * io.v.stride + c]);
    if (shape.normalise) v[dv] = 1;
    const T e = io.g.data == nullptr ? T(1) : VectorOf<T>::exp(io.g.data[t * io.g.stride]);
    const T dt = io.dt.data == nullptr ? T(1) : io.dt.data[t * io.dt.stride];
    step_token(shape, s.q.data, s.k.data, e, dt, v, in, out, read);
    const T share = shape.normalise ? T(1) / (read[dv] + io.eps) : T(1);
    for (int64_t c = 0; c < dv; ++c) io.o.data[t * io.o.stride + c] = stored<E>(share * read[c]);
  }
}

}  // namespace
}  // namespace graft::linear::GRAFT_ISA
