// What chunks of the mixers share: gates, the inverse of a unit lower triangular matrix, sums, and
// the gradient of the decays.
#pragma once

#include <cmath>

#include "products.h"

namespace graft::cuda {

// The chunk a block works on, and where its rows lie in what is kept for each chunk.
struct ChunkAt {
  int batch, head, index, n;
  int64_t first;    // token
  int64_t ordinal;  // among all chunks

  template <class Shape>
  GRAFT_BOTH ChunkAt(const Shape& s, int index_, int head_, int batch_)
      : batch(batch_), head(head_), index(index_) {
    first = static_cast<int64_t>(index) * kChunk;
    n = static_cast<int>(s.tokens - first < kChunk ? s.tokens - first : kChunk);
    ordinal = (static_cast<int64_t>(batch) * s.heads + head) * s.chunks() + index;
  }
  template <class E>
  GRAFT_BOTH GlobalRows<E> of(const Tensor<E>& x, int width) const {
    return x.rows(batch, head, first, n, width);
  }
  // Of `data` [chunks, rows, columns].
  template <class T>
  GRAFT_BOTH GlobalRows<T> kept(T* data, int rows, int columns) const {
    return {data + ordinal * rows * columns, columns, rows, columns};
  }
};

// What the gates of a chunk come to, with D_ij = e_{j+1} ... e_i, e = exp(g): running products of
// factors in [0, 1], nothing is divided by a decay. Tokens behind the chunk's n do nothing: e and
// weight are 0.
struct GatePlaces {
  Place e, weight;           // weight: the write gate
  Place from_start, to_end;  // p_i = e_0 ... e_i; D_{n-1,j}
  Place decay;               // D, 0 above the diagonal

  GRAFT_BOTH explicit GatePlaces(Carver& carve)
      : e(carve.row(kChunk)),
        weight(carve.row(kChunk)),
        from_start(carve.row(kChunk)),
        to_end(carve.row(kChunk)),
        decay(carve.matrix(kChunk, kChunk)) {}
};

template <class Memory>
struct Gates {
  Tile<Memory> e, weight, from_start, to_end, decay;
};
template <class Block>
GRAFT_DEVICE auto gates_of(Block& block, const GatePlaces& p) {
  return Gates<typename Block::Memory>{tile(block, p.e), tile(block, p.weight),
                                       tile(block, p.from_start), tile(block, p.to_end),
                                       tile(block, p.decay)};
}

// Absent g: nothing decays; absent weight: everything is written.
template <class Block, class Memory>
GRAFT_DEVICE void load_gates(Block& block, GlobalRows<const float> g,
                             GlobalRows<const float> weight, int n, const Gates<Memory>& s) {
  block.phase([&](int t) {
    if (t >= kChunk) return;
    s.e.set(t, t < n ? (g.data == nullptr ? 1.0f : expf(g.load(t, 0))) : 0.0f);
    s.weight.set(t, t < n ? (weight.data == nullptr ? 1.0f : weight.load(t, 0)) : 0.0f);
  });
  block.phase([&](int t) {
    if (t > kChunk) return;
    float run = t == kChunk ? 1 : 0;
    for (int i = 0; i < kChunk; ++i) {
      run = i == t ? 1.0f : run * s.e(i);
      if (t < kChunk) {
        s.decay.set(i, t, run);
      } else {
        s.from_start.set(i, run);
      }
    }
  });
  block.phase([&](int t) {
    if (t < kChunk) s.to_end.set(t, t < n ? s.decay(n - 1, t) : 0.0f);
  });
}

// ------------------------------------------------------------------ triangular systems

// out = (I + l)^{-1}, l [64, 64] strictly lower triangular: the 16 x 16 blocks on the diagonal by
// substitution, then twice pairs of them, [A 0; B C]^{-1} = [A' 0; -C' B A' C']. `room` has 1024
// numbers.
template <class Block, class Memory>
GRAFT_DEVICE void invert(Block& block, Tile<Memory> l, Tile<Memory> out, Tile<Memory> room) {
  constexpr int kFirst = 16;
  block.phase([&](int t) {
    for (int at = t; at < kChunk * kChunk; at += kThreads) {
      const int i = at / kChunk, j = at % kChunk;
      if (i / kFirst != j / kFirst) out.set(i, j, 0);
    }
    if (t >= kChunk) return;
    const int base = t / kFirst * kFirst;
    for (int i = base; i < base + kFirst; ++i) {
      float x = i == t ? 1 : 0;
      for (int j = t; j < i; ++j) x -= l(i, j) * out(j, t);
      out.set(i, t, x);
    }
  });
  for (int size = kFirst; size < kChunk; size *= 2) {
    const int elements = kChunk / (2 * size) * size * size;
    block.phase([&](int t) {
      for (int at = t; at < elements; at += kThreads) {
        const int base = at / (size * size) * 2 * size, i = at / size % size, j = at % size;
        float x = 0;
        for (int k = j; k < size; ++k) x += l(base + size + i, base + k) * out(base + k, base + j);
        room.set(at, x);
      }
    });
    block.phase([&](int t) {
      for (int at = t; at < elements; at += kThreads) {
        const int first = at / (size * size) * size * size;
        const int base = at / (size * size) * 2 * size, i = at / size % size, j = at % size;
        float x = 0;
        for (int k = 0; k <= i; ++k)
          x -= out(base + size + i, base + size + k) * room(first + k * size + j);
        out.set(base + size + i, base + j, x);
      }
    });
  }
}

// ------------------------------------------------------------------ sums over a row of threads

// Adds up what the 16 threads of 4 rows have for each of them: out(i) for i < 64. `room` is
// [64, 16].
template <class Block, class Memory, class Parts>
GRAFT_DEVICE void sum_rows(Block& block, Parts& parts, Tile<Memory> room, Tile<Memory> out) {
  block.phase([&](int t) {
    GRAFT_UNROLL
    for (int r = 0; r < 4; ++r) room.set(first_row(t) + r, t % 16, parts[t].at[r]);
  });
  block.phase([&](int t) {
    if (t >= kChunk) return;
    float total = 0;
    for (int c = 0; c < 16; ++c) total += room(t, c);
    out.set(t, total);
  });
}

// One number of each thread made into one, to out(0). `room` has kThreads numbers.
template <class Block, class Memory, class Parts, class Two>
GRAFT_DEVICE void reduce_all(Block& block, Parts& parts, Tile<Memory> room, Tile<Memory> out,
                             const Two& two) {
  block.phase([&](int t) { room.set(t, parts[t]); });
  for (int half = kThreads / 2; half > 0; half /= 2) {
    block.phase([&](int t) {
      if (t < half) room.set(t, two(room(t), room(t + half)));
    });
  }
  block.phase([&](int t) {
    if (t == 0) out.set(0, room(0));
  });
}
template <class Block, class Memory, class Parts>
GRAFT_DEVICE void sum_all(Block& block, Parts& parts, Tile<Memory> room, Tile<Memory> out) {
  reduce_all(block, parts, room, out, [](float a, float b) { return a + b; });
}
template <class Block, class Memory, class Parts>
GRAFT_DEVICE void largest_of_all(Block& block, Parts& parts, Tile<Memory> room, Tile<Memory> out) {
  reduce_all(block, parts, room, out, [](float a, float b) { return fmaxf(a, b); });
}

// ------------------------------------------------------------------ gradients of the gates

// With X_ij = dL/dD_ij D_ij, where j = -1 stands for the state at the chunk's start and i = n for
// the one at its end, dL/dg_m = sum of X_ij over j < m <= i: running sums from the bottom, so that
// every term of dg_m truly contains e_m and a reset gets exactly 0.
//
// `inside` holds X_ij / weight_j on and below the diagonal; what is written there then are the
// running sums. dweight_j is the sum of its column.
template <class Memory>
struct GateGradient {
  Tile<Memory> from_state;  // X_{i,-1}
  Tile<Memory> to_state;    // X_{n,j} / weight_j
  Tile<Memory> across;      // (0): X_{n,-1}
  Tile<Memory> inside;
  Tile<Memory> weight;
};

template <class Block, class Memory>
GRAFT_DEVICE void gate_gradient(Block& block, int n, const GateGradient<Memory>& x,
                                GlobalRows<float> dg, GlobalRows<float> dweight) {
  block.phase([&](int t) {
    if (t >= n) return;
    float run = x.to_state(t);
    for (int m = n - 1; m >= t; --m) {
      run += x.inside(m, t);
      x.inside.set(m, t, x.weight(t) * run);
    }
    if (dweight.data != nullptr) dweight.store(t, 0, run);
  });
  block.phase([&](int t) {
    if (t >= n || dg.data == nullptr) return;
    float total = x.across(0);
    for (int m = n - 1; m >= t; --m) total += x.from_state(m);
    for (int j = 0; j < t; ++j) total += x.inside(t, j);
    dg.store(t, 0, total);
  });
}

}  // namespace graft::cuda
