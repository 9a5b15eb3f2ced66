// The chunked kernels against the formula, token by token.
#include "hedgehog_attention.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "hedgehog_attention_reference.h"
#include "mixer_testing.h"

namespace graft::mixers {
namespace {

using ::testing::HasSubstr;

struct Shape {
  int64_t batch, tokens, heads, kv_heads, dim, rows, value_dim;
};

std::vector<at::Tensor*> tensors(HedgehogAttention& in) {
  std::vector<at::Tensor*> out;
  for (at::Tensor* x : {&in.q, &in.k, &in.v, &in.weight_q, &in.bias_q, &in.weight_k, &in.bias_k,
                        &in.g, &in.write, &in.state}) {
    if (x->defined()) out.push_back(x);
  }
  return out;
}

// Some tokens forget everything, some write nothing.
HedgehogAttention problem(const Shape& s, bool dynamics, bool with_state) {
  at::manual_seed(static_cast<uint64_t>(7 + s.tokens));
  const auto randn = [](at::IntArrayRef shape) { return at::randn(shape, at::kDouble); };
  HedgehogAttention in;
  in.q = randn({s.batch, s.tokens, s.heads, s.dim});
  in.k = randn({s.batch, s.tokens, s.kv_heads, s.dim});
  in.v = randn({s.batch, s.tokens, s.kv_heads, s.value_dim});
  in.weight_q = randn({s.heads, s.rows, s.dim}) / std::sqrt(static_cast<double>(s.dim));
  in.weight_k = randn({s.heads, s.rows, s.dim}) / std::sqrt(static_cast<double>(s.dim));
  in.bias_q = 0.1 * randn({s.heads, s.rows});
  in.bias_k = 0.1 * randn({s.heads, s.rows});
  if (dynamics) {
    in.write = at::rand({s.batch, s.tokens, s.heads}, at::kDouble);
    in.g = -at::rand({s.batch, s.tokens, s.heads}, at::kDouble).pow(4) * 3;
    for (int64_t t = 3; t < s.tokens; t += 11) {
      in.write.select(1, t).zero_();
      in.g.select(1, t).zero_();
    }
    for (int64_t t = 5; t < s.tokens; t += 29) in.g.select(1, t).fill_(-60);
  }
  if (with_state) in.state = at::rand({s.batch, s.heads, 2 * s.rows, s.value_dim + 1}, at::kDouble);
  in.floor = 1e-12;
  in.eps = 1e-20;
  return in;
}

HedgehogAttention as(HedgehogAttention in, at::ScalarType type) {
  for (at::Tensor* x : tensors(in)) *x = x->to(type).detach().clone().requires_grad_(true);
  return in;
}

struct Outcome {
  HedgehogAttentionResult result;
  std::vector<at::Tensor> grads;
};

template <class Attend>
Outcome run(HedgehogAttention in, const Attend& attend) {
  Outcome out{attend(in), {}};
  at::manual_seed(3);
  std::vector<at::Tensor> leaves;
  for (at::Tensor* x : tensors(in)) leaves.push_back(*x);
  std::vector<at::Tensor> outputs, cotangents;  // no token and no state: what comes out hangs on nothing
  for (const at::Tensor& y : {out.result.o, out.result.state}) {
    const at::Tensor cotangent = at::randn(y.sizes(), at::kDouble).to(y.scalar_type());
    if (!y.requires_grad()) continue;
    outputs.push_back(y);
    cotangents.push_back(cotangent);
  }
  out.grads.resize(leaves.size());
  if (!outputs.empty()) out.grads = torch::autograd::grad(outputs, leaves, cotangents, std::nullopt, false, true);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!out.grads[i].defined()) out.grads[i] = at::zeros_like(leaves[i]);
  }
  return out;
}

void expect_equal(const Outcome& got, const Outcome& want, double tolerance,
                  const std::string& what) {
  EXPECT_LE(error(got.result.o, want.result.o), tolerance) << what << " o";
  EXPECT_LE(error(got.result.state, want.result.state), tolerance) << what << " state";
  for (std::size_t i = 0; i < want.grads.size(); ++i)
    EXPECT_LE(error(got.grads[i], want.grads[i]), tolerance) << what << " gradient " << i;
}

std::vector<const linear::Kernels*> kernel_sets() {
  std::vector<const linear::Kernels*> sets;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (const linear::Kernels* set = linear::find_kernels(isa)) sets.push_back(set);
  }
  return sets;
}

TEST(HedgehogAttention, EqualsItsFormulaWithAllGradients) {
  const Shape shapes[] = {
      {2, 0, 2, 2, 4, 3, 5},     {1, 1, 1, 1, 4, 3, 5},      {2, 15, 2, 1, 6, 4, 7},
      {1, 16, 2, 2, 16, 16, 16}, {2, 17, 4, 2, 8, 8, 8},     {1, 64, 3, 1, 32, 32, 32},
      {1, 65, 2, 2, 64, 64, 64}, {1, 131, 2, 2, 33, 20, 40}, {2, 200, 1, 1, 16, 24, 70}};
  for (const Shape& s : shapes) {
    for (const bool dynamics : {false, true}) {
      for (const bool with_state : {false, true}) {
        const HedgehogAttention given = problem(s, dynamics, with_state);
        const Outcome want = run(as(given, at::kDouble), hedgehog_attention_reference);
        for (const linear::Kernels* set : kernel_sets()) {
          for (const int64_t chunk : {16, 64}) {
            const auto attend = [&](HedgehogAttention in) {
              in.chunk = chunk;
              return hedgehog_attention(in, *set);
            };
            const std::string what = std::to_string(s.tokens) + " tokens, dim " +
                                     std::to_string(s.dim) + ", " + set->isa + ", chunk " +
                                     std::to_string(chunk) + (dynamics ? ", decay" : "") +
                                     (with_state ? ", state" : "");
            expect_equal(run(as(given, at::kDouble), attend), want, 1e-11, what + ", f64");
            expect_equal(run(as(given, at::kFloat), attend), want, 1e-4, what + ", f32");
          }
        }
      }
    }
  }
}

TEST(HedgehogAttention, StepByStepIsTheSame) {
  const at::NoGradGuard no_grad;
  for (const bool dynamics : {false, true}) {
    const HedgehogAttention given = problem({2, 9, 4, 2, 12, 10, 20}, dynamics, true);
    const HedgehogAttentionResult want = hedgehog_attention_reference(given);
    for (const linear::Kernels* set : kernel_sets()) {
      HedgehogAttention in = given;
      for (int64_t t = 0; t < 9; ++t) {
        const auto token = [&](const at::Tensor& x) { return x.defined() ? x.narrow(1, t, 1) : x; };
        in.q = token(given.q);
        in.k = token(given.k);
        in.v = token(given.v);
        in.g = token(given.g);
        in.write = token(given.write);
        const HedgehogAttentionResult got = hedgehog_attention(in, *set);
        EXPECT_LE(error(got.o, token(want.o)), 1e-12) << set->isa << " token " << t;
        in.state = got.state;
      }
      EXPECT_LE(error(in.state, want.state), 1e-12) << set->isa;
    }
  }
}

// A reset (g = -inf) forgets all; a pad (g = 0, nothing written) leaves the state as it is: to the
// last bit.
TEST(HedgehogAttention, ResetsAndPadsAreExact) {
  const at::NoGradGuard no_grad;
  HedgehogAttention in = problem({1, 40, 2, 2, 8, 8, 8}, true, true);
  in.write.narrow(1, 20, 20).zero_();
  in.g.narrow(1, 20, 20).zero_();
  const at::Tensor kept = hedgehog_attention(in).state;
  HedgehogAttention shorter = in;
  for (at::Tensor* x : {&shorter.q, &shorter.k, &shorter.v, &shorter.g, &shorter.write})
    *x = x->narrow(1, 0, 20);
  shorter.chunk = in.chunk = 20;
  EXPECT_TRUE(at::equal(hedgehog_attention(in).state, hedgehog_attention(shorter).state));
  EXPECT_LE(error(kept, hedgehog_attention(shorter).state), 1e-13);
  in.g.select(1, 39).fill_(-std::numeric_limits<double>::infinity());
  EXPECT_EQ(hedgehog_attention(in).state.abs().max().item<double>(), 0);
}

TEST(HedgehogAttention, RowsOfABatchAndThreadsDoNotMatter) {
  const HedgehogAttention all = as(problem({3, 70, 4, 2, 16, 16, 16}, true, true), at::kFloat);
  const auto attend = [](const HedgehogAttention& in) { return hedgehog_attention(in); };
  const int threads = at::get_num_threads();
  const Outcome want = run(all, attend);
  at::set_num_threads(1);
  const Outcome alone = run(all, attend);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(want.result.o, alone.result.o));
  for (std::size_t i = 0; i < want.grads.size(); ++i)
    EXPECT_TRUE(at::equal(want.grads[i], alone.grads[i])) << i;
  HedgehogAttention second = all;
  for (at::Tensor* x : {&second.q, &second.k, &second.v, &second.g, &second.write, &second.state})
    *x = x->narrow(0, 1, 1);
  EXPECT_TRUE(at::equal(hedgehog_attention(second).o, want.result.o.narrow(0, 1, 1)));
}

TEST(HedgehogAttention, NamesTheArgumentThatDoesNotFit) {
  const HedgehogAttention good = problem({1, 4, 2, 1, 6, 5, 6}, true, true);
  const auto message = [](const HedgehogAttention& in) -> std::string {
    try {
      hedgehog_attention(in);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  HedgehogAttention in = good;
  in.k = in.k.narrow(3, 0, 5);
  EXPECT_THAT(message(in), HasSubstr("k has shape [1, 4, 1, 5], expected [1, 4, 1, 6]"));
  in = good;
  in.state = in.state.narrow(3, 0, 6);
  EXPECT_THAT(message(in), HasSubstr("state has shape [1, 2, 10, 6], expected [1, 2, 10, 7]"));
  in = good;
  in.weight_k = in.weight_k.to(at::kFloat);
  EXPECT_THAT(message(in), HasSubstr("weight_k is Float, q is Double"));
  in = good;
  in.v = at::randn({1, 4, 3, 6}, at::kDouble);
  EXPECT_THAT(message(in), HasSubstr("2 query heads do not divide among 3 of v"));
}

}  // namespace
}  // namespace graft::mixers
