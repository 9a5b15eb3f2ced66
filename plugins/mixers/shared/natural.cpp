#include "natural.h"

#include <algorithm>
#include <cmath>

namespace graft::mixers {

double softplus_inverse(double y) { return y + std::log(-std::expm1(-y)); }

double sigmoid_inverse(double y) { return std::log(y) - std::log1p(-y); }

double silu_inverse(double y) {
  constexpr double kLowest = -1.2784645427610738;
  // silu(x) >= x / 2 - 0.28 on this branch and silu(x) <= x for x >= 0, so the root is bracketed.
  double low = kLowest, high = std::max(1.0, 2 * y + 2);
  for (int i = 0; i < 200 && high - low > 1e-15 * std::max(1.0, high); ++i) {
    const double middle = 0.5 * (low + high);
    (middle / (1 + std::exp(-middle)) < y ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

}  // namespace graft::mixers
