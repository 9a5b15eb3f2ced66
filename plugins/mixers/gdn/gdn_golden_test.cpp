// The recurrence and its chunked form against vectors that independent code made in float64
// (tests/golden/README.md).
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "core/checkpoint/safetensors.h"
#include "gdn_chunk.h"
#include "gdn_features.h"
#include "gdn_reference.h"
#include "mixer_testing.h"

namespace graft::gdn {
namespace {

using mixers::error;

const SafetensorsFile& golden() {
  static const SafetensorsFile file = SafetensorsFile::open(GRAFT_TEST_DATA "/gdn.safetensors");
  return file;
}

at::Tensor tensor_of(const TensorView& view) {
  const at::ScalarType type = view.dtype == DType::F64    ? at::kDouble
                              : view.dtype == DType::F32  ? at::kFloat
                              : view.dtype == DType::BF16 ? at::kBFloat16
                                                          : at::kByte;
  EXPECT_NE(type, at::kByte) << view.name;
  at::Tensor x = at::empty(view.shape, type);
  std::memcpy(x.data_ptr(), view.data, view.bytes);
  return x;
}

std::vector<std::string> case_names() {
  std::set<std::string> names;
  for (const std::string& key : golden().names()) names.insert(key.substr(0, key.rfind('.')));
  return {names.begin(), names.end()};
}

struct GoldenCase {
  std::string name;
  at::Tensor get(const std::string& key) const { return tensor_of(golden().at(name + "." + key)); }
  bool has(const std::string& key) const { return golden().find(name + "." + key) != nullptr; }
  bool raw() const { return name.starts_with("raw_l2norm"); }  // q, k are not normalised yet
  bool bf16() const { return name.starts_with("bf16"); }
};

// States are stored as [B,H,Dv,Dk].
at::Tensor state_of(const at::Tensor& stored) { return stored.transpose(2, 3).contiguous(); }

template <class Rule>
void check(const GoldenCase& c, at::ScalarType type, double tolerance, const std::string& what,
           const Rule& rule) {
  const std::vector<std::string> inputs = {"q", "k", "v", "g", "beta"};
  std::vector<at::Tensor> x, wanted;
  for (const std::string& name : inputs) {
    const at::Tensor stored = c.get(name);
    const bool as_stored = type == at::kBFloat16;
    x.push_back((as_stored ? stored : stored.to(type)).requires_grad_(true));
  }
  const auto state_type = type == at::kDouble ? at::kDouble : at::kFloat;
  x.push_back(c.has("S0") ? state_of(c.get("S0")).to(state_type).requires_grad_(true)
                          : at::Tensor());
  for (const at::Tensor& input : x) {
    if (input.defined()) wanted.push_back(input);
  }
  const auto normed = [&](const at::Tensor& u) {
    return c.raw() ? head_features(u.flatten(2), u.size(2), {.l2norm = true}) : u;
  };
  const DeltaRuleResult r = rule(normed(x[0]), normed(x[1]), x[2], x[3], x[4], x[5]);
  EXPECT_LE(error(r.o, c.get("o")), tolerance) << what << " o";
  EXPECT_LE(error(r.state, state_of(c.get("S_final"))), tolerance) << what << " state";
  const auto grads = torch::autograd::grad(
      {r.o, r.state}, wanted,
      {c.get("cot_o").to(r.o.scalar_type()), state_of(c.get("cot_S_final")).to(state_type)});
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_LE(error(grads[i], c.get("grad_" + inputs[i])), tolerance)
        << what << " gradient of " << inputs[i];
  }
  if (c.has("S0")) {
    EXPECT_LE(error(grads[5], state_of(c.get("grad_S0"))), tolerance)
        << what << " gradient of the state";
  }
}

TEST(GdnGolden, TheFileHoldsTheCasesTheTestsMean) {
  const auto names = case_names();
  EXPECT_EQ(names.size(), 21u);
  for (const char* name :
       {"T1", "T65_s0", "T130", "g_mixed", "g_minus20", "repeated_key", "bf16_T130"}) {
    EXPECT_TRUE(std::find(names.begin(), names.end(), name) != names.end()) << name;
  }
}

TEST(GdnGolden, ReferenceAndChunkedFormEqualEveryCaseWithAllGradients) {
  for (const std::string& name : case_names()) {
    const GoldenCase c{name};
    check(c, at::kDouble, 1e-12, name + " reference f64", gated_delta_rule_reference);
    check(c, at::kFloat, 2e-5, name + " reference f32", gated_delta_rule_reference);
    for (const char* isa : {"baseline", "avx2", "avx512"}) {
      const Kernels* set = find_kernels(isa);
      if (set == nullptr) continue;
      for (const int64_t chunk : {16, 32, 64, 128}) {
        const auto rule = [&](const auto&... x) { return gated_delta_rule(x..., chunk, *set); };
        const std::string what = name + " " + isa + " chunk " + std::to_string(chunk);
        check(c, at::kDouble, 1e-12, what + " f64", rule);
        check(c, at::kFloat, 2e-5, what + " f32", rule);
        // Outputs and gradients are rounded to bf16 once, at the end.
        if (c.bf16()) check(c, at::kBFloat16, 1.0 / 256, what + " bf16", rule);
      }
    }
  }
}

}  // namespace
}  // namespace graft::gdn
