#pragma once

#include <cstdint>
#include <functional>

namespace graft {

// How many pieces of independent work are done side by side: no more than LibTorch has threads.
std::int64_t lanes(std::int64_t pieces);

// work(piece, lane) for each piece in [0, pieces), on lanes(pieces) threads that share LibTorch's
// among them. The matrices of one calibration step are so small that two threads which share one
// of them wait for each other a good part of the time; two threads with a step each do not. A lane
// takes the next piece that nobody has, and sees its caller's grad and inference mode. What a piece
// gives depends on the number of threads, not on who does it; with `like`, each lane has the
// threads that it would have if there were so many pieces, so that a few give what they give among
// many. Rethrows the error of the first piece that failed, once all lanes stand still; pieces that
// were not begun by then are not.
void in_lanes(std::int64_t pieces,
              const std::function<void(std::int64_t piece, std::int64_t lane)>& work,
              std::int64_t like = 0);

}  // namespace graft
