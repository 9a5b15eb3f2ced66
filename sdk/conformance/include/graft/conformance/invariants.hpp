// What has to hold, in numbers: the one place that says how close is close enough. graft's own
// tests of its plugins and the kit's use the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "graft/tensor.hpp"

namespace graft::conformance {

// The step of the type at 1: what rounding alone may do.
inline double epsilon(DLDataType dtype) {
  if (dtype.code == kDLBfloat) return 0x1p-7;
  if (dtype.bits == 64) return 0x1p-52;
  return dtype.bits == 16 ? 0x1p-10 : 0x1p-23;
}

// How many roundings lie behind an element, about: several sums over tens of terms. The types of 16
// bits are those of x and y, with sums and states in wider ones between, and have few; with the
// slack of the others, their tolerance would let a result of zeros pass.
inline double slack(DLDataType dtype) { return dtype.bits == 16 ? 2 : 32; }

// How far two ways to compute the same thing may differ in `dtype` over a sequence of `tokens`,
// relative to the size of the result: rounding errors of a recurrence grow like the root of its
// length.
inline double tolerance(DLDataType dtype, std::int64_t tokens) {
  return slack(dtype) * epsilon(dtype) *
         std::sqrt(static_cast<double>(std::max<std::int64_t>(tokens, 1)));
}

// Gradients go through twice the work.
inline double gradient_tolerance(DLDataType dtype, std::int64_t tokens) {
  return 4 * tolerance(dtype, tokens);
}

// The mean of the errors of a tensor's elements, as a share of what the largest may be: one element
// may be far off, not all of them.
inline constexpr double kMeanShare = 0.25;

// Central differences in float64 with step h: h^2 from the formula, eps/h from the rounding.
inline constexpr double kDifferenceStep = 1e-5;
inline constexpr double kDifferenceTolerance = 1e-6;

// A loss is a float32 whatever its signals are, so a difference of two has few digits: the step is
// wide, and two of them together (Richardson) leave an error of h^4. Relative to the largest entry
// of the gradient; for the loss's own rounding, see loss_rounding().
inline constexpr double kLossDifferenceStep = 0x1p-4;
inline constexpr double kLossDifferenceTolerance = 2e-3;
// What rounding of the loss alone may add to a difference of that step.
inline double loss_rounding(double loss) {
  return 4 * 0x1p-23 * std::fabs(loss) / kLossDifferenceStep;
}
// Two ways to the same loss or gradient: sums in another order, in float32.
inline constexpr double kLossTolerance = 2e-6;

struct Deviation {
  double largest =
      0;  // |got - expected| over the largest |expected| (or `floor`, when that is larger)
  double mean = 0;         // its mean
  std::int64_t where = 0;  // of the largest
};

// Infinite where one is not finite and the other is not the same, or the numbers of elements
// differ.
inline Deviation deviation(std::span<const double> got, std::span<const double> expected,
                           double floor = 1e-3) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  if (got.size() != expected.size()) return {kInfinite, kInfinite, 0};
  double size = floor;
  for (const double value : expected) {
    if (std::isfinite(value)) size = std::max(size, std::fabs(value));
  }
  Deviation out;
  double sum = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool same = got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]));
    const double difference = same ? 0 : std::fabs(got[i] - expected[i]) / size;
    const double d = std::isnan(difference) ? kInfinite : difference;
    sum += d;
    if (d > out.largest) out = {d, 0, static_cast<std::int64_t>(i)};
  }
  out.mean = got.empty() ? 0 : sum / static_cast<double>(got.size());
  return out;
}

// "" when it holds, else what does not: "element 17: expected 0.25, got nan (off by inf, 1e-05
// allowed)".
inline std::string not_close(std::span<const double> got, std::span<const double> expected,
                             double allowed, double floor = 1e-3) {
  if (got.size() != expected.size()) {
    return sdk::cat("has ", got.size(), " elements, expected ", expected.size());
  }
  const Deviation d = deviation(got, expected, floor);
  if (d.largest <= allowed) return "";
  const auto at = static_cast<std::size_t>(d.where);
  return sdk::cat("element ", d.where, ": expected ", expected[at], ", got ", got[at], " (off by ",
                  d.largest, " of the largest, ", allowed, " allowed)");
}

}  // namespace graft::conformance
