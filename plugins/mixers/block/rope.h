// Rotary position embedding as an option of a mixer.
#pragma once

#include <vector>

namespace graft::mixers {

struct Rope {
  std::vector<double> inv_freq;  // pair i rotates entries (i, i + n) of the first 2n of a head
  double factor = 1;             // of cos and sin
  bool exists() const { return !inv_freq.empty(); }
};

}  // namespace graft::mixers
