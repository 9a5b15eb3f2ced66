// Hedgehog's feature map, phi(u) = max(softmax([W u + b, -(W u + b)]), floor), of the rows of a
// chunk, and its gradient. A row of `n` logits is the work of 16 threads, 4 rows at a time as in a
// product.
#pragma once

#include <cmath>

#include "chunk.h"

namespace graft::cuda {

inline constexpr int kLanes = 16;

struct FeaturePlaces {
  Place room, row;  // of a number of each thread's rows, and of each row

  GRAFT_BOTH explicit FeaturePlaces(Carver& carve)
      : room(carve.matrix(kChunk, kLanes)), row(carve.row(kChunk)) {}
};

// One number of each of a thread's 4 rows.
struct RowParts {
  float at[4];
};

// The largest of what the 16 threads of a row have.
template <class Block, class Memory, class Parts>
GRAFT_DEVICE void largest_of_rows(Block& block, Parts& parts, Tile<Memory> room, Tile<Memory> out) {
  block.phase([&](int t) {
    GRAFT_UNROLL
    for (int r = 0; r < 4; ++r) room.set(first_row(t) + r, t % kLanes, parts[t].at[r]);
  });
  block.phase([&](int t) {
    if (t >= kChunk) return;
    float most = room(t, 0);
    for (int c = 1; c < kLanes; ++c) most = fmaxf(most, room(t, c));
    out.set(t, most);
  });
}

// f(r, i, c) for a thread's share of the columns [0, n) of its 4 rows.
template <class F>
GRAFT_DEVICE void for_row_shares(int thread, int n, const F& f) {
  GRAFT_UNROLL
  for (int r = 0; r < 4; ++r)
    for (int c = thread % kLanes; c < n; c += kLanes) f(r, first_row(thread) + r, c);
}

// Where the features of a chunk go, [64, 2 n] each; `soft`, the softmax before its floor, is absent
// where nobody wants it. Rows behind the chunk's are 0.
struct FeatureRows {
  GlobalRows<float> phi, soft;
};

// From logits in the first half of `out.phi`.
template <class Block>
GRAFT_DEVICE void softmax_of_both_signs(Block& block, const FeaturePlaces& places, int rows, int n,
                                        float floor, const FeatureRows& out) {
  const auto room = tile(block, places.room), row = tile(block, places.row);
  const auto phi = out.phi;
  typename Block::template PerThread<RowParts> part(block);
  block.phase([&](int t) {
    for_row_shares(t, n, [&](int r, int i, int c) {
      if (i < rows) part[t].at[r] = fmaxf(part[t].at[r], fabsf(phi.load(i, c)));
    });
  });
  largest_of_rows(block, part, room, row);
  block.phase([&](int t) {
    part[t] = {};
    for_row_shares(t, n, [&](int r, int i, int c) {
      const float z = i < rows ? phi.load(i, c) : 0.0f, most = row(i);
      const float plus = i < rows ? expf(z - most) : 0.0f,
                  minus = i < rows ? expf(-z - most) : 0.0f;
      phi.store(i, c, plus);
      phi.store(i, n + c, minus);
      part[t].at[r] += plus + minus;
    });
  });
  sum_rows(block, part, room, row);
  block.phase([&](int t) {
    for_row_shares(t, n, [&](int, int i, int c) {
      if (i >= rows) return;
      for (int column : {c, n + c}) {
        const float p = phi.load(i, column) / row(i);
        phi.store(i, column, fmaxf(p, floor));
        if (out.soft.data != nullptr) out.soft.store(i, column, p);
      }
    });
  });
}

// One of the maps of a head: weight [n, columns], bias [n] or absent.
struct HeadMap {
  GlobalRows<const float> weight, bias;

  GRAFT_BOTH HeadMap(const float* weight_, const float* bias_, int head, int n, int columns)
      : weight(weight_ + static_cast<int64_t>(head) * n * columns, columns, n, columns) {
    if (bias_ != nullptr) bias = {bias_ + static_cast<int64_t>(head) * n, n, 1, n};
  }
};

template <class Block, class E>
GRAFT_DEVICE void features(Block& block, const StagingPlaces& staging, const FeaturePlaces& places,
                           GlobalRows<const E> u, const HeadMap& map, float floor,
                           const FeatureRows& out) {
  const auto left = tile(block, staging.left), right = tile(block, staging.right);
  const int n = map.weight.rows;
  typename Block::template PerThread<Sums<4>> x(block);
  for (int first = 0; first < n; first += kChunk) {
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int, int j) {
        x[t].at[r][c] = map.bias.data == nullptr ? 0.0f : map.bias.load(0, first + j);
      });
    });
    accumulate<Left::kByRow, 4>(block, by_row(left, u), transposed(right, map.weight, first),
                                u.columns, x);
    block.phase([&](int t) {
      for_elements<4>(t, [&](int r, int c, int i, int j) {
        if (first + j < n) out.phi.store(i, first + j, x[t].at[r][c]);
      });
    });
  }
  softmax_of_both_signs(block, places, u.rows, n, floor, out);
}

// The gradients of the logits, in the place of the first half of those of the features, `d`.
template <class Block>
GRAFT_DEVICE void softmax_gradient(Block& block, const FeaturePlaces& places, int rows, int n,
                                   float floor, GlobalRows<const float> soft, GlobalRows<float> d) {
  const auto row = tile(block, places.row);
  typename Block::template PerThread<RowParts> part(block);
  const auto kept = [&](int i, int c) { return soft.load(i, c) >= floor ? d.load(i, c) : 0.0f; };
  block.phase([&](int t) {
    for_row_shares(t, n, [&](int r, int i, int c) {
      part[t].at[r] += soft.load(i, c) * kept(i, c) + soft.load(i, n + c) * kept(i, n + c);
    });
  });
  sum_rows(block, part, tile(block, places.room), row);
  block.phase([&](int t) {
    for_row_shares(t, n, [&](int, int i, int c) {
      const float plus = soft.load(i, c) * (kept(i, c) - row(i));
      const float minus = soft.load(i, n + c) * (kept(i, n + c) - row(i));
      d.store(i, c, i < rows ? plus - minus : 0.0f);
    });
  });
}

}  // namespace graft::cuda
