// The plugins hedgehog and hedgemamba as they were built, through the ABI, against the formulas
// written out in linear_oracle.h.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "abi_harness.h"
#include "linear_oracle.h"
#include "mixer_testing.h"

namespace graft::mixers {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kModel = 12, kHeads = 4, kKvHeads = 2, kHeadDim = 6;
const std::vector<double> kInvFreq = {1.0, 0.25};  // rotates 4 of 6 entries

graft_layer_info layer_info(uint32_t flags = 0) {
  graft_layer_info info{};
  info.struct_size = sizeof info;
  info.n_layers = 1;
  info.n_heads = kHeads;
  info.n_kv_heads = kKvHeads;
  info.head_dim = kHeadDim;
  info.model_dim = kModel;
  info.max_positions = 4096;
  info.rope_theta = 10000;
  info.rope_fraction = 0.67;
  info.rope_scaling = "";
  info.family = "llama";
  info.param_dtype = {kDLFloat, 32, 1};
  info.flags = flags;
  info.norm_eps = 1e-6;
  info.rope_inv_freq = kInvFreq.data();
  info.n_rope_freq = static_cast<int32_t>(kInvFreq.size());
  info.rope_attention_factor = 1.1;
  return info;
}

// ------------------------------------------------------------------ option sets

struct Setting {
  std::string name, file;
  OptionMap options;
};

std::vector<Setting> settings() {
  const std::string hedgehog = HEDGEHOG_FILE, mamba = HEDGEMAMBA_FILE;
  const OptionMap everything = {
      {"qk_norm", "on"},           {"qkv_bias", "on"},          {"o_bias", "on"},
      {"feature_dim", int64_t{4}}, {"chunk_size", int64_t{16}}, {"eps", 1e-3}};
  OptionMap everything_mamba = everything;
  everything_mamba["conv_bias"] = true;
  everything_mamba["short_conv"] = int64_t{3};
  return {{"hedgehog", hedgehog, {}},
          {"hedgehog everything", hedgehog, everything},
          {"hedgehog bare", hedgehog, {{"rope", false}, {"chunk_size", int64_t{5}}}},
          {"mamba", mamba, {{"chunk_size", int64_t{16}}}},
          {"mamba everything", mamba, everything_mamba},
          {"mamba decay", mamba, {{"short_conv", int64_t{0}}, {"output_gate", false}}},
          {"mamba conv", mamba, {{"decay", false}, {"output_gate", false}}},
          {"mamba gate", mamba, {{"decay", false}, {"short_conv", int64_t{0}}}},
          {"mamba bare",
           mamba,
           {{"decay", false}, {"short_conv", int64_t{0}}, {"output_gate", false}}}};
}

Setting setting(const std::string& name) {
  for (const Setting& s : settings()) {
    if (s.name == name) return s;
  }
  throw std::logic_error(name);
}

LinearOracleOptions oracle_options(const Setting& setting) {
  LinearOracleOptions o;
  o.heads = kHeads;
  o.kv_heads = kKvHeads;
  o.head_dim = kHeadDim;
  o.qk_norm_eps = 1e-6;
  o.floor = 1e-12;
  o.eps = setting.options.contains("eps") ? 1e-3 : 1e-20;
  if (!setting.options.contains("rope")) {
    o.inv_freq = kInvFreq;
    o.rope_factor = 1.1;
  }
  return o;
}

at::Tensor randn(at::IntArrayRef shape, double size = 1) {
  return at::randn(shape, at::kDouble) * size;
}

// Every parameter away from special values.
std::vector<at::Tensor> random_params(const AbiMixer& mixer) {
  std::vector<at::Tensor> params;
  for (const graft_param_spec* spec : mixer.specs()) {
    const at::IntArrayRef shape(spec->shape, static_cast<size_t>(spec->ndim));
    const bool centred_at_one = std::string(spec->name).find("norm") != std::string::npos;
    params.push_back(randn(shape, 0.4) + (centred_at_one ? 1 : 0));
  }
  return params;
}

OracleParams by_name(const AbiMixer& mixer, const std::vector<at::Tensor>& params) {
  OracleParams out;
  for (size_t i = 0; i < params.size(); ++i) out[mixer.specs()[i]->name] = params[i];
  return out;
}

std::vector<at::Tensor> as_type(const std::vector<at::Tensor>& tensors, at::ScalarType type) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& x : tensors) out.push_back(x.to(type));
  return out;
}

struct Expected {
  at::Tensor y, s;
  std::vector<at::Tensor> taps;  // in the mixers' order; the last two only with decay
};

Expected expected(const LinearOracle& oracle, const at::Tensor& x) {
  std::vector<at::Tensor> y, head, pre, g, dt, s;
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < x.size(1); ++t) positions.push_back(t);
  for (int64_t b = 0; b < x.size(0); ++b) {
    LinearOracleState state;
    const LinearOracleOutput out = oracle.run(x[b], positions, state);
    y.push_back(out.y);
    head.push_back(out.head_output);
    pre.push_back(out.pre_output);
    g.push_back(out.g);
    dt.push_back(out.dt);
    s.push_back(state.s);
  }
  return {
      at::stack(y), at::stack(s), {at::stack(head), at::stack(pre), at::stack(g), at::stack(dt)}};
}

// ------------------------------------------------------------------ description

TEST(LinearPlugins, DescribeThemselves) {
  for (const auto& [file, alias] :
       {std::pair(HEDGEHOG_FILE, "hedgehog"), {HEDGEMAMBA_FILE, "hedgemamba"}}) {
    const graft_mixer_factory& factory = mixer_factory(file);
    ASSERT_EQ(factory.count, 1u);
    const graft_desc& desc = *factory.descs[0];
    EXPECT_EQ(desc.id, std::string("org.graft.") + alias);
    EXPECT_STREQ(desc.alias, alias);
    EXPECT_STREQ(open_plugin(file).license, "Apache-2.0");
    EXPECT_EQ(desc.n_dtypes, 3u);
    for (const uint64_t cap :
         {GRAFT_CAP_BACKWARD, GRAFT_CAP_STEP, GRAFT_CAP_STATE_IO, GRAFT_CAP_PAD_MASK,
          GRAFT_CAP_DETERMINISTIC, GRAFT_CAP_STATEFUL_GRAD}) {
      EXPECT_TRUE((desc.caps & cap) != 0) << cap;
    }
    std::set<std::string> keys;
    for (uint32_t i = 0; i < desc.n_options; ++i) {
      EXPECT_TRUE(keys.insert(desc.options[i]->key).second);
      EXPECT_STRNE(desc.options[i]->doc, "");
    }
    EXPECT_TRUE(keys.contains("feature_dim"));
    EXPECT_EQ(keys.contains("short_conv"), alias == std::string("hedgemamba"));
  }
}

std::vector<std::string> names(const AbiMixer& mixer) {
  std::vector<std::string> out;
  for (const graft_param_spec* spec : mixer.specs()) out.emplace_back(spec->name);
  return out;
}

TEST(LinearPlugins, DeclareTheirParameters) {
  const AbiMixer hedgehog(HEDGEHOG_FILE, layer_info());
  EXPECT_THAT(names(hedgehog),
              ElementsAre("q_proj.weight", "k_proj.weight", "v_proj.weight", "feature_map_q.weight",
                          "feature_map_q.bias", "feature_map_k.weight", "feature_map_k.bias",
                          "o_proj.weight"));
  const AbiMixer mamba(HEDGEMAMBA_FILE, layer_info());
  EXPECT_THAT(names(mamba),
              ElementsAre("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_conv1d.weight",
                          "k_conv1d.weight", "v_conv1d.weight", "feature_map_q.weight",
                          "feature_map_q.bias", "feature_map_k.weight", "feature_map_k.bias",
                          "dt_proj.weight", "dt_bias", "A_log", "g_proj.weight", "g_proj.bias",
                          "o_proj.weight"));
  const auto check = [&](const char* name, const char* role, const char* domain,
                         std::vector<int64_t> shape, int32_t heads, int32_t head_dim) {
    const graft_param_spec& spec = *mamba.spec(name);
    EXPECT_STREQ(spec.role, role) << name;
    EXPECT_STREQ(spec.domain, domain) << name;
    EXPECT_EQ(std::vector<int64_t>(spec.shape, spec.shape + spec.ndim), shape) << name;
    EXPECT_EQ(spec.heads, heads) << name;
    EXPECT_EQ(spec.head_dim, head_dim) << name;
    EXPECT_TRUE((spec.flags & GRAFT_P_TRAINABLE) != 0) << name;
  };
  check("q_proj.weight", GRAFT_ROLE_QUERY, "", {24, 12}, 4, 6);
  check("k_proj.weight", GRAFT_ROLE_KEY, "", {12, 12}, 2, 6);
  check("v_proj.weight", GRAFT_ROLE_VALUE, "", {12, 12}, 2, 6);
  check("k_conv1d.weight", GRAFT_ROLE_SHORT_CONV_K, "residual", {12, 1, 4}, 2, 6);
  check("feature_map_k.weight", GRAFT_ROLE_FEATURE_MAP_K, "", {4, 6, 6}, 4, 6);
  check("feature_map_q.bias", GRAFT_ROLE_FEATURE_MAP_Q "-bias", "", {4, 6}, 4, 6);
  check("dt_proj.weight", GRAFT_ROLE_DECAY_GATE, "softplus-inv", {4, 12}, 4, 1);
  check("A_log", GRAFT_ROLE_DECAY_SCALE, "log", {4}, 4, 1);
  check("g_proj.weight", GRAFT_ROLE_OUTPUT_GATE, "silu-inv", {24, 12}, 4, 6);
  check("g_proj.bias", GRAFT_ROLE_OUTPUT_GATE_BIAS, "silu-inv", {24}, 4, 6);
  check("o_proj.weight", GRAFT_ROLE_OUTPUT, "", {12, 24}, 4, 6);
  EXPECT_EQ(mamba.spec("feature_map_q.weight")->init, GRAFT_INIT_EYE);
  EXPECT_EQ(mamba.spec("q_conv1d.weight")->init, GRAFT_INIT_ZEROS);
  for (const char* name : {"A_log", "dt_bias"}) {
    EXPECT_EQ(mamba.spec(name)->flags & (GRAFT_P_FP32 | GRAFT_P_NO_DECAY),
              GRAFT_P_FP32 | GRAFT_P_NO_DECAY)
        << name;
  }
  const AbiMixer follows(
      HEDGEHOG_FILE, layer_info(GRAFT_LAYER_QKV_BIAS | GRAFT_LAYER_O_BIAS | GRAFT_LAYER_QK_NORM));
  for (const char* name : {"q_proj.bias", "v_proj.bias", "o_proj.bias", "k_norm.weight"})
    EXPECT_NE(follows.spec(name), nullptr) << name;
}

template <class Call>
AbiError failure_of(const Call& call) {
  try {
    call();
  } catch (const AbiError& e) {
    return e;
  }
  ADD_FAILURE() << "no error was reported";
  return AbiError(GRAFT_OK, fresh_error());
}

TEST(LinearPlugins, RefuseWhatTheyCannotBuildAndSayWhichOption) {
  const auto message = [](const OptionMap& options, graft_layer_info layer = layer_info()) {
    return std::string(failure_of([&] { AbiMixer mixer(HEDGEMAMBA_FILE, layer, options); }).what());
  };
  EXPECT_EQ(message({{"short_conv", int64_t{1}}}),
            "config.short_conv: expected 0 (none) or a width of 2 to 8, got 1");
  EXPECT_EQ(message({{"conv_bias", true}, {"short_conv", int64_t{0}}}),
            "config.conv_bias: there is no short conv to have a bias; set short_conv");
  graft_layer_info odd = layer_info();
  odd.n_kv_heads = 3;
  EXPECT_THAT(message({}, odd), HasSubstr("4 heads of 6, 3 key-value heads"));
  graft_layer_info no_rope = layer_info();
  no_rope.n_rope_freq = 0;
  AbiMixer fine(HEDGEHOG_FILE, no_rope);  // nothing to keep
  EXPECT_EQ(fine.plan(1, 1, at::kFloat, false).n_state, 1u);
}

// ------------------------------------------------------------------ forward

TEST(LinearPlugins, ForwardEqualsTheFormulasWithEveryOption) {
  for (const Setting& s : settings()) {
    at::manual_seed(7);
    AbiMixer mixer(s.file, layer_info(), s.options);
    const LinearOracleOptions options = oracle_options(s);
    const std::vector<at::Tensor> params = random_params(mixer);
    const OracleParams named = by_name(mixer, params);
    const LinearOracle oracle(options, named);
    for (const auto& [batch, tokens] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {3, 2}, {1, 15}, {1, 16}, {2, 17}, {1, 63}, {1, 64}, {1, 65}}) {
      const at::Tensor x = randn({batch, tokens, kModel});
      const Expected want = expected(oracle, x);
      for (const auto& [type, tolerance] : {std::pair(at::kDouble, 1e-11), {at::kFloat, 5e-5}}) {
        const ForwardResults got = mixer.forward({x.to(type), as_type(params, type), {}, {}, {}});
        const std::string what = s.name + " T" + std::to_string(tokens) + " " + at::toString(type);
        EXPECT_LE(error(got.y, want.y), tolerance) << what;
        EXPECT_LE(error(got.state[0], want.s), tolerance) << what << " state";
        ASSERT_EQ(got.taps.size(), named.contains("A_log") ? 4u : 2u) << what;
        for (size_t i = 0; i < got.taps.size(); ++i)
          EXPECT_LE(error(got.taps[i], want.taps[i]), tolerance) << what << " tap " << i;
      }
    }
  }
}

TEST(LinearPlugins, EmptyBatchesAndSequencesAreLegal) {
  for (const Setting& s : settings()) {
    AbiMixer mixer(s.file, layer_info(), s.options);
    const std::vector<at::Tensor> params = random_params(mixer);
    for (const auto& [batch, tokens] : {std::pair<int64_t, int64_t>{0, 5}, {2, 0}, {0, 0}}) {
      const at::Tensor x = randn({batch, tokens, kModel});
      ForwardArgs args{x, params, {}, {}, {}};
      const ForwardResults none = mixer.forward(args);
      EXPECT_EQ(none.y.sizes(), x.sizes());
      EXPECT_EQ(none.state[0].abs().sum().item<double>(), 0) << s.name;
      // No token: the state stays as it was.
      if (batch == 2) {
        args.state = mixer.forward({randn({2, 4, kModel}), params, {}, {}, {}}).state;
        const ForwardResults same = mixer.forward(args);
        for (size_t i = 0; i < same.state.size(); ++i)
          EXPECT_TRUE(at::equal(same.state[i], args.state[i])) << s.name << i;
      }
      args.state.clear();
      args.training = true;
      const BackwardResults d =
          mixer.backward(args, mixer.forward(args), {at::ones_like(x), {}, {}, {}, {}});
      for (const at::Tensor& dparam : d.dparams) EXPECT_EQ(dparam.abs().sum().item<double>(), 0);
    }
  }
}

TEST(LinearPlugins, TheOutputProjectionOfPreOutputIsY) {
  for (const char* file : {HEDGEHOG_FILE, HEDGEMAMBA_FILE}) {
    AbiMixer mixer(file, layer_info(GRAFT_LAYER_O_BIAS));
    const std::vector<at::Tensor> params = random_params(mixer);
    const OracleParams named = by_name(mixer, params);
    const ForwardResults r = mixer.forward({randn({2, 9, kModel}), params, {}, {}, {}});
    EXPECT_LE(error(at::linear(r.taps[1], named.at("o_proj.weight"), named.at("o_proj.bias")), r.y),
              1e-14);
  }
}

TEST(LinearPlugins, TakeStridedInput) {
  AbiMixer mixer(HEDGEMAMBA_FILE, layer_info());
  const std::vector<at::Tensor> params = random_params(mixer);
  const at::Tensor view = randn({2, 7, 3 * kModel}).slice(2, kModel, 2 * kModel);
  ASSERT_FALSE(view.is_contiguous());
  EXPECT_LE(error(mixer.forward({view, params, {}, {}, {}}).y,
                  mixer.forward({view.contiguous(), params, {}, {}, {}}).y),
            1e-14);
}

TEST(LinearPlugins, BFloat16KeepsStateAndGatesInFloat32) {
  for (const char* name : {"hedgehog everything", "mamba everything", "mamba"}) {
    const Setting s = setting(name);
    AbiMixer mixer(s.file, layer_info(), s.options);
    at::manual_seed(3);
    std::vector<at::Tensor> params = random_params(mixer), same;
    for (size_t i = 0; i < params.size(); ++i) {
      // A host's parameters are float32; with values that bfloat16 holds both runs see the same.
      params[i] = params[i].to(at::kBFloat16).to(at::kFloat);
      same.push_back(params[i]);
    }
    const at::Tensor x = at::randn({2, 40, kModel}).to(at::kBFloat16);
    ForwardArgs args{x, params, {}, {}, {}};
    args.training = true;
    const ForwardResults got = mixer.forward(args);
    const ForwardResults want = mixer.forward({x.to(at::kFloat), same, {}, {}, {}});
    EXPECT_EQ(got.y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(got.state[0].scalar_type(), at::kFloat);
    EXPECT_LE(error(got.y, want.y), 0.05) << name;
    EXPECT_LE(((got.y.to(at::kFloat) - want.y).abs().mean() / want.y.abs().mean()).item<double>(),
              0.02)
        << name;
    const BackwardResults d = mixer.backward(args, got, {at::randn_like(x), {}, {}, {}, {}});
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_EQ(d.dparams[i].scalar_type(), params[i].scalar_type());
      EXPECT_TRUE(d.dparams[i].isfinite().all().item<bool>()) << mixer.specs()[i]->name;
      EXPECT_GT(d.dparams[i].abs().max().item<double>(), 0) << mixer.specs()[i]->name;
    }
  }
}

// ------------------------------------------------------------------ backward

struct Derivatives {
  at::Tensor dx;
  std::vector<at::Tensor> dparams;
};

// Of sum(dy y) + sum(ds s) + sum(dtap tap), by autograd through the formulas.
Derivatives expected_gradients(const AbiMixer& mixer, const Setting& setting,
                               const ForwardArgs& args, const BackwardArgs& from) {
  const LinearOracleOptions options = oracle_options(setting);
  const at::Tensor x = args.x.detach().clone().requires_grad_(true);
  std::vector<at::Tensor> leaves{x};
  for (const at::Tensor& p : args.params) leaves.push_back(p.detach().clone().requires_grad_(true));
  const OracleParams named = by_name(mixer, {leaves.begin() + 1, leaves.end()});
  const Expected out = expected(LinearOracle(options, named), x);
  at::Tensor loss = (out.y * from.dy).sum() + (out.s * from.dstate[0]).sum();
  for (size_t i = 0; i < from.dtaps.size(); ++i) loss = loss + (out.taps[i] * from.dtaps[i]).sum();
  const auto grads = torch::autograd::grad({loss}, leaves);
  return {grads[0], {grads.begin() + 1, grads.end()}};
}

TEST(LinearPlugins, GradientsEqualThoseOfTheFormulasAndNoneIsZero) {
  for (const Setting& s : settings()) {
    for (const bool recompute : {false, true}) {
      OptionMap with = s.options;
      with["recompute"] = recompute;
      at::manual_seed(11);
      AbiMixer mixer(s.file, layer_info(), with);
      ForwardArgs args{randn({2, 19, kModel}), random_params(mixer), {}, {}, {}};
      args.training = true;
      const ForwardResults kept = mixer.forward(args);
      EXPECT_EQ(kept.saved.size(), recompute ? 0u : 1u);
      BackwardArgs from{randn({2, 19, kModel}), {}, {}, {}, {}};
      from.dstate.resize(kept.state.size());
      from.dstate[0] = at::randn_like(kept.state[0]);
      for (const at::Tensor& tap : kept.taps) from.dtaps.push_back(at::randn_like(tap));
      const BackwardResults got = mixer.backward(args, kept, from);
      const Derivatives want = expected_gradients(mixer, s, args, from);
      EXPECT_LE(error(got.dx, want.dx), 1e-10) << s.name << " x";
      for (size_t i = 0; i < args.params.size(); ++i) {
        EXPECT_LE(error(got.dparams[i], want.dparams[i]), 1e-10)
            << s.name << " " << mixer.specs()[i]->name;
        EXPECT_GT(got.dparams[i].abs().max().item<double>(), 1e-6)
            << s.name << " " << mixer.specs()[i]->name;
      }
    }
  }
}

// A start where half of the block has no gradient would never be left. (At half-life infinity the
// decay has none; the mixer's own start is at 760 tokens.)
TEST(LinearPlugins, AtTheirOwnStartEveryParameterHasAGradient) {
  AbiMixer mixer(HEDGEMAMBA_FILE, layer_info());
  at::manual_seed(19);
  std::vector<at::Tensor> params;
  for (const graft_param_spec* spec : mixer.specs()) {
    const at::IntArrayRef shape(spec->shape, static_cast<size_t>(spec->ndim));
    at::Tensor p = at::zeros(shape);
    if (spec->init == GRAFT_INIT_NORMAL) p = at::randn(shape) * 0.3;
    if (spec->init == GRAFT_INIT_CONSTANT) p.fill_(spec->init_a);
    if (spec->init == GRAFT_INIT_EYE) p.diagonal(0, -2, -1).fill_(1);
    params.push_back(p);
  }
  ForwardArgs args{at::randn({1, 64, kModel}), params, {}, {}, {}};
  args.training = true;
  const BackwardResults d =
      mixer.backward(args, mixer.forward(args), {at::randn_like(args.x), {}, {}, {}, {}});
  for (size_t i = 0; i < params.size(); ++i)
    EXPECT_GT(d.dparams[i].abs().max().item<double>(), 1e-5) << mixer.specs()[i]->name;
}

// ------------------------------------------------------------------ state

TEST(LinearPlugins, StepsAndPiecesEqualTheWhole) {
  for (const Setting& s : settings()) {
    at::manual_seed(5);
    AbiMixer mixer(s.file, layer_info(), s.options);
    const std::vector<at::Tensor> params = random_params(mixer);
    const at::Tensor x = randn({2, 23, kModel});
    const ForwardResults whole = mixer.forward({x, params, {}, {}, {}});
    for (const bool step : {true, false}) {
      std::vector<at::Tensor> state, y;
      for (int64_t t = 0; t < 23;) {
        const int64_t n = step ? 1 : std::min<int64_t>(23 - t, 1 + t % 5);
        const ForwardResults r =
            mixer.forward({x.slice(1, t, t + n).contiguous(), params, state, {}, {}}, step);
        y.push_back(r.y);
        state = r.state;
        t += n;
      }
      EXPECT_LE(error(at::cat(y, 1), whole.y), 1e-12) << s.name;
      for (size_t i = 0; i < state.size(); ++i)
        EXPECT_LE(error(state[i], whole.state[i]), 1e-12) << s.name << i;
    }
  }
}

TEST(LinearPlugins, AZeroStateIsNoState) {
  for (const Setting& s : settings()) {
    AbiMixer mixer(s.file, layer_info(), s.options);
    ForwardArgs args{randn({2, 6, kModel}), random_params(mixer), {}, {}, {}};
    const ForwardResults want = mixer.forward(args);
    for (const at::Tensor& state : want.state) args.state.push_back(at::zeros_like(state));
    EXPECT_LE(error(mixer.forward(args).y, want.y), 1e-14) << s.name;
  }
}

TEST(LinearPlugins, PositionsOfTheHostAreUsed) {
  AbiMixer mixer(HEDGEHOG_FILE, layer_info());
  ForwardArgs args{randn({1, 9, kModel}), random_params(mixer), {}, {}, {}};
  const ForwardResults counted_here = mixer.forward(args);
  args.positions = at::arange(9, at::kLong).unsqueeze(0);
  EXPECT_TRUE(at::equal(mixer.forward(args).y, counted_here.y));
  // The feature map sees where a head points: rotations are not relative here.
  args.positions = args.positions * 2 + 5;
  const ForwardResults later = mixer.forward(args);
  EXPECT_GT(error(later.y, counted_here.y), 1e-3);
  EXPECT_EQ(later.state[1].item<int64_t>(), 22);
}

TEST(LinearPlugins, GradientsFlowThroughTheState) {
  for (const Setting& s : settings()) {
    at::manual_seed(13);
    AbiMixer mixer(s.file, layer_info(), s.options);
    const std::vector<at::Tensor> params = random_params(mixer);
    const at::Tensor x = randn({2, 13, kModel}), dy = randn({2, 13, kModel});
    const auto arguments = [&](const at::Tensor& part, const std::vector<at::Tensor>& state) {
      ForwardArgs args{part.contiguous(), params, state, {}, {}};
      args.training = true;
      return args;
    };
    const ForwardArgs whole = arguments(x, {});
    const BackwardResults want = mixer.backward(whole, mixer.forward(whole), {dy, {}, {}, {}, {}});
    const ForwardArgs first = arguments(x.slice(1, 0, 6), {});
    const ForwardResults first_out = mixer.forward(first);
    const ForwardArgs second = arguments(x.slice(1, 6), first_out.state);
    const BackwardResults d2 = mixer.backward(second, mixer.forward(second),
                                              {dy.slice(1, 6).contiguous(), {}, {}, {}, {}});
    const BackwardResults d1 =
        mixer.backward(first, first_out, {dy.slice(1, 0, 6).contiguous(), d2.dstate, {}, {}, {}});
    EXPECT_LE(error(at::cat({d1.dx, d2.dx}, 1), want.dx), 1e-11) << s.name;
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_LE(error(d1.dparams[i] + d2.dparams[i], want.dparams[i]), 1e-11)
          << s.name << " " << mixer.specs()[i]->name;
    }
  }
}

// ------------------------------------------------------------------ padding

TEST(LinearPlugins, PaddedTokensAreAsIfTheyWereNotThere) {
  const std::vector<std::vector<int64_t>> masks = {{0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
                                                   {1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0},
                                                   {1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1}};
  for (const Setting& s : settings()) {
    at::manual_seed(17);
    AbiMixer mixer(s.file, layer_info(), s.options);
    const std::vector<at::Tensor> params = random_params(mixer);
    const at::Tensor before = randn({1, 4, kModel});
    for (const bool with_state : {false, true}) {
      std::vector<at::Tensor> state;
      if (with_state) state = mixer.forward({before, params, {}, {}, {}}).state;
      for (const auto& row : masks) {
        const at::Tensor real = at::tensor(row).nonzero().squeeze(1),
                         mask = at::tensor(row).to(at::kByte).unsqueeze(0);
        ForwardArgs dense{randn({1, 8, kModel}), params, state, {}, {}};
        dense.training = true;
        ForwardArgs padded = dense;
        padded.x = at::full({1, 11, kModel}, NAN, at::kDouble).index_copy(1, real, dense.x);
        padded.pad_mask = mask;
        const ForwardResults want = mixer.forward(dense);
        const BackwardArgs from{randn({1, 8, kModel}), {}, {}, {}, {}};
        const BackwardResults d_want = mixer.backward(dense, want, from);
        const ForwardResults got = mixer.forward(padded);
        const at::Tensor pads = at::tensor(row).eq(0).nonzero().squeeze(1);
        EXPECT_LE(error(got.y.index_select(1, real), want.y), 1e-13) << s.name;
        EXPECT_EQ(got.y.index_select(1, pads).abs().sum().item<double>(), 0) << s.name;
        for (size_t i = 0; i < got.taps.size(); ++i) {
          EXPECT_LE(error(got.taps[i].index_select(1, real), want.taps[i]), 1e-13) << s.name;
          EXPECT_EQ(got.taps[i].index_select(1, pads).abs().sum().item<double>(), 0) << s.name;
        }
        for (size_t i = 0; i < got.state.size(); ++i)
          EXPECT_LE(error(got.state[i], want.state[i]), 1e-13) << s.name << " state " << i;
        BackwardArgs padded_from{
            at::full({1, 11, kModel}, NAN, at::kDouble).index_copy(1, real, from.dy),
            {},
            {},
            {},
            {}};
        const BackwardResults d_got = mixer.backward(padded, got, padded_from);
        EXPECT_LE(error(d_got.dx.index_select(1, real), d_want.dx), 1e-12) << s.name;
        EXPECT_EQ(d_got.dx.index_select(1, pads).abs().sum().item<double>(), 0) << s.name;
        for (size_t i = 0; i < params.size(); ++i) {
          EXPECT_LE(error(d_got.dparams[i], d_want.dparams[i]), 1e-12)
              << s.name << " " << mixer.specs()[i]->name;
        }
      }
    }
  }
}

TEST(LinearPlugins, RowsOfABatchMayBePaddedDifferently) {
  for (const char* name : {"hedgehog everything", "mamba everything"}) {
    const Setting s = setting(name);
    AbiMixer mixer(s.file, layer_info(), s.options);
    const std::vector<at::Tensor> params = random_params(mixer);
    const at::Tensor x = randn({3, 7, kModel});
    const at::Tensor mask =
        at::tensor({1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0})
            .view({3, 7})
            .to(at::kByte);
    const ForwardResults got = mixer.forward({x, params, {}, {}, mask});
    for (int64_t b = 0; b < 3; ++b) {
      const ForwardResults alone = mixer.forward({x.slice(0, b, b + 1).contiguous(),
                                                  params,
                                                  {},
                                                  {},
                                                  mask.slice(0, b, b + 1).contiguous()});
      EXPECT_LE(error(got.y.slice(0, b, b + 1), alone.y), 1e-13);
      for (size_t i = 0; i < got.state.size(); ++i)
        EXPECT_LE(error(got.state[i].slice(0, b, b + 1), alone.state[i]), 1e-13);
    }
    EXPECT_EQ(got.y[2].abs().sum().item<double>(), 0);
    EXPECT_EQ(got.state[0][2].abs().sum().item<double>(), 0);
  }
}

// ------------------------------------------------------------------ hard cases

// Queries and keys of norm 0 and 60 and more, in every type; the first token has nobody but itself.
// With all values equal to 1 the weighted mean is 1.
TEST(LinearPlugins, RowsOfTheAttentionSumToOneForAnyQueriesAndKeys) {
  for (const char* file : {HEDGEHOG_FILE, HEDGEMAMBA_FILE}) {
    AbiMixer mixer(file, layer_info(), {{"qkv_bias", "on"}});
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
      for (const double size : {0.0, 1.0, 60.0, 1e4}) {
        at::manual_seed(23);
        std::vector<at::Tensor> params = random_params(mixer);
        for (size_t i = 0; i < params.size(); ++i) {
          const std::string name = mixer.specs()[i]->name;
          if (name == "q_proj.weight" || name == "k_proj.weight") params[i].mul_(size);
          if (name == "v_proj.weight" || name.find("conv1d") != std::string::npos)
            params[i].zero_();
          if (name == "v_proj.bias") params[i].fill_(1);
          params[i] = params[i].to(type == at::kDouble ? at::kDouble : at::kFloat);
        }
        ForwardArgs args{at::randn({2, 33, kModel}).to(type), params, {}, {}, {}};
        args.training = true;
        const ForwardResults r = mixer.forward(args);
        EXPECT_LE(error(r.taps[0], at::ones_like(r.taps[0])), 1e-3)
            << at::toString(type) << " size " << size;
        const BackwardResults d = mixer.backward(args, r, {at::randn_like(args.x), {}, {}, {}, {}});
        EXPECT_TRUE(d.dx.isfinite().all().item<bool>()) << at::toString(type) << size;
        for (size_t i = 0; i < params.size(); ++i) {
          EXPECT_TRUE(d.dparams[i].isfinite().all().item<bool>())
              << at::toString(type) << size << mixer.specs()[i]->name;
        }
      }
    }
  }
}

// The chunked form and the steps where dt is next to nothing and where it is large.
TEST(LinearPlugins, ChunksEqualStepsForSmallAndLargeDt) {
  AbiMixer mixer(HEDGEMAMBA_FILE, layer_info());
  for (const float raw : {-12.0F, 10.0F}) {
    at::manual_seed(29);
    std::vector<at::Tensor> params = as_type(random_params(mixer), at::kFloat);
    for (size_t i = 0; i < params.size(); ++i) {
      if (std::string(mixer.specs()[i]->name) == "dt_bias") params[i].fill_(raw);
    }
    const at::Tensor x = at::randn({1, 257, kModel});
    const at::Tensor whole = mixer.forward({x, params, {}, {}, {}}).y;
    EXPECT_TRUE(whole.isfinite().all().item<bool>());
    std::vector<at::Tensor> state, y;
    for (int64_t t = 0; t < 257; ++t) {
      const ForwardResults r =
          mixer.forward({x.narrow(1, t, 1).contiguous(), params, state, {}, {}}, true);
      y.push_back(r.y);
      state = r.state;
    }
    EXPECT_LE(error(at::cat(y, 1), whole), 1e-4) << raw;
  }
}

TEST(LinearPlugins, WrongTensorsAreErrorsThatNameThem) {
  AbiMixer mixer(HEDGEHOG_FILE, layer_info());
  const ForwardArgs good{randn({1, 4, kModel}), random_params(mixer), {}, {}, {}};
  ForwardArgs bad = good;
  bad.x = randn({1, 4, kModel + 1});
  AbiError e = failure_of([&] { mixer.forward(bad); });
  EXPECT_EQ(e.code, GRAFT_INVALID_ARGUMENT);
  EXPECT_STREQ(e.what(), "tensor:x: expected shape [1, 4, 12], got [1, 4, 13]");
  bad = good;
  bad.params[3] = randn({4, 6, 5});
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "tensor:feature_map_q.weight: expected shape [4, 6, 6], got [4, 6, 5]");
  bad = good;
  bad.params.pop_back();
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "params: expected 8 parameters, got 7");
  bad = good;
  bad.state = {randn({1, 4, 12, 6}), at::zeros({1}, at::kLong)};
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "tensor:state: expected shape [1, 4, 12, 7], got [1, 4, 12, 6]");
  bad = good;
  bad.pad_mask = at::ones({1, 5}, at::kByte);
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "tensor:pad_mask: expected shape [1, 4], got [1, 5]");
  EXPECT_EQ(mixer.forward(good).y.size(1), 4);  // still usable
}

// ------------------------------------------------------------------ natural values

TEST(LinearPlugins, SetHalfLives) {
  AbiMixer mixer(HEDGEMAMBA_FILE, layer_info());
  const std::vector<at::Tensor> params = as_type(random_params(mixer), at::kFloat);
  const auto written = mixer.set_natural(GRAFT_NATURAL_HALF_LIFE, {1, 37.5, INFINITY, 1}, params);
  const OracleParams named = by_name(mixer, params);
  for (size_t i = 0; i < written.size(); ++i) {
    const std::string name = mixer.specs()[i]->name;
    EXPECT_EQ(written[i] != 0, name == "dt_proj.weight" || name == "A_log" || name == "dt_bias")
        << name;
  }
  EXPECT_EQ(named.at("dt_proj.weight").abs().max().item<float>(), 0);
  const at::Tensor dt = at::softplus(named.at("dt_bias"));
  EXPECT_LE(error(dt, at::ones({4})), 1e-6);
  const at::Tensor decay = (-named.at("A_log").exp() * dt).exp();
  EXPECT_NEAR(decay[0].item<double>(), 0.5, 1e-6);
  EXPECT_NEAR(std::pow(decay[1].item<double>(), 37.5), 0.5, 1e-4);
  EXPECT_EQ(decay[2].item<double>(), 1.0);
  // A write gate of 1 keeps the half-life that the bias stands for.
  named.at("dt_bias").fill_(2);
  const at::Tensor before = named.at("A_log").exp() * at::softplus(named.at("dt_bias"));
  mixer.set_natural(GRAFT_NATURAL_WRITE_GATE, {1, 1, 1, 1}, params);
  const at::Tensor after = named.at("A_log").exp() * at::softplus(named.at("dt_bias"));
  EXPECT_LE(((after / before) - 1).abs().max().item<double>(), 1e-5);
  EXPECT_LE(error(at::softplus(named.at("dt_bias")), at::ones({4})), 1e-6);
}

TEST(LinearPlugins, SetOutputGates) {
  AbiMixer mixer(HEDGEMAMBA_FILE, layer_info());
  const std::vector<at::Tensor> params = as_type(random_params(mixer), at::kFloat);
  mixer.set_natural(GRAFT_NATURAL_OUTPUT_GATE, {1.0, -0.2, 2.5, 0.0}, params);
  const ForwardResults r = mixer.forward({at::randn({2, 5, kModel}), params, {}, {}, {}});
  const at::Tensor factor = at::tensor({1.0, -0.2, 2.5, 0.0}).view({1, 1, 4, 1}).to(at::kFloat);
  EXPECT_LE(error(r.taps[1].view_as(r.taps[0]), r.taps[0] * factor), 1e-6);
}

TEST(LinearPlugins, SayWhichNaturalValuesTheyCannotSet) {
  AbiMixer hedgehog(HEDGEHOG_FILE, layer_info()), mamba(HEDGEMAMBA_FILE, layer_info());
  const auto failure = [](AbiMixer& mixer, const char* what, std::vector<double> values) {
    return failure_of(
        [&] { mixer.set_natural(what, values, as_type(random_params(mixer), at::kFloat)); });
  };
  EXPECT_EQ(failure(hedgehog, GRAFT_NATURAL_HALF_LIFE, {8, 8, 8, 8}).code, GRAFT_UNIMPLEMENTED);
  EXPECT_THAT(failure(hedgehog, GRAFT_NATURAL_HALF_LIFE, {8, 8, 8, 8}).what(),
              HasSubstr("does not forget"));
  EXPECT_EQ(failure(hedgehog, GRAFT_NATURAL_OUTPUT_GATE, {1, 1, 1, 2}).code, GRAFT_UNIMPLEMENTED);
  EXPECT_EQ(failure(mamba, GRAFT_NATURAL_WRITE_GATE, {1, 1, 1, 0.5}).code, GRAFT_UNIMPLEMENTED);
  EXPECT_THAT(failure(mamba, GRAFT_NATURAL_WRITE_GATE, {1, 1, 1, 0.5}).what(),
              HasSubstr("weights that sum to 1"));
  EXPECT_EQ(failure(mamba, "temperature", {1, 1, 1, 1}).code, GRAFT_UNIMPLEMENTED);
  EXPECT_EQ(failure(mamba, GRAFT_NATURAL_HALF_LIFE, {1, -1, 1, 1}).code, GRAFT_OUT_OF_RANGE);
  EXPECT_EQ(failure(mamba, GRAFT_NATURAL_OUTPUT_GATE, {1, -1, 1, 1}).code, GRAFT_OUT_OF_RANGE);
  EXPECT_STREQ(failure(mamba, GRAFT_NATURAL_HALF_LIFE, {1, 1}).what(),
               "natural:half-life: expected 4 values, one a head, got 2");
  // What is so anyway is no error.
  const std::vector<at::Tensor> params = as_type(random_params(hedgehog), at::kFloat);
  EXPECT_THAT(hedgehog.set_natural(GRAFT_NATURAL_OUTPUT_GATE, {1, 1, 1, 1}, params), Each(0));
  EXPECT_THAT(hedgehog.set_natural(GRAFT_NATURAL_WRITE_GATE, {1, 1, 1, 1}, params), Each(0));
  EXPECT_THAT(hedgehog.set_natural(GRAFT_NATURAL_HALF_LIFE,
                                   {INFINITY, INFINITY, INFINITY, INFINITY}, params),
              Each(0));
}

}  // namespace
}  // namespace graft::mixers
