#include "plugins/objectives/shared/row_kernels.h"

#include "plugins/objectives/shared/testing.h"

namespace graft::objectives {
namespace {

using testing::kInf;

constexpr float kFloatInf = std::numeric_limits<float>::infinity();
constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();

// Around the lanes of the loops.
const std::vector<std::int64_t> kSizes = {0, 1, 2, 15, 16, 17, 31, 33, 1024};

std::vector<float> floats(std::int64_t n, unsigned seed, double deviation = 1) {
  std::vector<float> out;
  for (const double x : graft::testing::normals(static_cast<std::size_t>(n), seed, deviation))
    out.push_back(static_cast<float>(x));
  return out;
}

TEST(Exponentials, AreRightToTwoUnitsInTheLastPlace) {
  std::vector<float> x;
  for (float at = -87.0f; at < 0; at += 0.0037f) x.push_back(at);
  x.push_back(0);
  std::vector<float> out(x.size());
  const double sum = exponentials(x.data(), static_cast<std::int64_t>(x.size()), out.data());
  double expected = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    EXPECT_NEAR(out[i] / exact, 1, 2.4e-7) << x[i];
    expected += exact;
  }
  EXPECT_NEAR(sum / expected, 1, 1e-7);
}

TEST(Exponentials, EndsOfTheRange) {
  const float x[] = {0, -87.01f, -1e4f, -3e38f, -kFloatInf, kFloatNan};
  float out[6];
  exponentials(x, 6, out);
  EXPECT_EQ(out[0], 1);
  for (int i = 1; i < 5; ++i) EXPECT_EQ(out[i], 0) << x[i];
  EXPECT_TRUE(std::isnan(out[5]));
  EXPECT_EQ(exponentials(x, 0, out), 0);
}

TEST(Largest, OfAnySizeWithTheLargestAnywhere) {
  EXPECT_EQ(largest(nullptr, 0), -kFloatInf);
  for (const std::int64_t n : kSizes) {
    for (std::int64_t at = 0; at < n; at += std::max<std::int64_t>(1, n / 5)) {
      std::vector<float> x(static_cast<std::size_t>(n), -7);
      x[static_cast<std::size_t>(at)] = -2;
      EXPECT_EQ(largest(x.data(), n), -2) << n << " at " << at;
    }
  }
  const float with_nan[] = {1, kFloatNan, 3};
  EXPECT_EQ(largest(with_nan, 3), 3);
}

TEST(WeightedDifference, SumsAndLeavesOutWeightZero) {
  for (const std::int64_t n : kSizes) {
    auto w = floats(n, 1), a = floats(n, 2), b = floats(n, 3);
    double expected = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      if (i % 5 == 3) {
        w[i] = 0;
        a[i] = -kFloatInf;
        b[i] = i % 2 == 0 ? -kFloatInf : kFloatNan;
      } else {
        expected +=
            static_cast<double>(w[i]) * (static_cast<double>(a[i]) - static_cast<double>(b[i]));
      }
    }
    EXPECT_NEAR(weighted_difference(w.data(), a.data(), b.data(), n), expected, 1e-9) << n;
  }
}

TEST(Maps, ComputeEachNumber) {
  for (const std::int64_t n : kSizes) {
    const auto a = floats(n, 1), b = floats(n, 2);
    auto w = floats(n, 3);
    if (n > 2) w[2] = 0;
    std::vector<float> shift(a.size()), scale(a.size()), difference(a.size()), deviation(a.size());
    shifted(a.data(), 0.5f, 2, n, shift.data());
    scaled(a.data(), -3, n, scale.data());
    scaled_difference(a.data(), 2, b.data(), 3, n, difference.data());
    scaled_deviation(w.data(), 2, a.data(), b.data(), 0.25f, n, deviation.data());
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_FLOAT_EQ(shift[i], (a[i] - 0.5f) * 2);
      EXPECT_FLOAT_EQ(scale[i], -3 * a[i]);
      EXPECT_NEAR(difference[i], 2 * a[i] - 3 * b[i], 1e-6);
      EXPECT_NEAR(deviation[i], 2 * w[i] * (a[i] - b[i] - 0.25f), 1e-5);
    }
  }
  float x[] = {1, -kFloatInf, kFloatNan, kFloatInf};
  replace_minus_infinity(x, -100, 4);
  EXPECT_EQ(x[0], 1);
  EXPECT_EQ(x[1], -100);
  EXPECT_TRUE(std::isnan(x[2]));
  EXPECT_EQ(x[3], kFloatInf);
}

TEST(SixteenBits, EveryNumberIsReadAsItsDefinitionSays) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  std::vector<float> half(all.size()), brain(all.size());
  from_float16(all.data(), 65536, half.data());
  from_bfloat16(all.data(), 65536, brain.data());
  const auto same = [](float got, double expected) {
    return std::isnan(expected) ? std::isnan(got) : static_cast<double>(got) == expected;
  };
  for (const std::uint16_t bits : all) {
    EXPECT_TRUE(same(half[bits], graft::testing::decode16(bits, 10))) << "float16 " << bits;
    EXPECT_TRUE(same(brain[bits], graft::testing::decode16(bits, 7))) << "bfloat16 " << bits;
  }
}

TEST(SixteenBits, NumbersAreRoundedToTheNearest) {
  std::vector<float> x = floats(4000, 5);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] *= std::ldexp(1.0f, static_cast<int>(i % 80) - 50);
  // Ties, the edges of the formats, and what lies beyond them.
  for (const float special :
       {0.0f,        -0.0f,          1.00048828125f, 1.00146484375f, 1.00390625f, 1.01171875f,
        65504.0f,    65519.9f,       65520.0f,       65536.0f,       1e30f,       6.103515625e-05f,
        6.0976e-05f, 5.9604645e-08f, 2.9802322e-08f, 2.99e-08f,      1e-9f,       kFloatInf,
        -kFloatInf,  kFloatNan})
    x.push_back(special);
  const auto n = static_cast<std::int64_t>(x.size());
  std::vector<std::uint16_t> half(x.size()), brain(x.size());
  to_float16(x.data(), n, half.data());
  to_bfloat16(x.data(), n, brain.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(half[i], graft::testing::encode16(x[i], 10)) << x[i];
    EXPECT_EQ(brain[i], graft::testing::encode16(x[i], 7)) << x[i];
  }
}

}  // namespace
}  // namespace graft::objectives
