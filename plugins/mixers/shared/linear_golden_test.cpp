// Feature map and scan as hedgehog and hedgemamba put them together, and their recurrence, against
// vectors that independent code made in float64 (tests/golden/README.md).
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/checkpoint/safetensors.h"
#include "hedgehog_attention_reference.h"
#include "linear_block.h"
#include "mixer_testing.h"

namespace graft::mixers {
namespace {

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

const SafetensorsFile& golden(const std::string& mixer) {
  static std::map<std::string, SafetensorsFile> files;
  auto found = files.find(mixer);
  if (found == files.end()) {
    found = files
                .emplace(mixer, SafetensorsFile::open(std::string(GRAFT_TEST_DATA "/") + mixer +
                                                      ".safetensors"))
                .first;
  }
  return found->second;
}

struct GoldenCase {
  std::string mixer, name;
  at::Tensor get(const std::string& key) const {
    return tensor_of(golden(mixer).at(name + "." + key));
  }
  bool has(const std::string& key) const { return golden(mixer).find(name + "." + key) != nullptr; }
  bool starts_with(const char* prefix) const { return name.starts_with(prefix); }
  double eps() const { return starts_with("eps1e-6") ? 1e-6 : 0; }
  // The normaliser falls below float32's smallest number.
  bool float64_only() const { return starts_with("large_inputs"); }
};

std::vector<GoldenCase> cases(const std::string& mixer) {
  std::set<std::string> names;
  for (const std::string& key : golden(mixer).names()) names.insert(key.substr(0, key.rfind('.')));
  std::vector<GoldenCase> out;
  for (const std::string& name : names) {
    if (name != "featuremap") out.push_back({mixer, name});
  }
  return out;
}

struct Result {
  std::map<std::string, at::Tensor> outputs;  // in the layout of the file
};

using Attend = std::function<HedgehogAttentionResult(const HedgehogAttention&)>;

// One case on leaves of the file's own names.
Result run(const GoldenCase& c, const std::map<std::string, at::Tensor>& in, double floor,
           double eps, const Attend& attend) {
  const auto type = in.at("Wq").scalar_type();
  HedgehogAttention args;
  args.q = in.at("q").to(type);
  args.k = in.at("k").to(type);
  args.v = in.at("v").to(type);
  args.weight_q = in.at("Wq");
  args.bias_q = in.at("bq");
  args.weight_k = in.at("Wk");
  args.bias_k = in.at("bk");
  args.floor = floor;
  args.eps = eps;
  if (in.contains("S0"))
    args.state = at::cat({in.at("S0"), in.at("z0").unsqueeze(2)}, 2).transpose(2, 3);
  if (in.contains("g")) args.g = in.at("g");
  if (in.contains("dt")) {
    args.write = in.at("dt");
    args.g = -in.at("A_log").exp() * args.write;
  }
  const HedgehogAttentionResult r = attend(args);
  const at::Tensor s = r.state.transpose(2, 3);  // [1,H,Dv+1,2D]
  Result out;
  out.outputs["o"] = r.o;
  const int64_t dim = s.size(2) - 1;
  if (c.mixer == "hedgehog") {
    out.outputs["S_final"] = s.narrow(2, 0, dim);
    out.outputs["z_final"] = s.select(2, dim);
  } else {
    out.outputs["S_final"] = s;
  }
  return out;
}

std::map<std::string, at::Tensor> inputs(const GoldenCase& c, at::ScalarType type) {
  std::map<std::string, at::Tensor> in;
  for (const char* name : {"q", "k", "v", "Wq", "bq", "Wk", "bk", "S0", "z0", "g", "dt", "A_log"}) {
    if (!c.has(name)) continue;
    const at::Tensor stored = c.get(name);
    // bfloat16 stands for: as stored, with all that is computed in float32.
    const auto as = type == at::kBFloat16 ? stored.scalar_type() : type;
    in[name] = stored.to(as).detach().clone().requires_grad_(true);
  }
  return in;
}

void check(const GoldenCase& c, at::ScalarType type, double tolerance, const std::string& what,
           const Attend& attend) {
  const auto in = inputs(c, type);
  const Result r = run(c, in, /*floor=*/0, c.eps(), attend);
  int compared = 0;
  for (const auto& [name, got] : r.outputs) {
    if (!c.has(name)) continue;
    EXPECT_LE(error(got, c.get(name)), tolerance) << what << " " << name;
    ++compared;
  }
  EXPECT_GE(compared, 2) << what;
  std::vector<at::Tensor> leaves, outputs, cotangents;
  std::vector<std::string> names;
  for (const auto& [name, leaf] : in) {
    names.push_back(name);
    leaves.push_back(leaf);
  }
  for (const char* name : {"o", "S_final"}) {
    outputs.push_back(r.outputs.at(name));
    cotangents.push_back(c.get(std::string("cot_") + name).to(outputs.back().scalar_type()));
  }
  const auto grads = torch::autograd::grad(outputs, leaves, cotangents, std::nullopt, false, true);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor grad = grads[i].defined() ? grads[i] : at::zeros_like(leaves[i]);
    EXPECT_LE(error(grad, c.get("grad_" + names[i])), tolerance)
        << what << " gradient of " << names[i];
  }
}

TEST(LinearGolden, TheFilesHoldTheCasesTheTestsMean) {
  EXPECT_EQ(cases("hedgehog").size(), 11u);
  EXPECT_EQ(cases("hedgemamba").size(), 20u);
  int with_state = 0, with_dt = 0, with_g = 0, float64_only = 0;
  for (const char* mixer : {"hedgehog", "hedgemamba"}) {
    for (const GoldenCase& c : cases(mixer)) {
      with_state += c.has("S0");
      with_dt += c.has("dt");
      with_g += c.has("g");
      float64_only += c.float64_only();
    }
  }
  EXPECT_EQ(with_state, 15);
  EXPECT_EQ(with_dt, 9);
  EXPECT_EQ(with_g, 11);
  EXPECT_EQ(float64_only, 1);
}

TEST(LinearGolden, ReferenceAndChunkedFormEqualEveryCaseWithAllGradients) {
  for (const char* mixer : {"hedgehog", "hedgemamba"}) {
    for (const GoldenCase& c : cases(mixer)) {
      const std::string name = c.mixer + " " + c.name;
      check(c, at::kDouble, 1e-11, name + " reference f64", hedgehog_attention_reference);
      if (!c.float64_only())
        check(c, at::kFloat, 2e-5, name + " reference f32", hedgehog_attention_reference);
      for (const char* isa : {"baseline", "avx2", "avx512"}) {
        const linear::Kernels* set = linear::find_kernels(isa);
        if (set == nullptr) continue;
        for (const int64_t chunk : {1, 16, 64}) {
          const Attend attend = [&](HedgehogAttention in) {
            in.chunk = chunk;
            return hedgehog_attention(in, *set);
          };
          const std::string what = name + " " + isa + " chunk " + std::to_string(chunk);
          check(c, at::kDouble, 1e-11, what + " f64", attend);
          if (c.float64_only()) continue;
          check(c, at::kFloat, 5e-5, what + " f32", attend);
          // Gradients are rounded to bf16 once, at the end.
          if (c.get("q").scalar_type() == at::kBFloat16)
            check(c, at::kBFloat16, 1.0 / 256, what + " bf16", attend);
        }
      }
    }
  }
}

// In float32 the floor of the features stands in for the digits that are gone: outputs stay
// weighted means of the values, and nothing is infinite.
TEST(LinearGolden, LargeInputsInFloat32AreWeightedMeansWithFiniteGradients) {
  const GoldenCase c{"hedgehog", "large_inputs_T65"};
  const LinearBlockOptions defaults;
  const auto in = inputs(c, at::kFloat);
  const Result r = run(c, in, defaults.feature_floor, defaults.eps,
                       [](const HedgehogAttention& args) { return hedgehog_attention(args); });
  const at::Tensor o = r.outputs.at("o"), v = in.at("v");
  EXPECT_TRUE(o.isfinite().all().item<bool>());
  const at::Tensor highest = std::get<0>(v.cummax(1)), lowest = std::get<0>(v.cummin(1));
  EXPECT_TRUE((o <= highest + 2e-3).all().item<bool>());
  EXPECT_TRUE((o >= lowest - 2e-3).all().item<bool>());
  // Where the normaliser is far above the floor, the output is the exact one.
  const at::Tensor exact = (c.get("den") > 1e-4).unsqueeze(-1);
  EXPECT_GT(exact.sum().item<int64_t>(), 20);
  EXPECT_LE(
      error(o.masked_fill(exact.logical_not(), 0), c.get("o").masked_fill(exact.logical_not(), 0)),
      1e-4);
  std::vector<at::Tensor> leaves;
  for (const auto& [name, leaf] : in) leaves.push_back(leaf);
  for (const at::Tensor& grad : torch::autograd::grad({o}, leaves, {at::ones_like(o)}))
    EXPECT_TRUE(grad.isfinite().all().item<bool>());
}

TEST(LinearGolden, TheFeatureMapAlone) {
  const GoldenCase c{"hedgehog", "featuremap"};
  for (const auto& [type, tolerance] : {std::pair(at::kDouble, 1e-13), {at::kFloat, 2e-6}}) {
    std::vector<at::Tensor> in;
    for (const char* name : {"x", "W", "b"})
      in.push_back(c.get(name).to(type).detach().requires_grad_(true));
    const at::Tensor phi = hedgehog_features(in[0], in[1], in[2], 0);
    EXPECT_LE(error(phi, c.get("phi")), tolerance);
    const auto grads = torch::autograd::grad({phi}, in, {c.get("cot_phi").to(type)});
    for (std::size_t i = 0; i < in.size(); ++i) {
      const char* const names[] = {"x", "W", "b"};
      EXPECT_LE(error(grads[i], c.get(std::string("grad_") + names[i])), tolerance) << names[i];
    }
  }
}

}  // namespace
}  // namespace graft::mixers
