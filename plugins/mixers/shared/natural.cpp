#include "natural.h"

#include <algorithm>
#include <cmath>

namespace graft::mixers {

using sdk::cat;
using sdk::Status;

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

void impossible(std::string_view what, const std::string& why) {
  throw Status(GRAFT_UNIMPLEMENTED, cat("natural:", what), why);
}

void check_range(std::string_view what, std::span<const double> values, double low, double high) {
  for (const double value : values) {
    if (value >= low && value <= high) continue;
    throw Status(GRAFT_OUT_OF_RANGE, cat("natural:", what),
                 cat("expected a value from ", low, " to ", high, ", got ", value));
  }
}

void check_head_count(std::string_view what, std::span<const double> values, int64_t heads) {
  if (values.size() == static_cast<std::size_t>(heads)) return;
  throw Status(GRAFT_INVALID_ARGUMENT, cat("natural:", what),
               cat("expected ", heads, " values, one a head, got ", values.size()));
}

bool all_are(std::span<const double> values, double wanted) {
  return std::all_of(values.begin(), values.end(), [&](double v) { return v == wanted; });
}

void fill(sdk::NaturalParams& params, std::string_view name, double value) {
  std::ranges::fill(params.write(name), static_cast<float>(value));
}

void set_silu_bias(sdk::NaturalParams& params, std::string_view name, std::span<const double> gates,
                   int64_t width) {
  const auto raw = params.write(name);
  const auto channels = static_cast<std::size_t>(width);
  for (std::size_t h = 0; h < gates.size(); ++h) {
    const auto value = static_cast<float>(silu_inverse(gates[h]));
    std::fill_n(raw.begin() + static_cast<std::ptrdiff_t>(h * channels), channels, value);
  }
}

}  // namespace graft::mixers
