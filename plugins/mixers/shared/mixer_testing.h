// Helpers of the mixers' tests.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace graft::mixers {

// Largest difference, over the size of what is expected (at least 1). Infinite for another shape or
// a NaN.
inline double error(const at::Tensor& got, const at::Tensor& expected) {
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  if (got.sizes() != expected.sizes()) return kWrong;
  if (expected.numel() == 0) return 0;
  const at::Tensor want = expected.to(at::kDouble);
  const double size = std::max(1.0, want.abs().max().item<double>());
  const double worst = (got.to(at::kDouble) - want).abs().max().item<double>() / size;
  return std::isfinite(worst) ? worst : kWrong;
}

}  // namespace graft::mixers
