#include "plugins/initializers/taylor/least_squares.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace graft::taylor {
namespace {

// The problems are tiny: threads would only wait for each other.
const bool one_thread = [] {
  at::set_num_threads(1);
  return true;
}();

using ::testing::HasSubstr;

at::Generator seeded(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

at::Tensor randn(at::IntArrayRef shape, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  at::Generator generator = seeded(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble)).to(dtype);
}

double largest(const at::Tensor& difference) { return difference.abs().max().item<double>(); }

// The solution of the normal equations with explicit loops over tokens.
at::Tensor by_hand(const at::Tensor& z, const at::Tensor& y, const at::Tensor& w, double lambda,
                   const at::Tensor& prior) {
  const int64_t n = z.size(0), d = z.size(1);
  at::Tensor gram = at::zeros({d, d}, at::kDouble), moment = at::zeros({d, y.size(1)}, at::kDouble);
  for (int64_t t = 0; t < n; ++t) {
    gram += at::outer(z[t], z[t]) * w[t];
    moment += at::outer(z[t], y[t]) * w[t];
  }
  const double ridge = lambda * gram.diagonal().mean().item<double>();
  return at::matmul(at::linalg_inv(gram + ridge * at::eye(d, at::kDouble)), moment + ridge * prior);
}

TEST(LeastSquares, EqualsTheNormalEquationsOverAllSizes) {
  for (const int64_t groups : {1, 3}) {
    for (const int64_t inputs : {1, 2, 7}) {
      for (const int64_t outputs : {1, 5}) {
        for (const int64_t n : {1, 8, 65}) {
          for (const bool weighted : {false, true}) {
            const at::Tensor z = randn({groups, n, inputs}, 1), y = randn({groups, n, outputs}, 2);
            const at::Tensor w = weighted ? randn({groups, n}, 3).square() : at::Tensor();
            const at::Tensor prior = randn({groups, inputs, outputs}, 4);
            LeastSquares fit(groups, inputs, outputs);
            const int64_t half = n / 2;  // in two batches, one of them perhaps empty
            for (const auto& [from, count] : {std::pair{int64_t{0}, half}, {half, n - half}}) {
              fit.add(z.narrow(1, from, count), y.narrow(1, from, count),
                      weighted ? w.narrow(1, from, count) : at::Tensor());
            }
            const at::Tensor solution = fit.solve(0.3, prior);
            for (int64_t g = 0; g < groups; ++g) {
              const at::Tensor ones = at::ones({n}, at::kDouble);
              const at::Tensor expected =
                  by_hand(z[g], y[g], weighted ? w[g] : ones, 0.3, prior[g]);
              EXPECT_LT(largest(solution[g] - expected), 1e-9);
            }
          }
        }
      }
    }
  }
}

TEST(LeastSquares, RecoversAnExactMapFromFloat32) {
  const at::Tensor z = randn({2, 500, 16}, 5, at::kFloat), map = randn({2, 16, 4}, 6, at::kFloat);
  LeastSquares fit(2, 16, 4);
  fit.add(z, at::bmm(z, map));
  EXPECT_LT(largest(fit.solve(0.0) - map), 1e-4);
  EXPECT_LT(largest(fit.relative_residual(map)), 1e-6);
}

TEST(LeastSquares, TheScaleOfTheWeightsDropsOut) {
  const at::Tensor z = randn({1, 40, 3}, 7), y = randn({1, 40, 2}, 8);
  const at::Tensor w = randn({40}, 9).square();
  LeastSquares fit(1, 3, 2), scaled(1, 3, 2);
  fit.add(z, y, w);
  scaled.add(z, y, w * 1e-6);
  EXPECT_LT(largest(fit.solve(0.1) - scaled.solve(0.1)), 1e-9);
}

TEST(LeastSquares, ATokenOfWeightZeroCountsForNothing) {
  const at::Tensor z = randn({1, 5, 2}, 10), y = randn({1, 5, 2}, 11);
  at::Tensor w = at::ones({5}, at::kDouble);
  w[4] = 0;
  LeastSquares all(1, 2, 2), four(1, 2, 2);
  all.add(z, y, w);
  four.add(z.narrow(1, 0, 4), y.narrow(1, 0, 4));
  EXPECT_LT(largest(all.solve(0.1) - four.solve(0.1)), 1e-12);
}

TEST(LeastSquares, ALargeRidgeGivesThePrior) {
  const at::Tensor prior = randn({1, 3, 2}, 12);
  LeastSquares fit(1, 3, 2);
  fit.add(randn({1, 30, 3}, 13), randn({1, 30, 2}, 14));
  EXPECT_LT(largest(fit.solve(1e9, prior) - prior), 1e-6);
}

TEST(LeastSquares, InputsOfZerosGiveThePriorOrZero) {
  const at::Tensor prior = randn({2, 3, 2}, 15);
  at::Tensor z = randn({2, 10, 3}, 16);
  z[1].zero_();
  LeastSquares fit(2, 3, 2);
  fit.add(z, randn({2, 10, 2}, 17));
  EXPECT_EQ(largest(fit.solve(0.1, prior)[1] - prior[1]), 0.0);
  EXPECT_EQ(largest(fit.solve(0.1)[1]), 0.0);
  EXPECT_GT(largest(fit.solve(0.1)[0]), 0.0);
}

TEST(LeastSquares, RelativeResidualIsThatOfTheFit) {
  for (const auto sums : {at::kDouble, at::kFloat}) {
    const at::Tensor z = randn({2, 64, 4}, 18, at::kFloat), y = randn({2, 64, 3}, 19, at::kFloat);
    const at::Tensor w = randn({2, 64}, 20, at::kFloat).abs();
    LeastSquares fit(2, 4, 3, sums);
    fit.add(z, y, w);
    const at::Tensor map = fit.solve(0.1);
    const at::Tensor error = (y - at::bmm(z, map.to(at::kFloat))).square().sum(-1) * w;
    const at::Tensor expected = error.sum(-1) / (y.square().sum(-1) * w).sum(-1);
    EXPECT_LT(largest(fit.relative_residual(map) - expected), 1e-5);
  }
  LeastSquares silent(1, 2, 2);
  silent.add(randn({1, 9, 2}, 21), at::zeros({1, 9, 2}, at::kDouble));
  EXPECT_EQ(silent.relative_residual(silent.solve(0.1)).item<double>(), 1.0);
}

TEST(LeastSquares, ClearForgets) {
  LeastSquares fit(1, 2, 2), fresh(1, 2, 2);
  fit.add(randn({1, 9, 2}, 22), randn({1, 9, 2}, 23));
  fit.clear();
  for (LeastSquares* const f : {&fit, &fresh}) f->add(randn({1, 9, 2}, 24), randn({1, 9, 2}, 25));
  EXPECT_EQ(largest(fit.solve(0.1) - fresh.solve(0.1)), 0.0);
}

std::string refusal(const LeastSquares& fit, double lambda) {
  try {
    fit.solve(lambda);
  } catch (const Unsolvable& error) {
    return error.what();
  }
  return "solved";
}

TEST(LeastSquares, SaysWhyItCannotSolve) {
  LeastSquares dependent(1, 2, 1);
  dependent.add(at::ones({1, 4, 2}, at::kDouble), at::ones({1, 4, 1}, at::kDouble));
  EXPECT_THAT(refusal(dependent, 0.0), HasSubstr("a larger ridge is needed"));
  EXPECT_EQ(refusal(dependent, 0.1), "solved");
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), 1e300}) {
    at::Tensor z = at::ones({1, 4, 2}, at::kDouble);
    z[0][1][0] = bad;
    LeastSquares fit(1, 2, 1);
    fit.add(z, at::ones({1, 4, 1}, at::kDouble));
    EXPECT_THAT(refusal(fit, 0.1), HasSubstr("not finite"));
  }
}

}  // namespace
}  // namespace graft::taylor
