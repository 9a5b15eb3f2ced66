// Products of matrices by one block: 64 rows by up to 64 columns at a time, each thread 4 rows by
// `Columns` columns in registers. Left and right matrices lie in shared memory: whole, or 32 of the
// inner index at a time (kInner), staged from global memory.
//
// Per 4 inner steps a thread loads 4 packs of the left matrix, which half of its warp shares, and 4
// of the right one for 16 * Columns multiplications: about as many shared memory cycles as
// arithmetic ones.
#pragma once

#include "block.h"

namespace graft::cuda {

inline constexpr int kInner = 32;

template <int Columns>
struct Sums {
  float at[4][static_cast<unsigned>(Columns)];
};

GRAFT_BOTH int first_row(int thread) { return 4 * (thread / 16); }
template <int Columns>
GRAFT_BOTH int first_column(int thread) {
  return Columns * (thread % 16);
}

// How the left matrix lies: element (i, k) in row i, or in row k.
enum class Left { kByRow, kByInner };

// x += left right over `inner` steps, a multiple of 4.
template <Left kLeft, int Columns, class Tile>
GRAFT_DEVICE void multiply(int thread, const Tile& left, const Tile& right, int inner,
                           Sums<Columns>& x) {
  const int i = first_row(thread), j = first_column<Columns>(thread);
#if defined(__CUDA_ARCH__)
#pragma unroll 2
#endif
  for (int k = 0; k < inner; k += 4) {
    Pack<4> a[4];
    GRAFT_UNROLL
    for (int r = 0; r < 4; ++r)
      a[r] =
          kLeft == Left::kByRow ? left.template pack<4>(i + r, k) : left.template pack<4>(k + r, i);
    GRAFT_UNROLL
    for (int step = 0; step < 4; ++step) {
      const Pack<Columns> b = right.template pack<Columns>(k + step, j);
      GRAFT_UNROLL
      for (int r = 0; r < 4; ++r) {
        const float factor = kLeft == Left::kByRow ? a[r].at[step] : a[step].at[r];
        GRAFT_UNROLL
        for (int c = 0; c < Columns; ++c) x.at[r][c] += factor * b.at[c];
      }
    }
  }
}

// Staging for one product.
struct StagingPlaces {
  Place left, left_inner, right;

  GRAFT_BOTH explicit StagingPlaces(Carver& carve)
      : left(carve.matrix(kChunk, kInner)), right(carve.matrix(kInner, kChunk)) {
    left_inner = {left.at, right.ld};  // [kInner, 64], in the same place
  }
};

// ------------------------------------------------------------------ operands

// What stands left or right in a product: stage() brings the inner steps [k, k + kInner) into
// shared memory, a thread its share; at(k) is where they lie then.

// In shared memory already. kByInner for every right matrix.
template <Left kLies, class Memory>
struct Resident {
  Tile<Memory> tile;
  GRAFT_DEVICE void stage(int, int) const {}
  GRAFT_DEVICE Tile<Memory> at(int k) const {
    return kLies == Left::kByRow ? tile.from(0, k) : tile.from(k, 0);
  }
};

// (i, k) = factor(i) source(i, k), i < 64, by row.
template <class Memory, class E, class Factor>
struct StagedByRow {
  Tile<Memory> tile;  // [64, kInner]
  GlobalRows<E> source;
  Factor factor;

  GRAFT_DEVICE void stage(int thread, int k) const {
    constexpr int kPacks = kInner / 4;
    GRAFT_UNROLL
    for (int at = thread; at < kChunk * kPacks; at += kThreads) {
      const int i = at / kPacks, c = at % kPacks * 4;
      Pack<4> x = source.load4(i, k + c);
      const float f = factor(i);
      GRAFT_UNROLL
      for (int e = 0; e < 4; ++e) x.at[e] *= f;
      tile.template put<4>(i, c, x);
    }
  }
  GRAFT_DEVICE Tile<Memory> at(int) const { return tile; }
};

// (k, j) = factor(k) source(k, first + j), j < kWidth, by the inner index: right matrices, and left
// ones whose rows are the inner index.
template <int kWidth, class Memory, class E, class Factor>
struct StagedByInner {
  Tile<Memory> tile;  // [kInner, kWidth]
  GlobalRows<E> source;
  int first;
  Factor factor;

  GRAFT_DEVICE void stage(int thread, int k) const {
    constexpr int kPacks = kWidth / 4;
    GRAFT_UNROLL
    for (int at = thread; at < kInner * kPacks; at += kThreads) {
      const int r = at / kPacks, c = at % kPacks * 4;
      Pack<4> x = source.load4(k + r, first + c);
      const float f = factor(k + r);
      GRAFT_UNROLL
      for (int e = 0; e < 4; ++e) x.at[e] *= f;
      tile.template put<4>(r, c, x);
    }
  }
  GRAFT_DEVICE Tile<Memory> at(int) const { return tile; }
};

// (k, j) = source(first + j, k), j < 64: a right matrix whose columns are the source's rows. Eight
// rows by four packs a warp: whole sectors of global memory, and two threads at most to a bank.
template <class Memory, class E>
struct StagedTransposed {
  Tile<Memory> tile;  // [kInner, 64]
  GlobalRows<E> source;
  int first;

  GRAFT_DEVICE void stage(int thread, int k) const {
    GRAFT_UNROLL
    for (int at = thread; at < kChunk * (kInner / 4); at += kThreads) {
      const int lane = at % 32, part = at / 32;  // 16 parts: 8 of rows, 2 of packs
      const int j = part % 8 * 8 + lane % 8, c = (part / 8 * 4 + lane / 8) * 4;
      const Pack<4> x = source.load4(first + j, k + c);
      GRAFT_UNROLL
      for (int e = 0; e < 4; ++e) tile.set(c + e, j, x.at[e]);
    }
  }
  GRAFT_DEVICE Tile<Memory> at(int) const { return tile; }
};

// Factors.
struct One {
  GRAFT_DEVICE float operator()(int) const { return 1; }
};
struct Constant {
  float value;
  GRAFT_DEVICE float operator()(int) const { return value; }
};
// factor * row(i)
template <class Memory>
struct ByRow {
  Tile<Memory> row;
  float factor = 1;
  GRAFT_DEVICE float operator()(int i) const { return factor * row(i); }
};

template <Left kLies, class Memory>
GRAFT_DEVICE Resident<kLies, Memory> resident(Tile<Memory> tile) {
  return {tile};
}
template <class Memory, class E, class Factor = One>
GRAFT_DEVICE StagedByRow<Memory, E, Factor> by_row(Tile<Memory> tile, GlobalRows<E> source,
                                                   Factor factor = {}) {
  return {tile, source, factor};
}
template <int kWidth = kChunk, class Memory, class E, class Factor = One>
GRAFT_DEVICE StagedByInner<kWidth, Memory, E, Factor> by_inner(Tile<Memory> tile,
                                                               GlobalRows<E> source, int first,
                                                               Factor factor = {}) {
  return {tile, source, first, factor};
}
template <class Memory, class E>
GRAFT_DEVICE StagedTransposed<Memory, E> transposed(Tile<Memory> tile, GlobalRows<E> source,
                                                    int first = 0) {
  return {tile, source, first};
}

// x += left right over `inner` steps; beyond them both are zero, or one is and the other a number.
template <Left kLeft, int Columns, class Block, class LeftOperand, class RightOperand, class X>
GRAFT_DEVICE void accumulate(Block& block, const LeftOperand& left, const RightOperand& right,
                             int inner, X& x) {
  for (int k = 0; k < inner; k += kInner) {
    block.phase([&](int t) {
      left.stage(t, k);
      right.stage(t, k);
    });
    block.phase([&](int t) { multiply<kLeft, Columns>(t, left.at(k), right.at(k), kInner, x[t]); });
  }
}

// f(r, c, i, j) of a thread's share of 64 rows.
template <int Columns, class F>
GRAFT_DEVICE void for_elements(int thread, const F& f) {
  const int i = first_row(thread), j = first_column<Columns>(thread);
  GRAFT_UNROLL
  for (int r = 0; r < 4; ++r) {
    GRAFT_UNROLL
    for (int c = 0; c < Columns; ++c) f(r, c, i + r, j + c);
  }
}

// A thread's share of `x` to rows of global memory, from column `first` on.
template <int Columns, class E>
GRAFT_DEVICE void store_sums(int thread, const Sums<Columns>& x, GlobalRows<E> out, int first_i,
                             int first_j) {
  const int i = first_row(thread), j = first_column<Columns>(thread);
  GRAFT_UNROLL
  for (int r = 0; r < 4; ++r) out.store(first_i + i + r, first_j + j, x.at[r]);
}

}  // namespace graft::cuda
