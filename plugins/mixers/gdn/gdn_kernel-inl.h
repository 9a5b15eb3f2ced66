// The delta rule of gdn_kernel.h for one instruction set; see vector-inl.h.
#pragma once

#include "gdn_kernel.h"
#include "matrix-inl.h"

namespace graft::gdn::GRAFT_ISA {
namespace {

using namespace kernels::GRAFT_ISA;

// ------------------------------------------------------------------ one chunk

template <class T>
struct Chunk {
  int64_t first, n;  // tokens [first, first + n)
  T* from_start;     // p_i
  T* to_end;         // D_{n-1,j}
  T* beta;
  Matrix<T> decay;  // D, zero above the diagonal
  T total() const { return from_start[n - 1]; }
};

// Products below the smallest normal number become 0: they are no part of any sum in T, and
// arithmetic on subnormals is a hundred times slower.
template <class T>
inline T flushed(T x) {
  return x < VectorOf<T>::kSmallestNormal ? T(0) : x;
}

template <class T>
void load_gates(Rows<const T> g, Rows<const T> beta, const Chunk<T>& chunk) {
  const int64_t n = chunk.n;
  T product = 1;
  for (int64_t i = 0; i < n; ++i) {
    const T e = VectorOf<T>::exp(g.data[(chunk.first + i) * g.stride]);
    chunk.beta[i] = beta.data[(chunk.first + i) * beta.stride];
    product = flushed(product * e);
    chunk.from_start[i] = product;
    T* row = chunk.decay.row(i);
    const T* above = i > 0 ? chunk.decay.row(i - 1) : nullptr;
    for (int64_t j = 0; j < i; ++j) row[j] = flushed(above[j] * e);
    row[i] = 1;
    for (int64_t j = i + 1; j < chunk.decay.ld; ++j) row[j] = 0;
  }
  for (int64_t j = 0; j < n; ++j) chunk.to_end[j] = chunk.decay.row(n - 1)[j];
}

// m = m * decay; the strict form also clears the diagonal. Columns past the block of the diagonal
// hold nothing yet.
template <class T>
void apply_decay(const Chunk<T>& chunk, bool strict, Matrix<T> m) {
  for (int64_t i = 0; i < chunk.n; ++i) {
    T* row = m.row(i);
    const T* decay = chunk.decay.row(i);
    const int64_t end = padded<T>(i + 1);
    for (int64_t c = 0; c < end; c += kLanes<T>) vec(row + c) *= vec(decay + c);
    if (strict) row[i] = 0;
    for (int64_t c = end; c < m.ld; ++c) row[c] = 0;
  }
}

inline constexpr int64_t kSolveBlock = 8;

// err holds the right-hand side; on return err and u = beta err solve err_i = rhs_i - sum_{j<i}
// b_ij u_j.
template <class T>
void solve_forward(const Chunk<T>& chunk, int64_t columns, Matrix<T> b, Matrix<T> err,
                   Matrix<T> u) {
  for (int64_t begin = 0; begin < chunk.n; begin += kSolveBlock) {
    const int64_t end = begin + kSolveBlock < chunk.n ? begin + kSolveBlock : chunk.n;
    const Matrix<T> block{err.row(begin), err.ld};
    multiply<T>(end - begin, columns, begin, {b.row(begin), b.ld}, u, block, Store::kSubtract);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = begin; j < i; ++j) subtract(err.ld, b.row(i)[j], u.row(j), err.row(i));
      for (int64_t c = 0; c < err.ld; c += kLanes<T>)
        vec(u.row(i) + c) = chunk.beta[i] * vec(err.row(i) + c);
    }
  }
}

// The adjoint: y holds the right-hand side; y_j = rhs_j - sum_{i>j} b_ij z_i, z = beta y.
template <class T>
void solve_backward(const Chunk<T>& chunk, int64_t columns, Matrix<T> b, Matrix<T> y, Matrix<T> z) {
  const int64_t n = chunk.n;
  for (int64_t begin = (n - 1) / kSolveBlock * kSolveBlock; begin >= 0; begin -= kSolveBlock) {
    const int64_t end = begin + kSolveBlock < n ? begin + kSolveBlock : n;
    const Matrix<T> block{y.row(begin), y.ld};
    multiply_transposed<T>(end - begin, columns, n - end, {b.row(end) + begin, b.ld},
                           {z.row(end), z.ld}, block, Store::kSubtract);
    for (int64_t j = end - 1; j >= begin; --j) {
      for (int64_t i = j + 1; i < end; ++i) subtract(y.ld, b.row(i)[j], z.row(i), y.row(j));
      for (int64_t c = 0; c < y.ld; c += kLanes<T>)
        vec(z.row(j) + c) = chunk.beta[j] * vec(y.row(j) + c);
    }
  }
}

template <class T>
struct Scratch {
  Matrix<T> state, q, k, k_t, err, u, o, write, read, decay;
  T *from_start, *to_end, *beta;

  Scratch(const HeadShape& s, Carver<T>& carve)
      : state(carve.matrix(s.key_dim, s.value_dim)),
        q(carve.matrix(s.chunk, s.key_dim)),
        k(carve.matrix(s.chunk, s.key_dim)),
        k_t(carve.matrix(s.key_dim, s.chunk)),
        err(carve.matrix(s.chunk, s.value_dim)),
        u(carve.matrix(s.chunk, s.value_dim)),
        o(carve.matrix(s.chunk, s.value_dim)),
        write(carve.matrix(s.chunk, s.chunk)),
        read(carve.matrix(s.chunk, s.chunk)),
        decay(carve.matrix(s.chunk, s.chunk)),
        from_start(carve.row(s.chunk)),
        to_end(carve.row(s.chunk)),
        beta(carve.row(s.chunk)) {}

  Chunk<T> chunk(const HeadShape& s, int64_t index) const {
    const int64_t first = index * s.chunk;
    const int64_t left = s.tokens - first;
    return {first, left < s.chunk ? left : s.chunk, from_start, to_end, beta, decay};
  }
};

template <class T>
struct BackwardScratch {
  Matrix<T> d_state, y, z, u_t, d_read, d_write, dq, dk, work, square;
  T *from_state, *to_state, *range;

  BackwardScratch(const HeadShape& s, Carver<T>& carve)
      : d_state(carve.matrix(s.key_dim, s.value_dim)),
        y(carve.matrix(s.chunk, s.value_dim)),
        z(carve.matrix(s.chunk, s.value_dim)),
        u_t(carve.matrix(s.value_dim, s.chunk)),
        d_read(carve.matrix(s.chunk, s.chunk)),
        d_write(carve.matrix(s.chunk, s.chunk)),
        dq(carve.matrix(s.chunk, s.key_dim)),
        dk(carve.matrix(s.chunk, s.key_dim)),
        work(carve.matrix(s.chunk, s.key_dim)),
        square(carve.matrix(s.value_dim, s.key_dim)),
        from_state(carve.row(s.chunk)),
        to_state(carve.row(s.chunk)),
        range(carve.row(s.chunk)) {}
};

template <class T>
int64_t scratch_size(const HeadShape& shape) {
  Carver<T> carve(nullptr);
  Scratch<T> forward(shape, carve);
  BackwardScratch<T> backward(shape, carve);
  return carve.used();
}

// write_ij = D_ij k_i.k_j below the diagonal, read_ij = D_ij scale q_i.k_j on and below it.
template <class T>
void chunk_scores(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s) {
  transpose(chunk.n, shape.key_dim, s.k, s.k_t);
  multiply(chunk.n, chunk.n, shape.key_dim, s.k, s.k_t, s.write, Store::kSet, Part::kLowerResult);
  apply_decay(chunk, true, s.write);
  multiply(chunk.n, chunk.n, shape.key_dim, s.q, s.k_t, s.read, Store::kSet, Part::kLowerResult);
  apply_decay(chunk, false, s.read);
}

template <class T>
void load_state(const HeadShape& shape, const T* state, Matrix<T> out) {
  if (state != nullptr) {
    load<T>({state, shape.value_dim}, 0, shape.key_dim, shape.value_dim, T(1), out);
  } else {
    fill_zero(shape.key_dim, out);
  }
}

template <class T>
void store_state(const HeadShape& shape, Matrix<T> in, T* state) {
  store<T>(in, 0, shape.key_dim, shape.value_dim, T(1), {state, shape.value_dim});
}

template <class T>
void forward_chunk(const HeadShape& shape, const HeadForward<T>& io, int64_t index, bool zero_state,
                   const Scratch<T>& s) {
  const Chunk<T> chunk = s.chunk(shape, index);
  const int64_t n = chunk.n, dk = shape.key_dim, dv = shape.value_dim;
  load_gates(io.g, io.beta, chunk);
  load(io.q, chunk.first, n, dk, io.scale, s.q);
  load(io.k, chunk.first, n, dk, T(1), s.k);
  load(io.v, chunk.first, n, dv, T(1), s.err);
  chunk_scores(shape, chunk, s);
  if (!zero_state) {
    scale_rows(n, chunk.from_start, s.q, s.q);
    multiply(n, dv, dk, s.q, s.state, s.o, Store::kSet);
    scale_rows(n, chunk.from_start, s.k,
               s.q);  // the queries are done with: their rows hold p k now
    multiply(n, dv, dk, s.q, s.state, s.err, Store::kSubtract);
  }
  solve_forward(chunk, dv, s.write, s.err, s.u);
  if (io.err.data != nullptr) store(s.err, chunk.first, n, dv, T(1), io.err);
  multiply(n, dv, n, s.read, s.u, s.o, zero_state ? Store::kSet : Store::kAdd, Part::kLowerLeft);
  store(s.o, chunk.first, n, dv, T(1), io.o);
  scale_rows(n, chunk.to_end, s.k, s.k);
  if (!zero_state) scale_all(dk, chunk.total(), s.state);
  multiply_transposed(dk, dv, n, s.k, s.u, s.state, zero_state ? Store::kSet : Store::kAdd);
}

template <class T>
void forward(const HeadShape& shape, const HeadForward<T>& io, T* scratch) {
  Carver<T> carve(scratch);
  const Scratch<T> s(shape, carve);
  load_state(shape, io.state_in, s.state);
  for (int64_t index = 0; index < shape.chunks(); ++index) {
    if (io.borders != nullptr)
      store_state(shape, s.state, io.borders + index * shape.key_dim * shape.value_dim);
    forward_chunk(shape, io, index, index == 0 && io.state_in == nullptr, s);
  }
  if (io.state_out != nullptr) store_state(shape, s.state, io.state_out);
}

// ------------------------------------------------------------------ backward

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
  const int64_t ld = x.inside.ld;
  for (int64_t j = 0; j < ld; ++j) range[j] = j < chunk.n ? x.to_state[j] : T(0);
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

// From the gradient of u to that of err, v and beta.
template <class T>
void error_gradient(const HeadShape& shape, const HeadBackward<T>& io, const Chunk<T>& chunk,
                    const Scratch<T>& s, const BackwardScratch<T>& b) {
  solve_backward(chunk, shape.value_dim, s.write, b.y, b.z);
  for (int64_t i = 0; i < chunk.n; ++i) {
    io.dbeta.data[(chunk.first + i) * io.dbeta.stride] = dot(b.y.ld, b.y.row(i), s.err.row(i));
  }
  store(b.z, chunk.first, chunk.n, shape.value_dim, T(1), io.dv);
}

// Turns the gradients of the decayed scores (d_write still without its sign) into those of q.k and
// k.k, and s.read into the X_ij of DecayGradient.
template <class T>
void score_gradient(const Chunk<T>& chunk, const Scratch<T>& s, const BackwardScratch<T>& b) {
  for (int64_t i = 0; i < chunk.n; ++i) {
    const T* decay = chunk.decay.row(i);
    T *read = s.read.row(i), *d_read = b.d_read.row(i), *d_write = b.d_write.row(i);
    const T* write = s.write.row(i);
    const int64_t end = padded<T>(i + 1);
    d_write[i] = 0;  // the products below are rounded outwards; decay is 0 above the diagonal
    for (int64_t c = 0; c < end; c += kLanes<T>) {
      vec(read + c) = vec(read + c) * vec(d_read + c) - vec(write + c) * vec(d_write + c);
      vec(d_read + c) *= vec(decay + c);
      vec(d_write + c) *= -vec(decay + c);
    }
    for (int64_t c = end; c < b.d_read.ld; ++c) d_read[c] = d_write[c] = 0;
  }
}

// Gradients that pass through the state at the chunk's start.
template <class T>
void start_gradient(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s,
                    const BackwardScratch<T>& b) {
  const int64_t n = chunk.n, dk = shape.key_dim, dv = shape.value_dim;
  transpose(dk, dv, s.state, b.square);
  multiply(n, dk, dv, s.o, b.square, b.dq, Store::kSet);
  scale_rows(n, chunk.from_start, b.dq, b.dq);
  multiply(n, dk, dv, b.z, b.square, b.dk, Store::kSet);
  for (int64_t i = 0; i < n; ++i) {
    T* row = b.dk.row(i);
    for (int64_t c = 0; c < b.dk.ld; c += kLanes<T>) vec(row + c) *= -chunk.from_start[i];
    b.from_state[i] = dot(b.dq.ld, s.q.row(i), b.dq.row(i)) + dot(b.dk.ld, s.k.row(i), row);
  }
}

// Gradients of the keys that pass through the state at the chunk's end.
template <class T>
void end_gradient(const HeadShape& shape, const Chunk<T>& chunk, const Scratch<T>& s,
                  const BackwardScratch<T>& b) {
  const int64_t n = chunk.n, dk = shape.key_dim, dv = shape.value_dim;
  transpose(dk, dv, b.d_state, b.square);
  multiply(n, dk, dv, s.u, b.square, b.work, Store::kSet);
  for (int64_t j = 0; j < n; ++j) {
    T *row = b.work.row(j), *dk_row = b.dk.row(j);
    for (int64_t c = 0; c < b.work.ld; c += kLanes<T>) {
      vec(row + c) *= chunk.to_end[j];
      vec(dk_row + c) += vec(row + c);
    }
    b.to_state[j] = dot(b.work.ld, s.k.row(j), row);
  }
}

struct ChunkEnds {
  bool zero_start;  // the state at the chunk's start is zero and nobody wants its gradient
  bool zero_d_end;  // nothing flows back from the state at the chunk's end
};

template <class T>
void load_chunk(const HeadShape& shape, const HeadBackward<T>& io, const Chunk<T>& chunk,
                const Scratch<T>& s) {
  const int64_t n = chunk.n, dv = shape.value_dim;
  load_gates(io.g, io.beta, chunk);
  load(io.q, chunk.first, n, shape.key_dim, io.scale, s.q);
  load(io.k, chunk.first, n, shape.key_dim, T(1), s.k);
  load(io.err, chunk.first, n, dv, T(1), s.err);
  scale_rows(n, chunk.beta, s.err, s.u);
  if (io.d_o.data != nullptr) {
    load(io.d_o, chunk.first, n, dv, T(1), s.o);
  } else {
    fill_zero(n, s.o);
  }
}

template <class T>
void backward_chunk(const HeadShape& shape, const HeadBackward<T>& io, int64_t index,
                    ChunkEnds ends, const Scratch<T>& s, const BackwardScratch<T>& b) {
  const Chunk<T> chunk = s.chunk(shape, index);
  const int64_t n = chunk.n, dk = shape.key_dim, dv = shape.value_dim;
  load_chunk(shape, io, chunk, s);
  chunk_scores(shape, chunk, s);
  multiply_transposed(n, dv, n, s.read, s.o, b.y, Store::kSet, Part::kUpperLeft);
  if (!ends.zero_d_end) {
    scale_rows(n, chunk.to_end, s.k, b.work);
    multiply(n, dv, dk, b.work, b.d_state, b.y, Store::kAdd);
  }
  error_gradient(shape, io, chunk, s, b);

  transpose(n, dv, s.u, b.u_t);
  multiply(n, n, dv, s.o, b.u_t, b.d_read, Store::kSet, Part::kLowerResult);
  multiply(n, n, dv, b.z, b.u_t, b.d_write, Store::kSet, Part::kLowerResult);
  score_gradient(chunk, s, b);

  DecayGradient<T> x{b.from_state, b.to_state, 0, s.read};
  if (ends.zero_start) {
    fill_zero(n, b.dq);
    fill_zero(n, b.dk);
    fill_zero<T>(1, {b.from_state, n});
  } else {
    load_state(shape, io.borders + index * dk * dv, s.state);
    start_gradient(shape, chunk, s, b);
  }
  if (ends.zero_d_end) {
    fill_zero<T>(1, {b.to_state, n});
  } else {
    end_gradient(shape, chunk, s, b);
    if (!ends.zero_start)
      x.across = chunk.total() * dot(dk * s.state.ld, s.state.data, b.d_state.data);
  }
  decay_gradient(chunk, x, b.range, io.dg);

  multiply(n, dk, n, b.d_read, s.k, b.dq, Store::kAdd, Part::kLowerLeft);
  store(b.dq, chunk.first, n, dk, io.scale, io.dq);
  multiply(n, dk, n, b.d_write, s.k, b.dk, Store::kAdd, Part::kLowerLeft);
  multiply_transposed(n, dk, n, b.d_write, s.k, b.dk, Store::kAdd, Part::kUpperLeft);
  multiply_transposed(n, dk, n, b.d_read, s.q, b.dk, Store::kAdd, Part::kUpperLeft);
  store(b.dk, chunk.first, n, dk, T(1), io.dk);

  if (ends.zero_start) return;
  // d_state becomes the gradient of the state at the chunk's start.
  scale_all(dk, chunk.total(), b.d_state);
  scale_rows(n, chunk.from_start, s.q, s.q);
  multiply_transposed(dk, dv, n, s.q, s.o, b.d_state, Store::kAdd);
  scale_rows(n, chunk.from_start, s.k, s.k);
  multiply_transposed(dk, dv, n, s.k, b.z, b.d_state, Store::kSubtract);
}

template <class T>
void backward(const HeadShape& shape, const HeadBackward<T>& io, T* scratch) {
  Carver<T> carve(scratch);
  const Scratch<T> s(shape, carve);
  const BackwardScratch<T> b(shape, carve);
  load_state(shape, io.d_state_out, b.d_state);
  const int64_t last = shape.chunks() - 1;
  for (int64_t index = last; index >= 0; --index) {
    const ChunkEnds ends{index == 0 && io.zero_state_in && io.d_state_in == nullptr,
                         index == last && io.d_state_out == nullptr};
    backward_chunk(shape, io, index, ends, s, b);
  }
  if (io.d_state_in != nullptr) store_state(shape, b.d_state, io.d_state_in);
}

// ------------------------------------------------------------------ step

template <class T>
void step(const HeadShape& shape, const HeadForward<T>& io, T* scratch) {
  Carver<T> carve(scratch);
  const Scratch<T> s(shape, carve);
  const int64_t dk = shape.key_dim, ld = s.state.ld;
  load_state(shape, io.state_in, s.state);
  T *seen = s.err.data, *written = s.u.data, *out = s.o.data;
  for (int64_t t = 0; t < shape.tokens; ++t) {
    const T* q = io.q.data + t * io.q.stride;
    const T* k = io.k.data + t * io.k.stride;
    const T e = VectorOf<T>::exp(io.g.data[t * io.g.stride]);
    const T beta = io.beta.data[t * io.beta.stride];
    load<T>(io.v, t, 1, shape.value_dim, T(1), s.err);
    for (int64_t r = 0; r < dk; ++r) subtract(ld, e * k[r], s.state.row(r), seen);
    for (int64_t c = 0; c < ld; c += kLanes<T>) vec(written + c) = beta * vec(seen + c);
    for (int64_t c = 0; c < ld; ++c) out[c] = 0;
    for (int64_t r = 0; r < dk; ++r) {
      T* row = s.state.row(r);
      const T read = io.scale * q[r];
      for (int64_t c = 0; c < ld; c += kLanes<T>) {
        vec(row + c) = e * vec(row + c) + k[r] * vec(written + c);
        vec(out + c) += read * vec(row + c);
      }
    }
    store<T>(s.o, t, 1, shape.value_dim, T(1), io.o);
  }
  if (io.state_out != nullptr) store_state(shape, s.state, io.state_out);
}

}  // namespace
}  // namespace graft::gdn::GRAFT_ISA
