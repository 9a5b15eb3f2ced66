// Random numbers that a seed repeats on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

namespace graft::conformance {

// SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In (0, 1).
  double unit() { return (static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53; }
  double between(double low, double high) { return low + (high - low) * unit(); }
  // 0 <= result < n.
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n));
  }
  double normal() {
    return std::sqrt(-2 * std::log(unit())) * std::cos(2 * std::numbers::pi * unit());
  }
  std::vector<double> normals(std::int64_t n, double size = 1) {
    std::vector<double> out(static_cast<std::size_t>(n));
    for (double& x : out) x = size * normal();
    return out;
  }

 private:
  std::uint64_t state_;
};

}  // namespace graft::conformance
