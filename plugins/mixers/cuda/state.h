// Where a block keeps the state that it takes from chunk to chunk: in shared memory where the
// device has enough, else in global memory, at the chunks' borders, where it goes anyway. The
// second is slower and takes any number of keys.
#pragma once

#include "products.h"

namespace graft::cuda {

// 16 * Columns value columns of a state, in shared memory; rows behind the keys' are zero.
template <class Memory>
struct SharedState {
  Tile<Memory> tile;
  GRAFT_DEVICE auto operand() const { return resident<Left::kByInner>(tile); }
  GRAFT_DEVICE float read(int r, int c) const { return tile(r, c); }
  GRAFT_DEVICE void write(int r, int c, float x) const { tile.set(r, c, x); }
};

// Rows of `from`, which are read, and of `to`, which are written, from column `first` on.
template <int kWidth, class Memory>
struct BorderState {
  Tile<Memory> staging;  // [kInner, kWidth]
  GlobalRows<float> from, to;
  int first;
  GRAFT_DEVICE auto operand() const { return by_inner<kWidth>(staging, from, first); }
  GRAFT_DEVICE float read(int r, int c) const { return from.load(r, first + c); }
  GRAFT_DEVICE void write(int r, int c, float x) const { to.store(r, first + c, x); }
};

// Columns [first, first + width) of a state that may be absent (zero) to another, by all threads.
// f(i, j, x) gets every element, those of rows up to `rows` too that the state lacks, as zeros.
template <class Block, class F>
GRAFT_DEVICE void for_state(Block& block, GlobalRows<const float> in, int rows, int first,
                            int width, const F& f) {
  block.phase([&](int t) {
    for (int at = t; at < rows * width; at += kThreads) {
      const int i = at / width, j = at % width;
      f(i, j, in.data == nullptr ? 0.0f : in.load(i, first + j));
    }
  });
}

}  // namespace graft::cuda
