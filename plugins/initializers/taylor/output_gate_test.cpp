#include "plugins/initializers/taylor/output_gate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace graft::taylor {
namespace {

at::Tensor randn(at::IntArrayRef shape, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator);
}

double largest(const at::Tensor& difference) { return difference.abs().max().item<double>(); }

TEST(GateDomain, RawIsTheInverseOfValue) {
  const at::Tensor gates = at::linspace(0.02, 4.0, 500);
  for (const char* domain : {"", "log", "silu-inv", "softplus-inv"}) {
    EXPECT_LT(largest(gate_value(domain, gate_raw(domain, gates)) - gates), 2e-6) << domain;
  }
  const at::Tensor below_one = at::linspace(0.02, 0.98, 500);
  EXPECT_LT(largest(gate_value("logit", gate_raw("logit", below_one)) - below_one), 1e-6);
}

TEST(GateDomain, KnownValues) {
  // silu(1.2784645) = 1
  EXPECT_NEAR(gate_raw("silu-inv", at::tensor(1.0)).item<double>(), 1.2784645, 1e-6);
  EXPECT_NEAR(gate_raw("softplus-inv", at::tensor(std::log(2.0))).item<double>(), 0.0, 1e-6);
  EXPECT_NEAR(gate_raw("logit", at::tensor(0.75)).item<double>(), std::log(3.0), 1e-6);
  EXPECT_EQ(gate_raw("", at::tensor(0.7)).item<float>(), 0.7F);
}

TEST(GateDomain, OnlyTheOnesWithAFormula) {
  EXPECT_TRUE(is_gate_domain("silu-inv"));
  EXPECT_TRUE(is_gate_domain(""));
  EXPECT_FALSE(is_gate_domain("neg-log"));
  EXPECT_FALSE(is_gate_domain("org.example.other"));
}

struct Data {
  at::Tensor x, z, c;       // [N, D], [H, N, d], [H, N, d]
  at::Tensor weight, bias;  // of the planted gate
};

// Contexts that are exactly a gated linear map of z: c_t = s_t M z_t with s = f(W x + b).
Data planted(std::string_view domain, int64_t heads, int64_t n, int64_t model, int64_t dim) {
  Data data{randn({n, model}, 1),
            randn({heads, n, dim}, 2),
            {},
            randn({heads, model}, 3) * 0.1,
            randn({heads}, 4) * 0.1 + (domain == "logit" ? 0.0 : 1.0)};
  const at::Tensor gate =
      gate_value(domain, at::addmm(data.bias.unsqueeze(1), data.weight, data.x.t()));
  data.c = at::bmm(data.z, at::eye(dim).expand({heads, dim, dim})) * gate.unsqueeze(-1);
  return data;
}

void run_rounds(GateRegression& regression, const Data& data, int rounds, int64_t batch) {
  const int64_t n = data.x.size(0);
  const auto pass = [&](auto&& accumulate) {
    for (int64_t at = 0; at < n; at += batch) {
      const int64_t count = std::min(batch, n - at);
      accumulate(data.x.narrow(0, at, count), data.z.narrow(1, at, count),
                 data.c.narrow(1, at, count));
    }
  };
  for (int i = 0; i < rounds; ++i) {
    pass([&](auto&&... t) { regression.accumulate_map(t...); });
    regression.end_map();
    pass([&](auto&&... t) { regression.accumulate_gate(t...); });
    regression.end_gate();
  }
}

TEST(GateRegression, RecoversAPlantedGate) {
  for (const char* domain : {"silu-inv", "logit", "", "log", "softplus-inv"}) {
    const Data data = planted(domain, 3, 2000, 8, 4);
    GateRegression::Options options;
    options.map_ridge = options.gate_ridge = 1e-7;
    GateRegression regression(3, 8, 4, 4, domain, options);
    run_rounds(regression, data, 12, 257);
    const auto gate = [&](const at::Tensor& w, const at::Tensor& b) {
      return gate_value(domain, at::addmm(b.unsqueeze(1), w, data.x.t()));
    };
    const at::Tensor expected = gate(data.weight, data.bias);
    const at::Tensor got = gate(regression.weight(), regression.bias());
    // The map and the gate share one free factor for each head.
    const at::Tensor ratio = got / expected;
    const at::Tensor error = ratio / ratio.mean(1, true) - 1;
    EXPECT_LT(error.square().mean().sqrt().item<double>(), 0.03) << domain;
  }
}

// One round in plain float64 loops.
TEST(GateRegression, OneRoundEqualsTheFormulas) {
  constexpr int64_t N = 60, D = 3, d = 2;
  const Data data = planted("silu-inv", 1, N, D, d);
  const at::Tensor c = data.c + 0.3 * randn({1, N, d}, 9);
  GateRegression::Options options;
  GateRegression regression(1, D, d, d, "silu-inv", options);
  run_rounds(regression, {data.x, data.z, c, {}, {}}, 1, 17);

  const auto f64 = [](const at::Tensor& t) { return t.to(at::kDouble); };
  const at::Tensor z = f64(data.z[0]), y = f64(c[0]), x = f64(data.x);
  at::Tensor gram = at::matmul(z.t(), z);
  gram += at::eye(d, at::kDouble) * gram.diagonal().mean() * 1e-2;
  const at::Tensor map = at::linalg_solve(gram, at::matmul(z.t(), y));
  at::Tensor system = at::zeros({D + 1, D + 1}, at::kDouble),
             right = at::zeros({D + 1}, at::kDouble);
  for (int64_t t = 0; t < N; ++t) {
    const at::Tensor p = at::matmul(z[t], map);
    const double energy = p.dot(p).item<double>();
    const double best = std::clamp(p.dot(y[t]).item<double>() / energy, 0.02, 4.0);
    double raw = best + 0.3;  // silu(raw) = best by bisection
    double low = -1.0, high = 5.0;
    for (int i = 0; i < 80; ++i) {
      raw = (low + high) / 2;
      (raw / (1 + std::exp(-raw)) < best ? low : high) = raw;
    }
    const at::Tensor input = at::cat({x[t], at::ones({1}, at::kDouble)});
    system += at::outer(input, input) * energy;
    right += input * (energy * raw);
  }
  system.diagonal().add_(system.diagonal().narrow(0, 0, D).mean() * 0.1);
  const at::Tensor expected = at::linalg_solve(system, right);
  EXPECT_LT(largest(f64(regression.weight()[0]) - expected.narrow(0, 0, D)), 1e-4);
  EXPECT_NEAR(regression.bias()[0].item<double>(), expected[D].item<double>(), 1e-4);
}

TEST(GateRegression, DoesNotDependOnTheBatches) {
  const Data data = planted("silu-inv", 2, 100, 5, 3);
  std::vector<at::Tensor> weights;
  for (const int64_t batch : {1, 7, 100}) {
    GateRegression regression(2, 5, 3, 3, "silu-inv", {});
    run_rounds(regression, data, 2, batch);
    weights.push_back(regression.weight());
  }
  EXPECT_LT(largest(weights[0] - weights[2]), 1e-4);
  EXPECT_LT(largest(weights[1] - weights[2]), 1e-4);
}

TEST(GateRegression, WithoutABiasTheWeightDoesItAll) {
  Data data = planted("", 1, 200, 4, 3);
  data.x.select(1, 3).fill_(1);  // a constant input stands in for the bias
  GateRegression::Options options;
  options.bias = false;
  GateRegression regression(1, 4, 3, 3, "", options);
  run_rounds(regression, data, 1, 50);
  EXPECT_EQ(regression.weight().sizes(), at::IntArrayRef({1, 4}));
  EXPECT_EQ(largest(regression.bias()), 0.0);
  EXPECT_GT(regression.weight()[0][3].item<double>(), 0.5);
}

TEST(GateRegression, TargetsStayWithinTheLimits) {
  // Contexts that point away from z ask for a negative gate: the least one is taken.
  Data data = planted("", 1, 300, 4, 3);
  data.c = at::where(data.x.select(1, 0).gt(1).unsqueeze(1), -data.z, data.z);
  GateRegression::Options options;
  options.limits = {0.5, 0.6};
  options.gate_ridge = 1e-6;
  GateRegression regression(1, 4, 3, 3, "", options);
  run_rounds(regression, data, 1, 300);
  const at::Tensor gate =
      at::addmm(regression.bias().unsqueeze(1), regression.weight(), data.x.t());
  EXPECT_GT(gate.min().item<double>(), 0.4);
  EXPECT_LT(gate.max().item<double>(), 0.7);
}

TEST(GateRegression, ASilentHeadIsLeftAtZero) {
  Data data = planted("silu-inv", 2, 50, 4, 3);
  data.z[1].zero_();
  GateRegression regression(2, 4, 3, 3, "silu-inv", {});
  run_rounds(regression, data, 2, 50);
  EXPECT_EQ(largest(regression.weight()[1]), 0.0);
  EXPECT_GT(largest(regression.weight()[0]), 0.0);
  EXPECT_TRUE(at::isfinite(regression.weight()).all().item<bool>());
}

}  // namespace
}  // namespace graft::taylor
