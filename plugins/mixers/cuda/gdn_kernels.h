// The kernels of gdn_cuda.h: each a struct whose operator() is what one block does, with its grid
// and its shared memory. gdn_forward_steps() and its siblings list them in order; a `launch` runs
// one: gdn_cuda.cu on the device, host_block.h on the host.
#pragma once

#include <type_traits>

#include "chunk.h"
#include "gdn_cuda.h"
#include "state.h"

namespace graft::cuda {

// ------------------------------------------------------------------ forward

// Per chunk: w [64, key_dim] and, for each token, p and D_n beta.
struct GdnPrepared {
  float *w, *from_start, *weight_end;

  GdnPrepared(const GdnShape& s, float* scratch)
      : w(scratch),
        from_start(w + s.all_chunks() * kChunk * s.key_dim),
        weight_end(from_start + s.all_chunks() * kChunk) {}
};

template <class E>
struct GdnPrepare {
  GdnShape shape;
  GdnForward<E> io;
  GdnPrepared out;

  struct Places {
    Carver carve;
    GatePlaces gates{carve};
    Place inverse = carve.matrix(kChunk, kChunk);
    StagingPlaces staging{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto inverse = tile(block, places.inverse);
    const auto k = chunk.of(io.k, shape.key_dim);
    load_gates(block, chunk.of(io.g, 1), chunk.of(io.beta, 1), chunk.n, gates);

    typename Block::template PerThread<Sums<4>> x(block);
    accumulate<Left::kByRow, 4>(block, by_row(left, k), transposed(right, k), shape.key_dim, x);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        gates.decay.set(i, j, i > j ? gates.decay(i, j) * x[t].at[r][c] * gates.weight(j) : 0.0f);
      });
    });
    invert(block, gates.decay, inverse, left);
    multiply_inverse(block, inverse, right, k, ByRow<typename Block::Memory>{gates.from_start},
                     chunk.kept(out.w, kChunk, shape.key_dim), x);
    multiply_inverse(block, inverse, right, chunk.of(io.v, shape.value_dim), One{},
                     chunk.kept(io.err, kChunk, shape.value_dim), x);
    block.phase([&](int t) {
      if (t >= kChunk) return;
      chunk.kept(out.from_start, kChunk, 1).store(t, 0, gates.from_start(t));
      chunk.kept(out.weight_end, kChunk, 1).store(t, 0, gates.to_end(t) * gates.weight(t));
    });
  }

 private:
  // out = inverse diag(factor) rows
  template <class Block, class Memory, class Row, class Factor, class X>
  GRAFT_DEVICE static void multiply_inverse(Block& block, Tile<Memory> inverse,
                                            Tile<Memory> staging, GlobalRows<Row> rows,
                                            Factor factor, GlobalRows<float> out, X& x) {
    for (int first = 0; first < out.columns; first += kChunk) {
      block.phase([&](int t) { x[t] = {}; });
      accumulate<Left::kByRow, 4>(block, resident<Left::kByRow>(inverse),
                                  by_inner(staging, rows, first, factor), kChunk, x);
      block.phase([&](int t) { store_sums(t, x[t], out, 0, first); });
    }
  }
};

// 16 * Columns value columns of a head, chunk after chunk. kShared: the state lies in shared
// memory.
template <class E, int Columns, bool kShared>
struct GdnStates {
  GdnShape shape;
  GdnForward<E> io;
  GdnPrepared in;
  static constexpr int kWidth = 16 * Columns;

  struct Places {
    Carver carve;
    StagingPlaces staging{carve};
    Place u = carve.matrix(kChunk, kWidth), from_start = carve.row(kChunk),
          weight_end = carve.row(kChunk), state;
    int state_rows;
    GRAFT_BOTH explicit Places(int key_dim) : state_rows(blocks_of(key_dim, kInner) * kInner) {
      if (kShared) state = carve.matrix(state_rows, kWidth);
    }
  };
  Grid grid() const { return {blocks_of(shape.value_dim, kWidth), shape.heads, shape.batch}; }
  int shared() const { return Places(shape.key_dim).carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places(shape.key_dim);
    const int first = block.x() * kWidth, dk = shape.key_dim, dv = shape.value_dim;
    const int64_t head = static_cast<int64_t>(block.z()) * shape.heads + block.y();
    const auto state_in =
        io.state_in == nullptr ? GlobalRows<const float>{} : rows_of(io.state_in, head);
    const auto state = tile(block, places.state);
    const auto start = [&](int i, int j, float x) {
      if constexpr (kShared) {
        state.set(i, j, x);
      } else if (shape.chunks() > 0) {
        ChunkAt(shape, 0, block.y(), block.z()).kept(io.borders, dk, dv).store(i, first + j, x);
      }
    };
    for_state(block, state_in, kShared ? places.state_rows : dk, first, kWidth, start);
    for (int index = 0; index < shape.chunks(); ++index) {
      const ChunkAt chunk(shape, index, block.y(), block.z());
      const auto border = chunk.kept(io.borders, dk, dv);
      if constexpr (kShared) {
        block.phase([&](int t) {
          for (int at = t; at < dk * kWidth; at += kThreads)
            border.store(at / kWidth, first + at % kWidth, state(at / kWidth, at % kWidth));
        });
        advance(block, places, chunk, SharedState<typename Block::Memory>{state});
      } else {
        const bool last = index + 1 == shape.chunks();
        const auto next =
            !last ? ChunkAt(shape, index + 1, block.y(), block.z()).kept(io.borders, dk, dv)
            : io.state_out == nullptr ? GlobalRows<float>{}
                                      : rows_of(io.state_out, head);
        advance(block, places, chunk,
                BorderState<kWidth, typename Block::Memory>{tile(block, places.staging.right),
                                                            border, next, first});
      }
    }
    if (io.state_out == nullptr || (!kShared && shape.chunks() > 0)) return;
    const auto out = rows_of(io.state_out, head);
    if constexpr (kShared) {
      block.phase([&](int t) {
        for (int at = t; at < dk * kWidth; at += kThreads)
          out.store(at / kWidth, first + at % kWidth, state(at / kWidth, at % kWidth));
      });
    } else {
      for_state(block, state_in, dk, first, kWidth,
                [&](int i, int j, float x) { out.store(i, first + j, x); });
    }
  }

 private:
  template <class T>
  GRAFT_DEVICE GlobalRows<T> rows_of(T* states, int64_t head) const {
    return {states + head * shape.state_size(), shape.value_dim, shape.key_dim, shape.value_dim};
  }

  template <class Block, class State>
  GRAFT_DEVICE void advance(Block& block, const Places& places, const ChunkAt& chunk,
                            const State& state) const {
    const int first = block.x() * kWidth, dk = shape.key_dim;
    const auto left = tile(block, places.staging.left), u = tile(block, places.u);
    const auto from_start = tile(block, places.from_start),
               weight_end = tile(block, places.weight_end);
    block.phase([&](int t) {
      if (t >= kChunk) return;
      from_start.set(t, chunk.kept(in.from_start, kChunk, 1).load(t, 0));
      weight_end.set(t, chunk.kept(in.weight_end, kChunk, 1).load(t, 0));
    });
    const auto err = chunk.kept(io.err, kChunk, shape.value_dim);
    const auto w = chunk.kept(in.w, kChunk, dk);
    typename Block::template PerThread<Sums<Columns>> x(block);
    accumulate<Left::kByRow, Columns>(block, by_row(left, w), state.operand(), dk, x);
    block.phase([&](int t) {
      for_elements<Columns>(t, [&](int r, int c, int i, int j) {
        const float e = err.load(i, first + j) - x[t].at[r][c];
        x[t].at[r][c] = e;
        u.set(i, j, weight_end(i) * e);
      });
      store_sums(t, x[t], err, 0, first);
    });
    const auto k = chunk.of(io.k, dk);
    const auto left_inner = tile(block, places.staging.left_inner);
    for (int row = 0; row < dk; row += kChunk) {
      block.phase([&](int t) {
        const float total = from_start(chunk.n - 1);
        for_elements<Columns>(t, [&](int r, int c, int i, int j) {
          x[t].at[r][c] = row + i < dk ? total * state.read(row + i, j) : 0.0f;
        });
      });
      accumulate<Left::kByInner, Columns>(block, by_inner(left_inner, k, row),
                                          resident<Left::kByInner>(u), kChunk, x);
      block.phase([&](int t) {
        for_elements<Columns>(t, [&](int r, int c, int i, int j) {
          if (row + i < dk) state.write(row + i, j, x[t].at[r][c]);
        });
      });
    }
  }
};

template <class E>
struct GdnOutputs {
  GdnShape shape;
  GdnForward<E> io;

  struct Places {
    Carver carve;
    GatePlaces gates{carve};
    StagingPlaces staging{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto q = chunk.of(io.q, shape.key_dim), k = chunk.of(io.k, shape.key_dim);
    load_gates(block, chunk.of(io.g, 1), chunk.of(io.beta, 1), chunk.n, gates);

    typename Block::template PerThread<Sums<4>> x(block);
    accumulate<Left::kByRow, 4>(block, by_row(left, q), transposed(right, k), shape.key_dim, x);
    const auto read = gates.decay;  // D_ij scale q_i.k_j beta_j
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        read.set(i, j, io.scale * gates.decay(i, j) * x[t].at[r][c] * gates.weight(j));
      });
    });
    const ByRow<typename Block::Memory> decayed{gates.from_start, io.scale};
    for (int first = 0; first < shape.value_dim; first += kChunk) {
      block.phase([&](int t) { x[t] = {}; });
      const auto border = chunk.kept(io.borders, shape.key_dim, shape.value_dim);
      accumulate<Left::kByRow, 4>(block, by_row(left, q, decayed), by_inner(right, border, first),
                                  shape.key_dim, x);
      const auto err = chunk.kept(io.err, kChunk, shape.value_dim);
      accumulate<Left::kByRow, 4>(block, resident<Left::kByRow>(read), by_inner(right, err, first),
                                  kChunk, x);
      block.phase([&](int t) { store_sums(t, x[t], chunk.of(io.o, shape.value_dim), 0, first); });
    }
  }
};

// ------------------------------------------------------------------ backward

// Per chunk: w [64, key_dim], z [64, value_dim], p of each token, and the state's gradient at the
// chunk's end.
struct GdnReversed {
  float *w, *z, *from_start, *d_borders;

  GdnReversed(const GdnShape& s, float* scratch)
      : w(scratch),
        z(w + s.all_chunks() * kChunk * s.key_dim),
        from_start(z + s.all_chunks() * kChunk * s.value_dim),
        d_borders(from_start + s.all_chunks() * kChunk) {}
};

// The gradient of v is z = z_0 + w dS with, A = (I + L)^{-1} and read_ij = D_ij scale q_i.k_j
// beta_j, z_0 = (read A)^T d_o and w = A^T diag(D_n beta) K.
template <class E>
struct GdnReverse {
  GdnShape shape;
  GdnBackward<E> io;
  GdnReversed out;

  struct Places {
    Carver carve;
    GatePlaces gates{carve};
    Place read = carve.matrix(kChunk, kChunk), inverse = carve.matrix(kChunk, kChunk),
          weight_end = carve.row(kChunk);
    StagingPlaces staging{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto read = tile(block, places.read), inverse = tile(block, places.inverse);
    const auto weight_end = tile(block, places.weight_end);
    const auto q = chunk.of(io.q, shape.key_dim), k = chunk.of(io.k, shape.key_dim);
    load_gates(block, chunk.of(io.g, 1), chunk.of(io.beta, 1), chunk.n, gates);

    typename Block::template PerThread<Sums<4>> x(block), y(block);
    accumulate<Left::kByRow, 4>(block, by_row(left, q), transposed(right, k), shape.key_dim, x);
    accumulate<Left::kByRow, 4>(block, by_row(left, k), transposed(right, k), shape.key_dim, y);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        const float decayed = gates.decay(i, j) * gates.weight(j);
        read.set(i, j, io.scale * decayed * x[t].at[r][c]);
        gates.decay.set(i, j, i > j ? decayed * y[t].at[r][c] : 0.0f);
      });
      if (t < kChunk) weight_end.set(t, gates.to_end(t) * gates.weight(t));
    });
    invert(block, gates.decay, inverse, left);
    const auto both = gates.decay;  // read A
    block.phase([&](int t) { x[t] = {}; });
    accumulate<Left::kByRow, 4>(block, resident<Left::kByRow>(read),
                                resident<Left::kByInner>(inverse), kChunk, x);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) { both.set(i, j, x[t].at[r][c]); });
    });
    multiply_transposed(block, both, right, chunk.of(io.d_o, shape.value_dim), One{},
                        chunk.kept(out.z, kChunk, shape.value_dim), x);
    multiply_transposed(block, inverse, right, k, ByRow<typename Block::Memory>{weight_end},
                        chunk.kept(out.w, kChunk, shape.key_dim), x);
    block.phase([&](int t) {
      if (t < kChunk) chunk.kept(out.from_start, kChunk, 1).store(t, 0, gates.from_start(t));
    });
  }

 private:
  // out = left^T diag(factor) rows
  template <class Block, class Memory, class Row, class Factor, class X>
  GRAFT_DEVICE static void multiply_transposed(Block& block, Tile<Memory> left,
                                               Tile<Memory> staging, GlobalRows<Row> rows,
                                               Factor factor, GlobalRows<float> out, X& x) {
    for (int first = 0; first < out.columns; first += kChunk) {
      block.phase([&](int t) { x[t] = {}; });
      accumulate<Left::kByInner, 4>(block, resident<Left::kByInner>(left),
                                    by_inner(staging, rows, first, factor), kChunk, x);
      block.phase([&](int t) { store_sums(t, x[t], out, 0, first); });
    }
  }
};

// From the last chunk to the first, 16 * Columns value columns: z = z_0 + w dS, then dS = p_n dS +
// sum_i p_i (scale q_i d_o_i^T - k_i z_i^T).
template <class E, int Columns, bool kShared>
struct GdnStateGradients {
  GdnShape shape;
  GdnBackward<E> io;
  GdnReversed in;
  static constexpr int kWidth = 16 * Columns;

  struct Places {
    Carver carve;
    StagingPlaces staging{carve};
    Place z = carve.matrix(kChunk, kWidth), from_start = carve.row(kChunk), state;
    int state_rows;
    GRAFT_BOTH explicit Places(int key_dim) : state_rows(blocks_of(key_dim, kInner) * kInner) {
      if (kShared) state = carve.matrix(state_rows, kWidth);
    }
  };
  Grid grid() const { return {blocks_of(shape.value_dim, kWidth), shape.heads, shape.batch}; }
  int shared() const { return Places(shape.key_dim).carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places(shape.key_dim);
    const int first = block.x() * kWidth, dk = shape.key_dim;
    const int64_t head = static_cast<int64_t>(block.z()) * shape.heads + block.y();
    const auto d_state_out =
        io.d_state_out == nullptr ? GlobalRows<const float>{} : rows_of(io.d_state_out, head);
    const auto state = tile(block, places.state);
    const int last = shape.chunks() - 1;
    for_state(block, d_state_out, kShared ? places.state_rows : dk, first, kWidth,
              [&](int i, int j, float x) {
                if constexpr (kShared) {
                  state.set(i, j, x);
                } else if (last >= 0) {
                  border(block, last).store(i, first + j, x);
                }
              });
    for (int index = last; index >= 0; --index) {
      const ChunkAt chunk(shape, index, block.y(), block.z());
      const auto here = border(block, index);
      if constexpr (kShared) {
        block.phase([&](int t) {
          for (int at = t; at < dk * kWidth; at += kThreads)
            here.store(at / kWidth, first + at % kWidth, state(at / kWidth, at % kWidth));
        });
        retreat(block, places, chunk, SharedState<typename Block::Memory>{state});
      } else {
        const auto next = index > 0                  ? border(block, index - 1)
                          : io.d_state_in == nullptr ? GlobalRows<float>{}
                                                     : rows_of(io.d_state_in, head);
        retreat(block, places, chunk,
                BorderState<kWidth, typename Block::Memory>{tile(block, places.staging.right), here,
                                                            next, first});
      }
    }
    if (io.d_state_in == nullptr || (!kShared && last >= 0)) return;
    const auto out = rows_of(io.d_state_in, head);
    if constexpr (kShared) {
      block.phase([&](int t) {
        for (int at = t; at < dk * kWidth; at += kThreads)
          out.store(at / kWidth, first + at % kWidth, state(at / kWidth, at % kWidth));
      });
    } else {
      for_state(block, d_state_out, dk, first, kWidth,
                [&](int i, int j, float x) { out.store(i, first + j, x); });
    }
  }

 private:
  template <class T>
  GRAFT_DEVICE GlobalRows<T> rows_of(T* states, int64_t head) const {
    return {states + head * shape.state_size(), shape.value_dim, shape.key_dim, shape.value_dim};
  }
  template <class Block>
  GRAFT_DEVICE GlobalRows<float> border(Block& block, int index) const {
    return ChunkAt(shape, index, block.y(), block.z())
        .kept(in.d_borders, shape.key_dim, shape.value_dim);
  }

  template <class Block, class State>
  GRAFT_DEVICE void retreat(Block& block, const Places& places, const ChunkAt& chunk,
                            const State& state) const {
    const int first = block.x() * kWidth, dk = shape.key_dim, dv = shape.value_dim;
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto left_inner = tile(block, places.staging.left_inner),
               decayed_z = tile(block, places.z);
    const auto from_start = tile(block, places.from_start);
    block.phase([&](int t) {
      if (t < kChunk) from_start.set(t, chunk.kept(in.from_start, kChunk, 1).load(t, 0));
    });
    const auto z = chunk.kept(in.z, kChunk, dv);
    typename Block::template PerThread<Sums<Columns>> x(block);
    accumulate<Left::kByRow, Columns>(block, by_row(left, chunk.kept(in.w, kChunk, dk)),
                                      state.operand(), dk, x);
    block.phase([&](int t) {
      for_elements<Columns>(t, [&](int r, int c, int i, int j) {
        x[t].at[r][c] += z.load(i, first + j);
        decayed_z.set(i, j, -from_start(i) * x[t].at[r][c]);
      });
      store_sums(t, x[t], z, 0, first);
      store_sums(t, x[t], chunk.of(io.dv, dv), 0, first);
    });
    const auto q = chunk.of(io.q, dk), k = chunk.of(io.k, dk);
    const auto d_o = chunk.of(io.d_o, dv);
    for (int row = 0; row < dk; row += kChunk) {
      block.phase([&](int t) {
        const float total = from_start(chunk.n - 1);
        for_elements<Columns>(t, [&](int r, int c, int i, int j) {
          x[t].at[r][c] = row + i < dk ? total * state.read(row + i, j) : 0.0f;
        });
      });
      accumulate<Left::kByInner, Columns>(
          block, by_inner(left_inner, q, row),
          by_inner<kWidth>(right, d_o, first, ByRow<typename Block::Memory>{from_start, io.scale}),
          kChunk, x);
      accumulate<Left::kByInner, Columns>(block, by_inner(left_inner, k, row),
                                          resident<Left::kByInner>(decayed_z), kChunk, x);
      block.phase([&](int t) {
        for_elements<Columns>(t, [&](int r, int c, int i, int j) {
          if (row + i < dk) state.write(row + i, j, x[t].at[r][c]);
        });
      });
    }
  }
};

// dq, dk, dg and dbeta of a chunk, given z and the state's gradient at its end.
template <class E>
struct GdnGradients {
  GdnShape shape;
  GdnBackward<E> io;
  GdnReversed in;

  struct Places {
    Carver carve;
    GatePlaces gates{carve};
    Place d_read = carve.matrix(kChunk, kChunk), d_write = carve.matrix(kChunk, kChunk);
    Place from_state = carve.row(kChunk), to_state = carve.row(kChunk), across = carve.row(1);
    StagingPlaces staging{carve};
    GRAFT_BOTH Places() {}
  };
  Grid grid() const { return {shape.chunks(), shape.heads, shape.batch}; }
  int shared() const { return Places().carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const Places places;
    const ChunkAt chunk(shape, block.x(), block.y(), block.z());
    const auto gates = gates_of(block, places.gates);
    load_gates(block, chunk.of(io.g, 1), chunk.of(io.beta, 1), chunk.n, gates);
    score_gradients(block, places, chunk);
    across_chunk(block, places, chunk);
    // What the rows of queries and of keys owe to the decays; a thread's share, of 4 rows.
    typename Block::template PerThread<Sums4> from_state(block), to_state(block);
    for (int first = 0; first < shape.key_dim; first += kChunk) {
      query_gradients(block, places, chunk, first, from_state);
      key_gradients(block, places, chunk, first, from_state, to_state);
    }
    const auto room = tile(block, places.staging.left);
    sum_rows(block, from_state, room, tile(block, places.from_state));
    sum_rows(block, to_state, room, tile(block, places.to_state));
    const GateGradient<typename Block::Memory> gradient{
        tile(block, places.from_state), tile(block, places.to_state), tile(block, places.across),
        gates.decay, gates.weight};
    gate_gradient(block, chunk.n, gradient, chunk.of(io.dg, 1), chunk.of(io.dbeta, 1));
  }

 private:
  struct Sums4 {
    float at[4];
  };

  // With E_ij = d_o_i . err_j and F_ij = -z_i . err_j: the gradients of q_i.k_j and k_i.k_j, D E
  // beta_j and D F beta_j, and, in the place of D, the X_ij / beta_j of GateGradient.
  template <class Block>
  GRAFT_DEVICE void score_gradients(Block& block, const Places& places,
                                    const ChunkAt& chunk) const {
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto d_read = tile(block, places.d_read), d_write = tile(block, places.d_write);
    const auto q = chunk.of(io.q, shape.key_dim), k = chunk.of(io.k, shape.key_dim);
    const auto err = chunk.kept(io.err, kChunk, shape.value_dim);
    const auto z = chunk.kept(static_cast<const float*>(in.z), kChunk, shape.value_dim);
    typename Block::template PerThread<Sums<4>> x(block), y(block);
    accumulate<Left::kByRow, 4>(block, by_row(left, q), transposed(right, k), shape.key_dim, x);
    accumulate<Left::kByRow, 4>(block, by_row(left, chunk.of(io.d_o, shape.value_dim)),
                                transposed(right, err), shape.value_dim, y);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        const float decay = gates.decay(i, j);
        d_read.set(i, j, decay * gates.weight(j) * y[t].at[r][c]);
        x[t].at[r][c] *= io.scale * decay * y[t].at[r][c];  // X / beta so far
        y[t].at[r][c] = 0;
      });
    });
    typename Block::template PerThread<Sums<4>> f(block);
    accumulate<Left::kByRow, 4>(block, by_row(left, k), transposed(right, k), shape.key_dim, y);
    accumulate<Left::kByRow, 4>(block, by_row(left, z), transposed(right, err), shape.value_dim, f);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        const float decay = i > j ? gates.decay(i, j) : 0.0f;
        d_write.set(i, j, -decay * gates.weight(j) * f[t].at[r][c]);
        gates.decay.set(i, j, x[t].at[r][c] - decay * y[t].at[r][c] * f[t].at[r][c]);
      });
    });
  }

  // p_n <S, dS>
  template <class Block>
  GRAFT_DEVICE void across_chunk(Block& block, const Places& places, const ChunkAt& chunk) const {
    typename Block::template PerThread<float> part(block);
    const float* const s = io.borders + chunk.ordinal * shape.state_size();
    const float* const d = in.d_borders + chunk.ordinal * shape.state_size();
    const auto from_start = gates_of(block, places.gates).from_start;
    block.phase([&](int t) {
      float sum = 0;
      for (int64_t at = t; at < shape.state_size(); at += kThreads) sum += s[at] * d[at];
      part[t] = from_start(chunk.n - 1) * sum;
    });
    sum_all(block, part, tile(block, Place{places.staging.left.at, 0}), tile(block, places.across));
  }

  // dq_i = scale (p_i S d_o_i + sum_{j<=i} d_read_ij k_j)
  template <class Block, class Parts>
  GRAFT_DEVICE void query_gradients(Block& block, const Places& places, const ChunkAt& chunk,
                                    int first, Parts& from_state) const {
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto q = chunk.of(io.q, shape.key_dim), k = chunk.of(io.k, shape.key_dim);
    const ByRow<typename Block::Memory> decayed{tile(block, places.gates.from_start), io.scale};
    typename Block::template PerThread<Sums<4>> x(block);
    accumulate<Left::kByRow, 4>(
        block, by_row(left, chunk.of(io.d_o, shape.value_dim), decayed),
        transposed(right, chunk.kept(io.borders, shape.key_dim, shape.value_dim), first),
        shape.value_dim, x);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        from_state[t].at[r] += x[t].at[r][c] * q.load(i, first + j);
      });
    });
    accumulate<Left::kByRow, 4>(block, resident<Left::kByRow>(tile(block, places.d_read)),
                                by_inner(right, k, first, Constant{io.scale}), kChunk, x);
    block.phase([&](int t) { store_sums(t, x[t], chunk.of(io.dq, shape.key_dim), 0, first); });
  }

  // dk_i = -p_i S z_i + D_ni beta_i dS err_i + sum_{j<i} d_write_ij k_j + sum_{j>i} d_write_ji k_j
  // + scale sum_{j>=i} d_read_ji q_j
  template <class Block, class Parts>
  GRAFT_DEVICE void key_gradients(Block& block, const Places& places, const ChunkAt& chunk,
                                  int first, Parts& from_state, Parts& to_state) const {
    const auto gates = gates_of(block, places.gates);
    const auto left = tile(block, places.staging.left), right = tile(block, places.staging.right);
    const auto d_read = tile(block, places.d_read), d_write = tile(block, places.d_write);
    const auto q = chunk.of(io.q, shape.key_dim), k = chunk.of(io.k, shape.key_dim);
    const int dk = shape.key_dim, dv = shape.value_dim;
    using Factor = ByRow<typename Block::Memory>;
    typename Block::template PerThread<Sums<4>> x(block), y(block);
    accumulate<Left::kByRow, 4>(
        block,
        by_row(left, chunk.kept(static_cast<const float*>(in.z), kChunk, dv),
               Factor{gates.from_start, -1}),
        transposed(right, chunk.kept(io.borders, dk, dv), first), dv, x);
    accumulate<Left::kByRow, 4>(
        block, by_row(left, chunk.kept(io.err, kChunk, dv), Factor{gates.to_end}),
        transposed(right, chunk.kept(static_cast<const float*>(in.d_borders), dk, dv), first), dv,
        y);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        const float key = k.load(i, first + j);
        from_state[t].at[r] += x[t].at[r][c] * key;
        to_state[t].at[r] += y[t].at[r][c] * key;
        x[t].at[r][c] += gates.weight(i) * y[t].at[r][c];
      });
    });
    accumulate<Left::kByRow, 4>(block, resident<Left::kByRow>(d_write), by_inner(right, k, first),
                                kChunk, x);
    accumulate<Left::kByInner, 4>(block, resident<Left::kByInner>(d_write),
                                  by_inner(right, k, first), kChunk, x);
    accumulate<Left::kByInner, 4>(block, resident<Left::kByInner>(d_read),
                                  by_inner(right, q, first, Constant{io.scale}), kChunk, x);
    block.phase([&](int t) { store_sums(t, x[t], chunk.of(io.dk, dk), 0, first); });
  }
};

// ------------------------------------------------------------------ step

// 32 value columns of a head: 8 threads to a column, each every eighth key.
template <class E>
struct GdnStepTokens {
  GdnShape shape;
  GdnStep<E> io;
  static constexpr int kWidth = 32, kParts = kThreads / kWidth;

  struct Places {
    Carver carve;
    Place q, k, seen = carve.matrix(kParts, kWidth), read = carve.matrix(kParts, kWidth),
                q_k = carve.row(1), room = carve.row(kThreads), u = carve.row(kWidth);
    GRAFT_BOTH explicit Places(int key_dim) : q(carve.row(key_dim)), k(carve.row(key_dim)) {}
  };
  Grid grid() const { return {blocks_of(shape.value_dim, kWidth), shape.heads, shape.batch}; }
  int shared() const { return Places(shape.key_dim).carve.used(); }

  template <class Block>
  GRAFT_DEVICE void operator()(Block& block) const {
    const int64_t at =
        (static_cast<int64_t>(block.z()) * shape.heads + block.y()) * shape.state_size();
    const float* in = io.state_in == nullptr ? nullptr : io.state_in + at;
    float* const out = io.state_out + at;
    for (int64_t token = 0; token < shape.tokens; ++token, in = out) step(block, token, in, out);
    if (shape.tokens > 0) return;
    const GlobalRows<float> to(out, shape.value_dim, shape.key_dim, shape.value_dim);
    for_state(block, rows_of(in), shape.key_dim, block.x() * kWidth, kWidth,
              [&](int i, int j, float x) { to.store(i, block.x() * kWidth + j, x); });
  }

 private:
  GRAFT_DEVICE GlobalRows<const float> rows_of(const float* state) const {
    if (state == nullptr) return {};
    return {state, shape.value_dim, shape.key_dim, shape.value_dim};
  }

  // S^T k and S^T q in one pass over the state, then u = beta (v - e S^T k), o = e S^T q + (q . k)
  // u, S = e S + k u^T.
  template <class Block>
  GRAFT_DEVICE void step(Block& block, int64_t token, const float* in, float* out) const {
    const Places places(shape.key_dim);
    const int first = block.x() * kWidth, dk = shape.key_dim, dv = shape.value_dim;
    const auto row = [&](const auto& x, int width) {
      return x.rows(block.z(), block.y(), token, 1, width);
    };
    const auto q = tile(block, places.q), k = tile(block, places.k), u = tile(block, places.u);
    const auto seen = tile(block, places.seen), read = tile(block, places.read);
    const auto q_k = tile(block, places.q_k);
    typename Block::template PerThread<float> part(block);
    block.phase([&](int t) {
      part[t] = 0;
      for (int i = t; i < dk; i += kThreads) {
        const float q_i = io.scale * row(io.q, dk).load(0, i), k_i = row(io.k, dk).load(0, i);
        q.set(i, q_i);
        k.set(i, k_i);
        part[t] += q_i * k_i;
      }
    });
    sum_all(block, part, tile(block, places.room), q_k);
    block.phase([&](int t) {
      const int j = t % kWidth;
      float sum_k = 0, sum_q = 0;
      for (int i = t / kWidth; in != nullptr && i < dk; i += kParts) {
        const float s = first + j < dv ? in[static_cast<int64_t>(i) * dv + first + j] : 0.0f;
        sum_k += k(i) * s;
        sum_q += q(i) * s;
      }
      seen.set(t / kWidth, j, sum_k);
      read.set(t / kWidth, j, sum_q);
    });
    const float e = io.g.data == nullptr ? 1.0f : expf(row(io.g, 1).load(0, 0));
    const float beta = io.beta.data == nullptr ? 1.0f : row(io.beta, 1).load(0, 0);
    block.phase([&](int t) {
      if (t >= kWidth) return;
      float s_k = 0, s_q = 0;
      for (int p = 0; p < kParts; ++p) {
        s_k += seen(p, t);
        s_q += read(p, t);
      }
      const float written = beta * (row(io.v, dv).load(0, first + t) - e * s_k);
      u.set(t, written);
      row(io.o, dv).store(0, first + t, e * s_q + q_k(0) * written);
    });
    block.phase([&](int t) {
      const int j = t % kWidth;
      if (first + j >= dv) return;
      for (int i = t / kWidth; i < dk; i += kParts) {
        const int64_t at = static_cast<int64_t>(i) * dv + first + j;
        out[at] = (in == nullptr ? 0.0f : e * in[at]) + k(i) * u(j);
      }
    });
  }
};

// ------------------------------------------------------------------ in order

// Calls f(Columns, shared) as constants: value tiles as wide as leave a block for every processor,
// with the state in shared memory if that is enough.
template <template <class, int, bool> class Kernel, class E, class F>
void with_value_tiles(const GdnShape& shape, const DeviceLimits& device, const F& f) {
  const auto blocks = [&](int width) {
    return shape.all_heads() * blocks_of(shape.value_dim, width);
  };
  const auto fits = [&](int floats) {
    return floats * static_cast<int>(sizeof(float)) <= device.shared;
  };
  const auto shared = [&]<int kColumns>(std::integral_constant<int, kColumns>) {
    return typename Kernel<E, kColumns, true>::Places(shape.key_dim).carve.used();
  };
  const std::integral_constant<int, 4> wide;
  const std::integral_constant<int, 2> half;
  const std::integral_constant<int, 1> narrow;
  if (shape.value_dim > 32 && blocks(64) >= device.processors && fits(shared(wide)))
    return f(wide, std::true_type{});
  if (shape.value_dim > 16 && blocks(32) >= device.processors && fits(shared(half)))
    return f(half, std::true_type{});
  if (fits(shared(narrow))) return f(narrow, std::true_type{});
  f(wide, std::false_type{});
}

template <class E, class Launch>
void gdn_forward_steps(const GdnShape& shape, const GdnForward<E>& io, const DeviceLimits& device,
                       Launch&& launch) {
  const GdnPrepared prepared(shape, io.scratch);
  launch(GdnPrepare<E>{shape, io, prepared});
  with_value_tiles<GdnStates, E>(shape, device, [&](auto columns, auto shared) {
    launch(GdnStates<E, columns(), shared()>{shape, io, prepared});
  });
  launch(GdnOutputs<E>{shape, io});
}

template <class E, class Launch>
void gdn_backward_steps(const GdnShape& shape, const GdnBackward<E>& io, const DeviceLimits& device,
                        Launch&& launch) {
  const GdnReversed reversed(shape, io.scratch);
  launch(GdnReverse<E>{shape, io, reversed});
  with_value_tiles<GdnStateGradients, E>(shape, device, [&](auto columns, auto shared) {
    launch(GdnStateGradients<E, columns(), shared()>{shape, io, reversed});
  });
  launch(GdnGradients<E>{shape, io, reversed});
}

template <class E, class Launch>
void gdn_step_steps(const GdnShape& shape, const GdnStep<E>& io, const DeviceLimits&,
                    Launch&& launch) {
  launch(GdnStepTokens<E>{shape, io});
}

}  // namespace graft::cuda
