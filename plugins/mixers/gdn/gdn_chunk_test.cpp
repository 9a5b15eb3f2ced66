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

namespace graft::gdn {
namespace {

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

// Largest difference over the size of what is expected.
double error(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_EQ(got.sizes(), expected.sizes());
  if (expected.numel() == 0) return 0;
  const at::Tensor want = expected.to(at::kDouble);
  const double size = std::max(1.0, want.abs().max().item<double>());
  const double worst = (got.to(at::kDouble) - want).abs().max().item<double>() / size;
  return std::isfinite(worst) ? worst : std::numeric_limits<double>::infinity();
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
  for (const int64_t chunk : {1, 5, 16, 32, 64}) {
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

}  // namespace
}  // namespace graft::gdn
