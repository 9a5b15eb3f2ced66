// The chunked kernels against the same mathematics in LibTorch operations with autograd, in one
// run.
//
//   gdn_bench --benchmark_filter=forward_backward
//
// Equality of outputs and gradients is checked before anything is timed. Arguments: batch, tokens,
// heads, head dim, chunk.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "gdn_chunk.h"
#include "gdn_features.h"
#include "gdn_torch_block.h"
#include "mixer_testing.h"

namespace graft::gdn {
namespace {

using mixers::error;

// ---- the baseline: the chunked form as one writes it with LibTorch; q, k, v [B,H,T,D], g, beta
// [B,H,T], zero state

at::Tensor autograd_rule(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                         const at::Tensor& g_in, const at::Tensor& beta_in, int64_t chunk) {
  const int64_t b = q_in.size(0), h = q_in.size(1), tokens = q_in.size(2), dv = v_in.size(3);
  const int64_t pad = (chunk - tokens % chunk) % chunk, n = (tokens + pad) / chunk;
  const auto rows = [&](const at::Tensor& x) {
    return at::constant_pad_nd(x, {0, 0, 0, pad}).reshape({b, h, n, chunk, x.size(3)});
  };
  const auto gates = [&](const at::Tensor& x) {
    return at::constant_pad_nd(x, {0, pad}).reshape({b, h, n, chunk});
  };
  const double scale = 1 / std::sqrt(static_cast<double>(q_in.size(3)));
  const at::Tensor q = rows(q_in) * scale, k = rows(k_in), v = rows(v_in), g = gates(g_in),
                   beta = gates(beta_in);
  const at::Tensor total = g.cumsum(-1);
  const at::Tensor lower = at::ones({chunk, chunk}, at::kBool).tril();
  const at::Tensor decay =
      (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(lower.logical_not(), -1e30).exp();
  const at::Tensor k_t = k.transpose(-1, -2);
  const at::Tensor a = (beta.unsqueeze(-1) * decay * k.matmul(k_t)).tril(-1);
  const at::Tensor start = total.exp().unsqueeze(-1);
  const at::Tensor rhs = at::cat({beta.unsqueeze(-1) * v, beta.unsqueeze(-1) * start * k}, -1);
  const at::Tensor solved = at::linalg_solve_triangular(a + at::eye(chunk), rhs, false, true, true);
  const at::Tensor u0 = solved.narrow(-1, 0, dv), w = solved.slice(-1, dv);
  const at::Tensor p = q.matmul(k_t) * decay, q_start = q * start;
  const at::Tensor k_end = k * (total.slice(-1, chunk - 1) - total).exp().unsqueeze(-1);
  const at::Tensor whole = total.select(-1, chunk - 1).exp().unsqueeze(-1).unsqueeze(-1);
  at::Tensor s = at::zeros({b, h, q.size(-1), dv});
  std::vector<at::Tensor> out;
  for (int64_t c = 0; c < n; ++c) {
    const auto of = [&](const at::Tensor& x) { return x.select(2, c); };
    const at::Tensor u = of(u0) - of(w).matmul(s);
    out.push_back(of(q_start).matmul(s) + of(p).matmul(u));
    s = of(whole) * s + of(k_end).transpose(-1, -2).matmul(u);
  }
  return at::stack(out, 2).reshape({b, h, n * chunk, dv}).slice(2, 0, tokens);
}

struct Problem {
  std::vector<at::Tensor> args;  // q, k, v, g, beta as [B,T,H,...]
  at::Tensor d_o;

  Problem(int64_t b, int64_t t, int64_t h, int64_t d) {
    at::manual_seed(1);
    const auto unit = [&](const at::Tensor& x) { return x / x.norm(2, {-1}, true); };
    args = {unit(at::randn({b, t, h, d})), unit(at::randn({b, t, h, d})), at::randn({b, t, h, d}),
            at::log_sigmoid(at::randn({b, t, h}) + 3), at::rand({b, t, h})};
    d_o = at::randn({b, t, h, d});
  }
  explicit Problem(const benchmark::State& state)
      : Problem(state.range(0), state.range(1), state.range(2), state.range(3)) {}

  std::vector<at::Tensor> leaves() const {
    std::vector<at::Tensor> out;
    for (const at::Tensor& x : args) out.push_back(x.detach().requires_grad_(true));
    return out;
  }
};

at::Tensor ours(const std::vector<at::Tensor>& x, int64_t chunk) {
  return gated_delta_rule(x[0], x[1], x[2], x[3], x[4], {}, chunk).o;
}
at::Tensor theirs(const std::vector<at::Tensor>& x, int64_t chunk) {
  const auto heads_first = [](const at::Tensor& t) { return t.transpose(1, 2); };
  return autograd_rule(heads_first(x[0]), heads_first(x[1]), heads_first(x[2]), heads_first(x[3]),
                       heads_first(x[4]), chunk)
      .transpose(1, 2);
}

template <class Rule>
std::vector<at::Tensor> forward_backward(const Problem& p, int64_t chunk, const Rule& rule) {
  const std::vector<at::Tensor> x = p.leaves();
  const at::Tensor o = rule(x, chunk);
  std::vector<at::Tensor> out = torch::autograd::grad({o}, x, {p.d_o});
  out.push_back(o.detach());
  return out;
}

void check_equal() {
  const Problem p(2, 200, 3, 64);
  const auto a = forward_backward(p, 64, ours), b = forward_backward(p, 64, theirs);
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = error(a[i], b[i]);
    if (!(difference < 2e-5)) {
      std::fprintf(stderr,
                   "gdn_bench: tensor %zu differs from the baseline by %g; nothing is timed\n", i,
                   difference);
      std::exit(1);
    }
  }
}

void set_rate(benchmark::State& state) {
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(state.range(0) * state.range(1) * state.iterations()),
                         benchmark::Counter::kIsRate);
}

template <class Rule>
void run_forward(benchmark::State& state, const Rule& rule) {
  const Problem p(state);
  const at::NoGradGuard no_grad;
  for (auto _ : state) benchmark::DoNotOptimize(rule(p.args, state.range(4)));
  set_rate(state);
}
template <class Rule>
void run_forward_backward(benchmark::State& state, const Rule& rule) {
  const Problem p(state);
  for (auto _ : state) benchmark::DoNotOptimize(forward_backward(p, state.range(4), rule));
  set_rate(state);
}

void forward_kernels(benchmark::State& state) { run_forward(state, ours); }
void forward_autograd(benchmark::State& state) { run_forward(state, theirs); }
void forward_backward_kernels(benchmark::State& state) { run_forward_backward(state, ours); }
void forward_backward_autograd(benchmark::State& state) { run_forward_backward(state, theirs); }

void step_kernels(benchmark::State& state) {
  Problem p(state.range(0), 1, state.range(1), state.range(2));
  const at::Tensor s = at::zeros({state.range(0), state.range(1), state.range(2), state.range(2)});
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        gated_delta_rule_step(p.args[0], p.args[1], p.args[2], p.args[3], p.args[4], s, true));
  }
}

void features_kernels(benchmark::State& state) {
  const int64_t b = state.range(0), t = state.range(1), h = state.range(2), d = state.range(3);
  const at::Tensor x = at::randn({b, t, h * d}), d_out = at::randn({b, t, h, d});
  std::vector<double> inv_freq;
  for (int64_t i = 0; i < d / 2; ++i)
    inv_freq.push_back(std::pow(1e-4, 2.0 * static_cast<double>(i) / static_cast<double>(d)));
  const Rotation rotation =
      make_rotation(at::arange(t, at::kLong).expand({b, t}), inv_freq, 1, at::kFloat);
  for (auto _ : state) {
    const at::Tensor leaf = x.detach().requires_grad_(true);
    const at::Tensor y = head_features(leaf, h, {.silu = true, .l2norm = true}, {}, rotation);
    benchmark::DoNotOptimize(torch::autograd::grad({y}, {leaf}, {d_out}));
  }
}

// ---- the whole block, and the matrix products in it alone

struct BlockProblem {
  BlockOptions options;
  std::map<std::string, at::Tensor, std::less<>> params;
  at::Tensor x, d_y;

  explicit BlockProblem(const benchmark::State& state) {
    const int64_t heads = state.range(2), d = state.range(3), model = heads * d;
    options.model_dim = model;
    options.heads = heads;
    options.key_dim = options.value_dim = d;
    options.write_gate_bias = options.output_gate_bias = true;
    options.silu_v = false;
    options.chunk = state.range(4);
    for (int64_t i = 0; i < d / 2; ++i) {
      options.rope.inv_freq.push_back(
          std::pow(1e-5, 2.0 * static_cast<double>(i) / static_cast<double>(d)));
    }
    const auto add = [&](const char* name, at::IntArrayRef shape) {
      params[name] = (at::randn(shape) * 0.05).requires_grad_(true);
    };
    for (const char* name :
         {"q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight", "o_proj.weight"}) {
      add(name, {model, model});
    }
    add("a_proj.weight", {heads, model});
    add("b_proj.weight", {heads, model});
    for (const char* name : {"A_log", "dt_bias", "b_proj.bias"}) add(name, {heads});
    add("g_proj.bias", {model});
    add("o_norm.weight", {d});
    x = at::randn({state.range(0), state.range(1), model}).requires_grad_(true);
    d_y = at::randn({state.range(0), state.range(1), model});
  }

  std::vector<at::Tensor> leaves() const {
    std::vector<at::Tensor> out{x};
    for (const auto& [name, tensor] : params) out.push_back(tensor);
    return out;
  }
};

void block_forward_backward(benchmark::State& state) {
  const BlockProblem p(state);
  for (auto _ : state) {
    const torch_block::BlockOutput out =
        torch_block::gdn_block({p.x, {}, {}, {}}, p.options,
                               [&](std::string_view name) { return p.params.find(name)->second; });
    benchmark::DoNotOptimize(torch::autograd::grad({out.y}, p.leaves(), {p.d_y}));
  }
  set_rate(state);
}

void block_products_alone(benchmark::State& state) {
  const BlockProblem p(state);
  const at::Tensor x = p.x.detach().flatten(0, 1), d = p.d_y.flatten(0, 1);
  const at::Tensor w = p.params.find("q_proj.weight")->second.detach();
  for (auto _ : state) {
    for (int i = 0; i < 5; ++i) {
      benchmark::DoNotOptimize(at::linear(x, w));
      benchmark::DoNotOptimize(d.matmul(w));
      benchmark::DoNotOptimize(d.t().matmul(x));
    }
  }
  set_rate(state);
}

// The layer calibration's shape, the peers' shapes, and irregular ones.
void shapes(benchmark::internal::Benchmark* b) {
  for (const int64_t chunk : {16, 32, 64, 128}) b->Args({2, 256, 9, 64, chunk});
  b->Args({1, 512, 9, 64, 64})
      ->Args({1, 2048, 9, 64, 64})
      ->Args({1, 512, 16, 128, 64})
      ->Args({3, 301, 5, 48, 64});
  b->Unit(benchmark::kMillisecond)->UseRealTime();
}
void baseline_shapes(benchmark::internal::Benchmark* b) {
  b->Args({2, 256, 9, 64, 64})->Args({1, 512, 9, 64, 64})->Args({1, 2048, 9, 64, 64});
  b->Args({1, 512, 16, 128, 64})->Args({3, 301, 5, 48, 64});
  b->Unit(benchmark::kMillisecond)->UseRealTime();
}

BENCHMARK(forward_kernels)->Apply(shapes);
BENCHMARK(forward_autograd)->Apply(baseline_shapes);
BENCHMARK(forward_backward_kernels)->Apply(shapes);
BENCHMARK(forward_backward_autograd)->Apply(baseline_shapes);
BENCHMARK(block_forward_backward)
    ->Args({2, 256, 9, 64, 64})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(block_products_alone)
    ->Args({2, 256, 9, 64, 64})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(step_kernels)
    ->Args({1, 9, 64})
    ->Args({8, 9, 64})
    ->Args({1, 16, 128})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();
BENCHMARK(features_kernels)->Args({2, 256, 9, 64})->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace graft::gdn

int main(int argc, char** argv) {
  graft::gdn::check_equal();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("instruction set", graft::gdn::kernels().isa);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
