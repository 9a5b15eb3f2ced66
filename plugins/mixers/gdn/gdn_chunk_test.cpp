#include "gdn_chunk.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gdn_reference.h"
#include "mixer_testing.h"

namespace graft::gdn {
namespace {

using mixers::error;

constexpr double kReset = -std::numeric_limits<double>::infinity();

struct Shape {
  int64_t batch = 1, tokens = 1, heads = 1, key_dim = 4, value_dim = 4;
};

// Arguments and cotangents of one call.
struct Case {
  std::vector<at::Tensor> args;  // q, k, v, g, beta, state (maybe undefined)
  at::Tensor d_o, d_state;

  Case to(at::ScalarType type) const {
    Case out;
    for (const at::Tensor& x : args) out.args.push_back(x.defined() ? x.to(type) : x);
    out.d_o = d_o.to(type);
    out.d_state = d_state.to(type);
    return out;
  }
};

Case random_case(const Shape& s, bool with_state, uint64_t seed = 1) {
  at::manual_seed(seed);
  const auto type = at::kDouble;
  const auto normal = [&](at::IntArrayRef shape) { return at::randn(shape, type); };
  const auto unit = [&](at::Tensor x) { return x / x.norm(2, {-1}, true).clamp_min(1e-6); };
  Case out;
  out.args = {unit(normal({s.batch, s.tokens, s.heads, s.key_dim})),
              unit(normal({s.batch, s.tokens, s.heads, s.key_dim})),
              normal({s.batch, s.tokens, s.heads, s.value_dim}),
              at::log_sigmoid(normal({s.batch, s.tokens, s.heads}) + 2),
              at::rand({s.batch, s.tokens, s.heads}, type),
              with_state ? normal({s.batch, s.heads, s.key_dim, s.value_dim}) * 0.5 : at::Tensor()};
  out.d_o = normal({s.batch, s.tokens, s.heads, s.value_dim});
  out.d_state = normal({s.batch, s.heads, s.key_dim, s.value_dim});
  return out;
}

struct Outcome {
  at::Tensor o, state;
  std::vector<at::Tensor> grads;  // of q, k, v, g, beta and, when there was one, state
};

template <class Rule>
Outcome run(const Case& c, const Rule& rule) {
  std::vector<at::Tensor> leaves, wanted, outputs, cotangents;
  for (const at::Tensor& x : c.args) {
    leaves.push_back(x.defined() ? x.detach().clone().requires_grad_(true) : x);
    if (x.defined()) wanted.push_back(leaves.back());
  }
  const DeltaRuleResult r = rule(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], leaves[5]);
  // Without tokens nothing need depend on the arguments.
  for (const auto& [output, cotangent] : {std::pair(r.o, c.d_o), std::pair(r.state, c.d_state)}) {
    if (!output.requires_grad()) continue;
    outputs.push_back(output);
    cotangents.push_back(cotangent.to(output.scalar_type()));
  }
  Outcome out{r.o.detach(), r.state.detach(), {}};
  if (!outputs.empty()) {
    out.grads = torch::autograd::grad(outputs, wanted, cotangents, std::nullopt, false, true);
  }
  out.grads.resize(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!out.grads[i].defined()) out.grads[i] = at::zeros_like(wanted[i]);
  }
  return out;
}

Outcome run_reference(const Case& c) { return run(c, gated_delta_rule_reference); }

Outcome run_chunked(const Case& c, int64_t chunk, const Kernels& set = kernels()) {
  return run(c, [&](const auto&... args) { return gated_delta_rule(args..., chunk, set); });
}

void expect_equal(const Outcome& got, const Outcome& want, double tolerance,
                  const std::string& what) {
  static const char* const names[] = {"q", "k", "v", "g", "beta", "state"};
  EXPECT_LE(error(got.o, want.o), tolerance) << what << " o";
  EXPECT_LE(error(got.state, want.state), tolerance) << what << " state";
  ASSERT_EQ(got.grads.size(), want.grads.size());
  for (size_t i = 0; i < want.grads.size(); ++i) {
    EXPECT_LE(error(got.grads[i], want.grads[i]), tolerance) << what << " gradient of " << names[i];
  }
}

std::vector<const Kernels*> kernel_sets() {
  std::vector<const Kernels*> sets;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (const Kernels* set = find_kernels(isa)) sets.push_back(set);
  }
  return sets;
}

std::string describe(const Shape& s, int64_t chunk) {
  std::ostringstream text;
  text << "B" << s.batch << " T" << s.tokens << " H" << s.heads << " " << s.key_dim << "x"
       << s.value_dim << " chunk " << chunk;
  return text.str();
}

TEST(GdnChunk, EqualsTheRecurrenceOnEveryShapeAndInstructionSet) {
  const std::vector<std::pair<int64_t, int64_t>> dims = {
      {1, 1}, {3, 5}, {16, 32}, {33, 17}, {64, 64}};
  for (const int64_t chunk : {1, 5, 16, 64}) {
    for (const int64_t tokens :
         {int64_t{0}, int64_t{1}, int64_t{2}, chunk - 1, chunk, chunk + 1, 3 * chunk + 5}) {
      for (const auto& [dk, dv] : dims) {
        const Shape shape{2, tokens, 3, dk, dv};
        const bool with_state = (tokens + dk) % 2 == 0;
        const Case c = random_case(shape, with_state, static_cast<uint64_t>(tokens + 100 * dk));
        const Outcome want = run_reference(c);
        for (const Kernels* set : kernel_sets()) {
          const std::string what = describe(shape, chunk) + " " + set->isa;
          expect_equal(run_chunked(c, chunk, *set), want, 1e-12, what + " f64");
          expect_equal(run_chunked(c.to(at::kFloat), chunk, *set), want, 2e-5, what + " f32");
        }
      }
    }
  }
}

// ---- edges of the gates

TEST(GdnChunk, AFullResetIsExactAndItsGradientsAreFinite) {
  Case c = random_case({2, 37, 2, 8, 8}, true);
  c.args[3].select(1, 0).fill_(kReset);
  c.args[3].select(1, 17).fill_(kReset);
  c.args[3].select(1, 36).select(1, 1).fill_(kReset);
  for (const int64_t chunk : {1, 16, 18, 64}) {
    const Outcome got = run_chunked(c, chunk);
    for (const at::Tensor& gradient : got.grads)
      EXPECT_TRUE(gradient.isfinite().all().item<bool>());
    EXPECT_TRUE(got.o.isfinite().all().item<bool>());
    // What lies before a reset cannot be seen behind it.
    EXPECT_EQ(got.grads[5].abs().max().item<double>(), 0);
    EXPECT_EQ(got.grads[3].select(1, 17).abs().max().item<double>(), 0);
    // The same as starting there from a zero state.
    Case rest;
    for (size_t i = 0; i < 5; ++i) rest.args.push_back(c.args[i].slice(1, 17).contiguous());
    rest.args[3].select(1, 0).zero_();
    rest.args.emplace_back();
    rest.d_o = c.d_o.slice(1, 17).contiguous();
    rest.d_state = c.d_state;
    const Outcome want = run_reference(rest);
    EXPECT_LE(error(got.o.slice(1, 17), want.o), 1e-13);
    EXPECT_LE(error(got.state, want.state), 1e-13);
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_LE(
          error(got.grads[i].slice(1, i == 3 ? 18 : 17), want.grads[i].slice(1, i == 3 ? 1 : 0)),
          1e-12)
          << i;
    }
  }
}

TEST(GdnChunk, AnIdentityStepChangesNothingToTheBit) {
  // Steps with g = 0 and beta = 0 between the others; the chunks fall elsewhere, so o is equal to
  // rounding only.
  const Case dense = random_case({1, 20, 2, 8, 4}, true);
  std::vector<int64_t> real;
  for (int64_t t = 0; t < 20; ++t) real.push_back(2 * t + (t % 3 == 0 ? 1 : 0));
  const at::Tensor at_real = at::tensor(real);
  Case padded = random_case({1, 45, 2, 8, 4}, false, 9);
  padded.args[3].zero_();
  padded.args[4].zero_();
  for (size_t i = 0; i < 5; ++i) padded.args[i].index_copy_(1, at_real, dense.args[i]);
  padded.args[5] = dense.args[5];
  padded.d_o.zero_().index_copy_(1, at_real, dense.d_o);
  padded.d_state = dense.d_state;
  const Outcome want = run_reference(dense), got = run_chunked(padded, 16);
  EXPECT_LE(error(got.o.index_select(1, at_real), want.o), 1e-13);
  EXPECT_LE(error(got.state, want.state), 1e-13);
  EXPECT_LE(error(got.grads[5], want.grads[5]), 1e-13);
  for (size_t i = 0; i < 5; ++i)
    EXPECT_LE(error(got.grads[i].index_select(1, at_real), want.grads[i]), 1e-12) << i;

  Case only_pads = random_case({1, 45, 2, 8, 4}, true);
  only_pads.args[3].zero_();
  only_pads.args[4].zero_();
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const Case c = only_pads.to(type);
    const auto r =
        gated_delta_rule(c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], c.args[5], 16);
    EXPECT_TRUE(at::equal(r.state, c.args[5]));
  }
}

TEST(GdnChunk, DecaysOfAnySizeGiveNeitherOverflowNorNan) {
  for (const double g : {-1e-8, -0.5, -5.0, -20.0, -90.0, -1e4}) {
    Case c = random_case({1, 130, 1, 8, 8}, true).to(at::kFloat);
    c.args[3].fill_(g);
    expect_equal(run_chunked(c, 64), run_reference(c.to(at::kDouble)), 2e-5,
                 "g " + std::to_string(g));
  }
}

TEST(GdnChunk, TheStateStaysBoundedOverALongSequence) {
  const int64_t tokens = 16384;
  at::manual_seed(4);
  const at::Tensor q = at::randn({1, tokens, 1, 16});
  const at::Tensor k = at::randn({1, tokens, 1, 16});
  const at::Tensor unit = k / k.norm(2, {-1}, true);
  const at::Tensor v = at::randn({1, tokens, 1, 16}).sign();
  // Without decay the rule still unlearns what it overwrites; a sum of outer products would grow
  // without bound.
  const auto r = gated_delta_rule(q, unit, v, at::zeros({1, tokens, 1}),
                                  at::full({1, tokens, 1}, 0.5), {}, 64);
  EXPECT_LT(r.state.abs().max().item<double>(), 10);
  EXPECT_TRUE(r.o.isfinite().all().item<bool>());
}

// fla-org issue 885: the state decays before the error is read.
TEST(GdnChunk, ForgetsBeforeItReadsTheError) {
  const auto one = [](double x) { return at::full({1, 1, 1, 1}, x, at::kDouble); };
  const at::Tensor g = at::full({1, 1, 1}, std::log(0.5), at::kDouble),
                   beta = at::ones({1, 1, 1}, at::kDouble);
  const auto check = [&](const DeltaRuleResult& r) { EXPECT_NEAR(r.o.item<double>(), 0.0, 1e-15); };
  check(gated_delta_rule(one(1), one(1), one(0), g, beta, one(1), 64));
  check(gated_delta_rule_step(one(1), one(1), one(0), g, beta, one(1)));
  check(gated_delta_rule_reference(one(1), one(1), one(0), g, beta, one(1)));
}

// ---- ways through the same sequence

TEST(GdnChunk, PiecesWithCarriedStateEqualTheWhole) {
  const Case c = random_case({2, 101, 3, 16, 8}, true);
  const auto piece = [&](int64_t from, int64_t to, const at::Tensor& state, bool step) {
    const auto part = [&](size_t i) { return c.args[i].slice(1, from, to); };
    return step ? gated_delta_rule_step(part(0), part(1), part(2), part(3), part(4), state)
                : gated_delta_rule(part(0), part(1), part(2), part(3), part(4), state, 16);
  };
  const DeltaRuleResult whole = piece(0, 101, c.args[5], false);
  const std::vector<std::vector<int64_t>> splits = {
      {0, 1, 101}, {0, 16, 32, 101}, {0, 37, 38, 39, 100, 101}, {0, 0, 101}};
  for (const bool step : {false, true}) {
    for (const auto& split : splits) {
      at::Tensor state = c.args[5];
      std::vector<at::Tensor> outputs;
      for (size_t i = 0; i + 1 < split.size(); ++i) {
        const DeltaRuleResult r = piece(split[i], split[i + 1], state, step);
        outputs.push_back(r.o);
        state = r.state;
      }
      EXPECT_LE(error(at::cat(outputs, 1), whole.o), 1e-13);
      EXPECT_LE(error(state, whole.state), 1e-13);
    }
  }
  at::Tensor state = c.args[5].clone();
  for (int64_t t = 0; t < 101; ++t) {
    const auto part = [&](size_t i) { return c.args[i].slice(1, t, t + 1); };
    const auto r = gated_delta_rule_step(part(0), part(1), part(2), part(3), part(4), state, true);
    EXPECT_LE(error(r.o, whole.o.slice(1, t, t + 1)), 1e-13);
    EXPECT_EQ(r.state.data_ptr(), state.data_ptr());
  }
  EXPECT_LE(error(state, whole.state), 1e-13);
}

TEST(GdnChunk, GradientsFlowThroughTheStateBetweenSegments) {
  const Case c = random_case({1, 50, 2, 8, 8}, true);
  const Outcome want = run_reference(c);
  const Outcome got =
      run(c, [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                const at::Tensor& beta, const at::Tensor& state) {
        const auto part = [](const at::Tensor& x, bool first) {
          return first ? x.slice(1, 0, 23) : x.slice(1, 23);
        };
        const auto segment = [&](bool first, const at::Tensor& s) {
          return gated_delta_rule(part(q, first), part(k, first), part(v, first), part(g, first),
                                  part(beta, first), s, 16);
        };
        const DeltaRuleResult a = segment(true, state), b = segment(false, a.state);
        return DeltaRuleResult{at::cat({a.o, b.o}, 1), b.state};
      });
  expect_equal(got, want, 1e-12, "two segments");
}

TEST(GdnChunk, RowsOfABatchAndThreadsDoNotMatter) {
  const Case c = random_case({3, 70, 3, 16, 16}, true).to(at::kFloat);
  const Outcome all = run_chunked(c, 32);
  at::set_num_threads(1);
  const Outcome one_thread = run_chunked(c, 32);
  EXPECT_TRUE(at::equal(all.o, one_thread.o));
  for (size_t i = 0; i < all.grads.size(); ++i)
    EXPECT_TRUE(at::equal(all.grads[i], one_thread.grads[i]));
  at::set_num_threads(2);
  Case alone;
  for (const at::Tensor& x : c.args) alone.args.push_back(x.slice(0, 1, 2).contiguous());
  alone.d_o = c.d_o.slice(0, 1, 2);
  alone.d_state = c.d_state.slice(0, 1, 2).contiguous();
  const Outcome row = run_chunked(alone, 32);
  EXPECT_TRUE(at::equal(row.o[0], all.o[1]));
  for (size_t i = 0; i < all.grads.size(); ++i)
    EXPECT_TRUE(at::equal(row.grads[i][0], all.grads[i][1]));
}

TEST(GdnChunk, TakesStridedArguments) {
  const Case c = random_case({2, 40, 3, 8, 8}, true);
  Case strided;
  for (size_t i = 0; i < 5; ++i) {
    // [B,H,T,...] memory seen as [B,T,H,...]
    strided.args.push_back(c.args[i].transpose(1, 2).contiguous().transpose(1, 2));
  }
  strided.args.push_back(c.args[5].transpose(2, 3).contiguous().transpose(2, 3));
  strided.d_o = c.d_o.transpose(1, 2).contiguous().transpose(1, 2);
  strided.d_state = c.d_state.transpose(2, 3).contiguous().transpose(2, 3);
  const auto keep_strides = [&](const Case& x) {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& arg : x.args) leaves.push_back(arg.detach().requires_grad_(true));
    const auto r =
        gated_delta_rule(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], leaves[5], 16);
    return Outcome{r.o.detach(), r.state.detach(),
                   torch::autograd::grad({r.o, r.state}, leaves, {x.d_o, x.d_state})};
  };
  expect_equal(keep_strides(strided), run_chunked(c, 16), 0, "strided");
}

TEST(GdnChunk, HalfPrecisionIsComputedInFloat32) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const Case full = random_case({2, 70, 2, 16, 32}, true).to(at::kFloat);
    Case half = full;
    for (const size_t i : {0u, 1u, 2u, 4u}) half.args[i] = full.args[i].to(type);
    Case same = half;
    for (const size_t i : {0u, 1u, 2u, 4u}) same.args[i] = half.args[i].to(at::kFloat);
    const Outcome got = run_chunked(half, 64), want = run_chunked(same, 64);
    EXPECT_EQ(got.o.scalar_type(), type);
    EXPECT_EQ(got.state.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(got.state, want.state));
    EXPECT_TRUE(at::equal(got.o, want.o.to(type)));
    EXPECT_EQ(got.grads[0].scalar_type(), type);
    EXPECT_EQ(got.grads[3].scalar_type(), at::kFloat);
  }
}

// Central differences in float64, on shapes that fit no vector: independent of autograd and of the
// reference.
TEST(GdnChunk, GradientsEqualFiniteDifferences) {
  const Case c = random_case({2, 7, 2, 3, 5}, true);
  const auto loss = [&](const std::vector<at::Tensor>& x) {
    const auto r = gated_delta_rule(x[0], x[1], x[2], x[3], x[4], x[5], 3);
    return ((r.o * c.d_o).sum() + (r.state * c.d_state).sum()).item<double>();
  };
  const Outcome got = run_chunked(c, 3);
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < c.args.size(); ++i) {
    std::vector<at::Tensor> x = c.args;
    x[i] = x[i].clone();
    const at::Tensor flat = x[i].view(-1), want = at::empty_like(flat);
    for (int64_t j = 0; j < flat.numel(); ++j) {
      const double at_j = flat[j].item<double>();
      flat[j] = at_j + kStep;
      const double above = loss(x);
      flat[j] = at_j - kStep;
      want[j] = (above - loss(x)) / (2 * kStep);
      flat[j] = at_j;
    }
    EXPECT_LE(error(got.grads[i].reshape(-1), want), 1e-8) << "argument " << i;
  }
}

// ---- wrong usage

template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST(GdnChunk, NamesTheArgumentThatDoesNotFit) {
  const Case c = random_case({1, 4, 2, 8, 8}, true);
  const auto with = [&](size_t i, const at::Tensor& x) {
    std::vector<at::Tensor> a = c.args;
    a[i] = x;
    return message_of([&] { gated_delta_rule(a[0], a[1], a[2], a[3], a[4], a[5], 16); });
  };
  EXPECT_EQ(with(1, c.args[1].slice(1, 1)),
            "gated_delta_rule: k has shape [1, 3, 2, 8], expected [1, 4, 2, 8]");
  EXPECT_EQ(with(4, c.args[4].unsqueeze(0)),
            "gated_delta_rule: beta has shape [1, 1, 4, 2], expected [1, 4, 2]");
  EXPECT_EQ(with(5, c.args[5].to(at::kFloat)), "gated_delta_rule: state is Float, expected Double");
  EXPECT_EQ(with(3, at::Tensor()), "gated_delta_rule: g is undefined");
  EXPECT_EQ(with(2, c.args[2][0]), "gated_delta_rule: v must be [batch, tokens, heads, value_dim]");
  EXPECT_EQ(message_of([&] {
              gated_delta_rule(c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], {}, 0);
            }),
            "gated_delta_rule: chunk must be at least 1, got 0");
  EXPECT_EQ(message_of([&] {
              const at::Tensor q = c.args[0].clone().requires_grad_(true);
              const auto r =
                  gated_delta_rule(q, c.args[1], c.args[2], c.args[3], c.args[4], {}, 16);
              torch::autograd::grad({r.o.sum()}, {q}, {}, true, true);
            }),
            "gated_delta_rule: second derivatives are not offered");
}

}  // namespace
}  // namespace graft::gdn
