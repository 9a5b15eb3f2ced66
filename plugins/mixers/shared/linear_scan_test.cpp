// The chunked scan against its recurrence.
#include "linear_scan.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "feature_map.h"
#include "graft/status.hpp"
#include "linear_scan_reference.h"
#include "mixer_testing.h"

namespace graft::mixers {
namespace {

using ::testing::HasSubstr;

struct Problem {
  at::Tensor q, k, x, g, state;  // the last two may be undefined
  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> out{q, k, x};
    if (g.defined()) out.push_back(g);
    if (state.defined()) out.push_back(state);
    return out;
  }
  Problem as(at::ScalarType type) const {
    const auto cast = [&](const at::Tensor& u) {
      return u.defined() ? u.to(type).detach().clone().requires_grad_(true) : u;
    };
    return {cast(q), cast(k), cast(x), cast(g), cast(state)};
  }
};

// Positive features and values of size 1, as a mixer has them; g in [-3, 0].
Problem problem(int64_t n, int64_t tokens, bool with_decay, bool with_state) {
  const auto randn = [](at::IntArrayRef shape) { return at::randn(shape, at::kDouble); };
  Problem p{randn({n, tokens, 6}).softmax(-1),
            randn({n, tokens, 6}).softmax(-1),
            randn({n, tokens, 5}),
            {},
            {}};
  if (with_decay) p.g = -at::rand({n, tokens}, at::kDouble).pow(4) * 3;
  if (with_state) p.state = randn({n, 6, 5});
  return p;
}

// Values and all gradients of the chunked form, in `type`, against the recurrence in float64.
void expect_equal(const Problem& given, int64_t chunk, at::ScalarType type, double tolerance,
                  const std::string& what) {
  const Problem want_in = given.as(at::kDouble), got_in = given.as(type);
  const LinearScanResult want =
      linear_scan_reference(want_in.q, want_in.k, want_in.x, want_in.g, want_in.state);
  const LinearScanResult got =
      linear_scan(got_in.q, got_in.k, got_in.x, got_in.g, got_in.state, chunk);
  EXPECT_EQ(got.y.scalar_type(), type) << what;
  EXPECT_LE(error(got.y, want.y), tolerance) << what << " y";
  EXPECT_LE(error(got.state, want.state), tolerance) << what << " state";
  const at::Tensor dy = at::randn_like(want.y), d_state = at::randn_like(want.state);
  // Without a token y depends on nothing, and without a state to start from nor does the last one.
  std::vector<at::Tensor> variable, cotangents;
  for (const auto& [output, d_output] : {std::pair(want.y, dy), {want.state, d_state}}) {
    if (!output.requires_grad()) continue;
    variable.push_back(output);
    cotangents.push_back(d_output);
  }
  std::vector<at::Tensor> d_want(got_in.all().size());
  if (!variable.empty()) {
    d_want = torch::autograd::grad(variable, want_in.all(), cotangents, std::nullopt, false,
                                   /*allow_unused=*/true);
  }
  const auto d_got =
      torch::autograd::grad({got.y, got.state}, got_in.all(), {dy.to(type), d_state.to(type)});
  for (std::size_t i = 0; i < d_got.size(); ++i) {
    const at::Tensor expected = d_want[i].defined() ? d_want[i] : at::zeros_like(d_got[i]);
    EXPECT_LE(error(d_got[i], expected), tolerance) << what << " gradient " << i;
  }
}

TEST(LinearScan, EqualsTheRecurrenceWithAllGradients) {
  at::manual_seed(1);
  for (const int64_t tokens : {0, 1, 2, 3, 15, 16, 17, 29, 31, 64, 65, 257}) {
    for (const bool with_decay : {false, true}) {
      for (const bool with_state : {false, true}) {
        const Problem p = problem(3, tokens, with_decay, with_state);
        // 257 tokens in chunks of 3 and of 16 are more than are computed at once.
        for (const int64_t chunk : {1, 3, 16, 64}) {
          if (chunk == 1 && tokens > 64) continue;
          const std::string what = sdk::cat("T", tokens, " chunk ", chunk,
                                            with_decay ? " decay" : "", with_state ? " state" : "");
          expect_equal(p, chunk, at::kDouble, 1e-12, what + " f64");
          expect_equal(p, chunk, at::kFloat, 1e-5, what + " f32");
        }
      }
    }
  }
}

TEST(LinearScan, StrongWeakAndMixedDecaysKeepTheirDigits) {
  at::manual_seed(2);
  for (const double strength : {1e-7, 0.5, 20.0, 300.0}) {
    Problem p = problem(2, 130, true, true);
    p.g = -at::rand({2, 130}, at::kDouble) * strength;
    expect_equal(p, 64, at::kDouble, 1e-11, sdk::cat("g to -", strength));
    expect_equal(p, 64, at::kFloat, 2e-5, sdk::cat("g to -", strength, " f32"));
    // Weak decays after a strong one: a difference of running sums would lose them.
    p.g.select(1, 70).fill_(-1e5);
    expect_equal(p, 64, at::kFloat, 2e-5, "a reset among them");
  }
}

TEST(LinearScan, LargeKeysAndQueries) {
  at::manual_seed(3);
  for (const bool with_decay : {false, true}) {
    Problem p = problem(2, 70, with_decay, true);
    p.q = at::randn({2, 70, 6}, at::kDouble) * 20;
    p.k = at::randn({2, 70, 6}, at::kDouble) * 20;
    expect_equal(p, 16, at::kFloat, 1e-5, "size 20");
  }
}

TEST(LinearScan, AFullResetForgetsEverything) {
  at::manual_seed(4);
  const Problem p = problem(2, 40, true, true).as(at::kFloat);
  at::Tensor g = p.g.detach().clone();
  g.select(1, 21).fill_(-std::numeric_limits<float>::infinity());
  const LinearScanResult got = linear_scan(p.q, p.k, p.x, g, p.state, 16);
  const auto rest = [](const at::Tensor& u) { return u.slice(1, 21); };
  const LinearScanResult alone =
      linear_scan_reference(rest(p.q), rest(p.k), rest(p.x), rest(p.g), at::Tensor());
  EXPECT_LE(error(rest(got.y), alone.y), 1e-6);
  EXPECT_LE(error(got.state, alone.state), 1e-6);
}

TEST(LinearScan, ATokenThatWritesNothingLeavesTheStateAsItIs) {
  at::manual_seed(5);
  const Problem p = problem(2, 9, true, true).as(at::kFloat);
  const LinearScanResult r =
      linear_scan(p.q, p.k, at::zeros_like(p.x), at::zeros_like(p.g), p.state, 4);
  EXPECT_TRUE(at::equal(r.state, p.state));
}

TEST(LinearScan, StepsEqualTheWhole) {
  at::manual_seed(6);
  for (const bool with_decay : {false, true}) {
    const Problem p = problem(3, 20, with_decay, false).as(at::kDouble);
    const at::NoGradGuard no_grad;
    const LinearScanResult whole = linear_scan(p.q, p.k, p.x, p.g, {}, 8);
    at::Tensor state;
    for (int64_t t = 0; t < 20; ++t) {
      const auto token = [&](const at::Tensor& u) { return u.defined() ? u.narrow(1, t, 1) : u; };
      const LinearScanResult r =
          linear_scan_step(token(p.q), token(p.k), token(p.x), token(p.g), state);
      EXPECT_LE(error(r.y, token(whole.y)), 1e-13) << t;
      state = r.state;
    }
    EXPECT_LE(error(state, whole.state), 1e-13);
  }
}

TEST(LinearScan, NoRowsAreLegal) {
  const Problem p = problem(0, 9, true, true).as(at::kFloat);
  const LinearScanResult r = linear_scan(p.q, p.k, p.x, p.g, p.state, 4);
  EXPECT_EQ(r.y.sizes(), (at::IntArrayRef{0, 9, 5}));
  EXPECT_EQ(r.state.sizes(), (at::IntArrayRef{0, 6, 5}));
}

template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "no error";
}

TEST(LinearScan, SaysWhichArgumentDoesNotFit) {
  const Problem p = problem(2, 7, true, true);
  const auto run = [](const Problem& given, int64_t chunk = 4) {
    return message_of([&] { linear_scan(given.q, given.k, given.x, given.g, given.state, chunk); });
  };
  EXPECT_EQ(run(p), "no error");
  Problem bad = p;
  bad.k = at::zeros({2, 7, 5}, at::kDouble);
  EXPECT_THAT(run(bad), HasSubstr("k has shape [2, 7, 5], expected that of q, [2, 7, 6]"));
  bad = p;
  bad.x = at::zeros({2, 6, 5}, at::kDouble);
  EXPECT_THAT(run(bad), HasSubstr("x has shape [2, 6, 5], expected [2, 7, V]"));
  bad = p;
  bad.g = at::zeros({2, 7, 1}, at::kDouble);
  EXPECT_THAT(run(bad), HasSubstr("g has shape [2, 7, 1], expected [2, 7]"));
  bad = p;
  bad.state = at::zeros({2, 5, 6}, at::kDouble);
  EXPECT_THAT(run(bad), HasSubstr("state has shape [2, 5, 6], expected [2, 6, 5]"));
  bad = p;
  bad.x = p.x.to(at::kFloat);
  EXPECT_THAT(run(bad), HasSubstr("x is Float, expected that of q, Double"));
  EXPECT_THAT(run(p, 0), HasSubstr("chunk is 0, expected at least 1"));
  EXPECT_THAT(message_of([&] { linear_scan_step(p.q, p.k, p.x, p.g, p.state); }),
              HasSubstr("expected one token"));
}

// ------------------------------------------------------------------ feature map

TEST(HedgehogFeatures, SumToOneAndStayAtOrAboveTheFloorForAnyInput) {
  at::manual_seed(7);
  const at::Tensor weight = at::eye(4).expand({2, 4, 4}), bias = at::zeros({2, 4});
  for (const double size : {0.0, 1.0, 60.0, 1e4, 1e30}) {
    const at::Tensor u = at::randn({2, 9, 4}) * size;
    const at::Tensor phi = hedgehog_features(u, weight, bias, 1e-12);
    EXPECT_TRUE(phi.isfinite().all().item<bool>()) << size;
    EXPECT_GE(phi.min().item<float>(), 1e-12F) << size;
    EXPECT_LE(error(phi.sum(-1), at::ones({2, 9})), 1e-6) << size;
  }
  EXPECT_LE(
      error(hedgehog_features(at::zeros({2, 1, 4}), weight, bias, 0), at::full({2, 1, 8}, 0.125)),
      1e-7);
}

TEST(HedgehogFeatures, SayWhichArgumentDoesNotFit) {
  const at::Tensor u = at::zeros({2, 3, 4}), weight = at::zeros({2, 5, 4}),
                   bias = at::zeros({2, 5});
  EXPECT_EQ(hedgehog_features(u, weight, bias, 0).sizes(), (at::IntArrayRef{2, 3, 10}));
  EXPECT_THAT(message_of([&] {
                hedgehog_features(u, at::zeros({2, 5, 3}), bias, 0);
              }),
              HasSubstr("weight has shape [2, 5, 3], expected [2, e, 4]"));
  EXPECT_THAT(message_of([&] {
                hedgehog_features(u, weight, at::zeros({2, 4}), 0);
              }),
              HasSubstr("bias has shape [2, 4], expected [2, 5]"));
  EXPECT_THAT(message_of([&] { hedgehog_features(u[0], weight, bias, 0); }),
              HasSubstr("u has shape [3, 4], expected [H, N, d]"));
}

}  // namespace
}  // namespace graft::mixers
