#include "plugins/objectives/shared/row_kernels.h"

#include <bit>
#include <limits>

// One copy of each loop per instruction set; the loader picks. A sanitizer's run time is not up yet
// when it does.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GRAFT_EACH_CPU __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define GRAFT_EACH_CPU
#endif

namespace graft::objectives {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float bits_to_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t float_to_bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// Branch-free, so that a loop over it becomes vector code.
[[gnu::always_inline]] inline float half_to_float(std::uint16_t half) {
  const std::uint32_t rest = static_cast<std::uint32_t>(half & 0x7FFFu) << 13;
  // Right for subnormals too: the product normalises them.
  const float finite = bits_to_float(rest) * 0x1p112f;
  const std::uint32_t magnitude = rest >= 0x0F800000u ? rest | 0x7F800000u : float_to_bits(finite);
  return bits_to_float(magnitude | (static_cast<std::uint32_t>(half & 0x8000u) << 16));
}

[[gnu::always_inline]] inline std::uint16_t float_to_half(float x) {
  const std::uint32_t bits = float_to_bits(x), magnitude = bits & 0x7FFFFFFFu;
  // Adding the right power of two leaves the half's mantissa, rounded by the adder, in the low
  // bits.
  const float small = bits_to_float(magnitude) + 0.5f;
  const std::uint32_t subnormal = float_to_bits(small) - 0x3F000000u;
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  const std::uint32_t normal = (magnitude + 0xC8000FFFu + odd) >> 13;
  const std::uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const std::uint32_t half = magnitude >= 0x47800000u  ? special
                             : magnitude < 0x38800000u ? subnormal
                                                       : normal;
  return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// exp on [-87, 0] (Cephes' expf): 2^k times a polynomial on [-ln2/2, ln2/2].
[[gnu::always_inline]] inline float exponential(float x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float rounded = x * 1.44269504088896341f + kMagic;
  const float k = rounded - kMagic;
  const float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const std::uint32_t exponent = (float_to_bits(rounded) - float_to_bits(kMagic) + 127u) << 23;
  const float value = p * bits_to_float(exponent);
  return x < -87.0f ? 0.0f : value;  // a NaN compares false and is in `value`
}

constexpr std::int64_t kLanes = 16;

}  // namespace

GRAFT_EACH_CPU void from_bfloat16(const std::uint16_t* __restrict in, std::int64_t n,
                                  float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i)
    out[i] = bits_to_float(static_cast<std::uint32_t>(in[i]) << 16);
}

GRAFT_EACH_CPU void from_float16(const std::uint16_t* __restrict in, std::int64_t n,
                                 float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = half_to_float(in[i]);
}

GRAFT_EACH_CPU void to_bfloat16(const float* __restrict in, std::int64_t n,
                                std::uint16_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = float_to_bits(in[i]);
    const std::uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    // Rounding could carry a NaN's mantissa away.
    out[i] = static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : nearest);
  }
}

GRAFT_EACH_CPU void to_float16(const float* __restrict in, std::int64_t n,
                               std::uint16_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = float_to_half(in[i]);
}

GRAFT_EACH_CPU float largest(const float* x, std::int64_t n) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = -kInfinity;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  for (; i < n; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  float most = -kInfinity;
  for (const float lane : lanes) most = lane > most ? lane : most;
  return most;
}

GRAFT_EACH_CPU void shifted(const float* __restrict x, float shift, float factor, std::int64_t n,
                            float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = (x[i] - shift) * factor;
}

GRAFT_EACH_CPU double exponentials(const float* __restrict x, std::int64_t n,
                                   float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = exponential(x[i]);
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(out[i + j]);
  for (; i < n; ++i) lanes[0] += static_cast<double>(out[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

GRAFT_EACH_CPU double weighted_difference(const float* w, const float* a, const float* b,
                                          std::int64_t n) {
  const auto term = [&](std::int64_t i) __attribute__((always_inline)) {
    const double difference = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    const double product = static_cast<double>(w[i]) * difference;
    return w[i] == 0.0f ? 0.0 : product;
  };
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] += term(i + j);
  for (; i < n; ++i) lanes[0] += term(i);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

GRAFT_EACH_CPU void replace_minus_infinity(float* x, float floor, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = x[i] == -kInfinity ? floor : x[i];
}

GRAFT_EACH_CPU void scaled(const float* __restrict x, float factor, std::int64_t n,
                           float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = factor * x[i];
}

GRAFT_EACH_CPU void scaled_difference(const float* __restrict a, float fa,
                                      const float* __restrict b, float fb, std::int64_t n,
                                      float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = fa * a[i] - fb * b[i];
}

GRAFT_EACH_CPU void scaled_deviation(const float* __restrict w, float factor,
                                     const float* __restrict a, const float* __restrict b,
                                     float mean, std::int64_t n, float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float value = factor * w[i] * (a[i] - b[i] - mean);
    out[i] = w[i] == 0.0f ? 0.0f : value;
  }
}

}  // namespace graft::objectives
