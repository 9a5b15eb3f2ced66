// Work on the host's threads with scratch memory that was planned before: a lane is a piece of
// scratch, and takes one unit of work after the other until none is left. Which lane computes a
// unit is chance; what it computes is not.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "graft/host.hpp"

namespace graft::mixers {

// How many lanes to plan for `units` units: more than there are processors never run at once.
inline int64_t lanes_for(int64_t units) {
  static const int64_t processors = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return std::min(units, processors);
}

// body(unit, lane) for every unit, lane < lanes_for(units). `cost` of a unit in multiply-adds,
// roughly: threads are woken only where that pays.
template <class Body>
void for_each_unit(int64_t units, int64_t cost, const Body& body) {
  constexpr int64_t kWorthAThread = 100'000;  // some 10 microseconds
  const int64_t useful = cost * units / kWorthAThread;
  const int64_t lanes = std::min(lanes_for(units), std::max<int64_t>(1, useful));
  if (lanes <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) body(unit, int64_t{0});
    return;
  }
  std::atomic<int64_t> next{0};
  sdk::parallel_for(0, lanes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t lane = begin; lane < end; ++lane) {
      for (int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1))
        body(unit, lane);
    }
  });
}

// Rows in pieces of fixed size, so that sums over rows do not depend on the number of threads:
// body(piece, begin, end, lane).
inline constexpr int64_t kPieceRows = 512;
inline int64_t row_pieces(int64_t rows) { return (rows + kPieceRows - 1) / kPieceRows; }

template <class Body>
void for_each_piece(int64_t rows, int64_t cost_of_row, const Body& body) {
  for_each_unit(row_pieces(rows), cost_of_row * std::min(rows, kPieceRows),
                [&](int64_t piece, int64_t lane) {
                  body(piece, piece * kPieceRows, std::min(rows, (piece + 1) * kPieceRows), lane);
                });
}

}  // namespace graft::mixers
