// The plugin as it was built, through the ABI, against the formulas written out in gdn_oracle.h.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "abi_harness.h"
#include "gdn_oracle.h"
#include "mixer_testing.h"

namespace graft::gdn {
namespace {

using mixers::AbiError;
using mixers::BackwardArgs;
using mixers::BackwardResults;
using mixers::error;
using mixers::ForwardArgs;
using mixers::ForwardResults;
using mixers::fresh_error;
using mixers::OptionMap;

// The plugin under test.
class AbiMixer : public mixers::AbiMixer {
 public:
  explicit AbiMixer(const graft_layer_info& layer, const OptionMap& options = {})
      : mixers::AbiMixer(GDN_PLUGIN_FILE, layer, options) {}
};

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kModel = 12, kHeads = 3, kHeadDim = 8;
const std::vector<double> kInvFreq = {1.0, 0.25, 0.05};  // rotates 6 of 8 entries

graft_layer_info layer_info(uint32_t flags = 0) {
  graft_layer_info info{};
  info.struct_size = sizeof info;
  info.n_layers = 1;
  info.n_heads = kHeads;
  info.n_kv_heads = 1;
  info.head_dim = kHeadDim;
  info.model_dim = kModel;
  info.max_positions = 4096;
  info.rope_theta = 10000;
  info.rope_fraction = 0.75;
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
  std::string name;
  OptionMap options;
};

std::vector<Setting> settings() {
  const OptionMap everything = {{"qk_norm", "on"},          {"rope", true},
                                {"short_conv", int64_t{4}}, {"conv_bias", true},
                                {"qkv_bias", "on"},         {"o_bias", "on"},
                                {"write_gate_bias", true},  {"output_gate_bias", true},
                                {"expand_v", 1.5},          {"chunk_size", int64_t{16}}};
  return {
      {"paper", {}},
      {"closed form",
       {{"silu_v", false}, {"rope", true}, {"write_gate_bias", true}, {"output_gate_bias", true}}},
      {"everything", everything},
      {"bare",
       {{"silu_q", false},
        {"silu_k", false},
        {"silu_v", false},
        {"output_gate", false},
        {"output_norm", false},
        {"chunk_size", int64_t{16}}}},
      {"no gate", {{"output_gate", false}, {"chunk_size", int64_t{32}}}},
      {"no norm", {{"output_norm", false}, {"short_conv", int64_t{2}}}},
      {"no l2", {{"qk_l2norm", false}, {"qk_norm", "on"}, {"silu_q", false}}},
      {"own sizes",
       {{"num_heads", int64_t{2}}, {"head_dim", int64_t{6}}, {"expand_v", 0.5}, {"rope", true}}}};
}

OracleOptions oracle_options(const AbiMixer& mixer, const OptionMap& options) {
  const auto flag = [&](const char* key, bool def) {
    const auto found = options.find(key);
    return found == options.end() ? def : std::get<bool>(found->second);
  };
  OracleOptions o;
  const graft_param_spec &q = *mixer.spec("q_proj.weight"), &v = *mixer.spec("v_proj.weight");
  o.heads = q.heads;
  o.key_dim = q.head_dim;
  o.value_dim = v.head_dim;
  o.silu_q = flag("silu_q", true);
  o.silu_k = flag("silu_k", true);
  o.silu_v = flag("silu_v", true);
  o.l2norm = flag("qk_l2norm", true);
  o.qk_norm_eps = 1e-6;
  o.norm_eps = 1e-5;
  if (flag("rope", false)) {
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

std::vector<int64_t> counted(int64_t n, int64_t from = 0) {
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < n; ++t) positions.push_back(from + t);
  return positions;
}

struct Expected {
  at::Tensor y, s;
  std::vector<at::Tensor> taps;  // in the mixer's order
};

Expected expected(const Oracle& oracle, const at::Tensor& x) {
  std::vector<at::Tensor> y, head, pre, g, beta, s;
  for (int64_t b = 0; b < x.size(0); ++b) {
    OracleState state;
    const OracleOutput out = oracle.run(x[b], counted(x.size(1)), state);
    y.push_back(out.y);
    head.push_back(out.head_output);
    pre.push_back(out.pre_output);
    g.push_back(out.g);
    beta.push_back(out.beta);
    s.push_back(state.s);
  }
  return {
      at::stack(y), at::stack(s), {at::stack(head), at::stack(pre), at::stack(g), at::stack(beta)}};
}

std::vector<at::Tensor> as_type(const std::vector<at::Tensor>& tensors, at::ScalarType type) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& x : tensors) out.push_back(x.to(type));
  return out;
}

// ------------------------------------------------------------------ description

TEST(GdnPlugin, DescribesItself) {
  const graft_mixer_factory& factory = mixers::mixer_factory(GDN_PLUGIN_FILE);
  ASSERT_EQ(factory.count, 1u);
  const graft_desc& desc = *factory.descs[0];
  EXPECT_STREQ(desc.id, "org.graft.gdn");
  EXPECT_STREQ(desc.alias, "gdn");
  EXPECT_STREQ(mixers::open_plugin(GDN_PLUGIN_FILE).license, "Apache-2.0");
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
  EXPECT_TRUE(keys.contains("chunk_size"));
}

std::vector<std::string> names(const AbiMixer& mixer) {
  std::vector<std::string> out;
  for (const graft_param_spec* spec : mixer.specs()) out.emplace_back(spec->name);
  return out;
}

TEST(GdnPlugin, DeclaresFlasParameters) {
  const AbiMixer mixer(layer_info());
  EXPECT_THAT(names(mixer), ElementsAre("q_proj.weight", "k_proj.weight", "v_proj.weight",
                                        "a_proj.weight", "b_proj.weight", "A_log", "dt_bias",
                                        "g_proj.weight", "o_norm.weight", "o_proj.weight"));
  const auto check = [&](const char* name, const char* role, const char* domain,
                         std::vector<int64_t> shape, int32_t heads, int32_t head_dim) {
    const graft_param_spec& spec = *mixer.spec(name);
    EXPECT_STREQ(spec.role, role) << name;
    EXPECT_STREQ(spec.domain, domain) << name;
    EXPECT_EQ(std::vector<int64_t>(spec.shape, spec.shape + spec.ndim), shape) << name;
    EXPECT_EQ(spec.heads, heads) << name;
    EXPECT_EQ(spec.head_dim, head_dim) << name;
    EXPECT_TRUE((spec.flags & GRAFT_P_TRAINABLE) != 0) << name;
  };
  check("q_proj.weight", GRAFT_ROLE_QUERY, "", {24, 12}, 3, 8);
  check("k_proj.weight", GRAFT_ROLE_KEY, "", {24, 12}, 3, 8);
  check("v_proj.weight", GRAFT_ROLE_VALUE, "", {24, 12}, 3, 8);
  check("a_proj.weight", GRAFT_ROLE_DECAY_GATE, "softplus-inv", {3, 12}, 3, 1);
  check("b_proj.weight", GRAFT_ROLE_WRITE_GATE, "logit", {3, 12}, 3, 1);
  check("A_log", GRAFT_ROLE_DECAY_SCALE, "log", {3}, 3, 1);
  check("dt_bias", GRAFT_ROLE_DECAY_GATE_BIAS, "softplus-inv", {3}, 3, 1);
  check("g_proj.weight", GRAFT_ROLE_OUTPUT_GATE, "silu-inv", {24, 12}, 3, 8);
  check("o_norm.weight", GRAFT_ROLE_NORM, "", {8}, 0, 0);
  check("o_proj.weight", GRAFT_ROLE_OUTPUT, "", {12, 24}, 3, 8);
  for (const char* name : {"A_log", "dt_bias"}) {
    EXPECT_EQ(mixer.spec(name)->flags & (GRAFT_P_FP32 | GRAFT_P_NO_DECAY),
              GRAFT_P_FP32 | GRAFT_P_NO_DECAY)
        << name;
  }
}

TEST(GdnPlugin, DeclaresTheOptionalParametersWhereAskedFor) {
  const AbiMixer all(layer_info(), settings()[2].options);
  for (const char* name : {"q_proj.bias", "k_proj.bias", "v_proj.bias", "q_norm.weight",
                           "k_norm.weight", "q_conv1d.weight", "k_conv1d.bias", "v_conv1d.weight",
                           "b_proj.bias", "g_proj.bias", "o_proj.bias"}) {
    EXPECT_NE(all.spec(name), nullptr) << name;
  }
  EXPECT_STREQ(all.spec("q_proj.bias")->role, GRAFT_ROLE_QUERY_BIAS);
  EXPECT_STREQ(all.spec("o_proj.bias")->role, GRAFT_ROLE_OUTPUT_BIAS);
  EXPECT_STREQ(all.spec("b_proj.bias")->role, GRAFT_ROLE_WRITE_GATE_BIAS);
  EXPECT_STREQ(all.spec("b_proj.bias")->domain, "logit");
  EXPECT_STREQ(all.spec("g_proj.bias")->role, GRAFT_ROLE_OUTPUT_GATE_BIAS);
  EXPECT_STREQ(all.spec("q_norm.weight")->role, GRAFT_ROLE_QUERY_NORM);
  EXPECT_STREQ(all.spec("v_conv1d.weight")->role, GRAFT_ROLE_SHORT_CONV_V);

  const AbiMixer follows(
      layer_info(GRAFT_LAYER_QKV_BIAS | GRAFT_LAYER_O_BIAS | GRAFT_LAYER_QK_NORM));
  for (const char* name : {"q_proj.bias", "o_proj.bias", "k_norm.weight"})
    EXPECT_NE(follows.spec(name), nullptr) << name;
  const AbiMixer refuses(
      layer_info(GRAFT_LAYER_QKV_BIAS | GRAFT_LAYER_O_BIAS | GRAFT_LAYER_QK_NORM),
      {{"qkv_bias", "off"}, {"o_bias", "off"}, {"qk_norm", "off"}});
  EXPECT_EQ(names(refuses), names(AbiMixer(layer_info())));
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

TEST(GdnPlugin, RefusesWhatItCannotBuildAndSaysWhichOption) {
  const auto message = [](const OptionMap& options, graft_layer_info layer = layer_info()) {
    return std::string(failure_of([&] { AbiMixer mixer(layer, options); }).what());
  };
  EXPECT_EQ(message({{"chunk_size", int64_t{48}}}),
            "config.chunk_size: expected 16, 32, 64 or 128, got 48");
  EXPECT_EQ(message({{"short_conv", int64_t{1}}}),
            "config.short_conv: expected 0 (none) or a width of 2 to 8, got 1");
  EXPECT_EQ(message({{"conv_bias", true}}),
            "config.conv_bias: there is no short conv to have a bias; set short_conv");
  EXPECT_EQ(message({{"output_gate_bias", true}, {"output_gate", false}}),
            "config.output_gate_bias: there is no output gate to have a bias; set output_gate");
  EXPECT_EQ(message({{"expand_v", 0.3}}),
            "config.expand_v: head_dim 8 times expand_v must be a whole number, got 2.4");
  EXPECT_EQ(
      message({{"rope", true}, {"head_dim", int64_t{4}}}),
      "config.rope: the teacher rotates 6 entries of a head, but heads have 4 (see head_dim)");
  graft_layer_info no_rope = layer_info();
  no_rope.n_rope_freq = 0;
  EXPECT_EQ(message({{"rope", true}}, no_rope),
            "config.rope: the teacher's block has no RoPE whose frequencies could be used");
}

// ------------------------------------------------------------------ forward

TEST(GdnPlugin, ForwardEqualsTheFormulasWithEveryOption) {
  for (const Setting& setting : settings()) {
    at::manual_seed(7);
    AbiMixer mixer(layer_info(), setting.options);
    const OracleOptions options = oracle_options(mixer, setting.options);
    const std::vector<at::Tensor> params = random_params(mixer);
    const OracleParams named = by_name(mixer, params);
    const Oracle oracle(options, named);
    for (const auto& [batch, tokens] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {3, 2}, {1, 15}, {1, 16}, {2, 17}, {1, 53}}) {
      const at::Tensor x = randn({batch, tokens, kModel});
      const Expected want = expected(oracle, x);
      for (const auto& [type, tolerance] : {std::pair(at::kDouble, 1e-11), {at::kFloat, 2e-4}}) {
        const ForwardResults got = mixer.forward({x.to(type), as_type(params, type), {}, {}, {}});
        const std::string what =
            setting.name + " T" + std::to_string(tokens) + " " + at::toString(type);
        EXPECT_LE(error(got.y, want.y), tolerance) << what;
        EXPECT_LE(error(got.state[0], want.s), tolerance) << what << " state";
        ASSERT_EQ(got.taps.size(), want.taps.size());
        for (size_t i = 0; i < want.taps.size(); ++i)
          EXPECT_LE(error(got.taps[i], want.taps[i]), tolerance) << what << " tap " << i;
      }
    }
  }
}

TEST(GdnPlugin, EmptyBatchesAndSequencesAreLegal) {
  for (const Setting& setting : settings()) {
    AbiMixer mixer(layer_info(), setting.options);
    const std::vector<at::Tensor> params = random_params(mixer);
    for (const auto& [batch, tokens] : {std::pair<int64_t, int64_t>{0, 5}, {2, 0}, {0, 0}}) {
      const at::Tensor x = randn({batch, tokens, kModel});
      ForwardArgs args{x, params, {}, {}, {}};
      const ForwardResults none = mixer.forward(args);
      EXPECT_EQ(none.y.sizes(), x.sizes());
      EXPECT_EQ(none.state[0].abs().sum().item<double>(), 0) << setting.name;
      // No token: the state stays as it was.
      const at::Tensor before = randn({2, 4, kModel});
      args.state = mixer.forward({before, params, {}, {}, {}}).state;
      if (batch == 2) {
        const ForwardResults same = mixer.forward(args);
        for (size_t i = 0; i < same.state.size(); ++i)
          EXPECT_TRUE(at::equal(same.state[i], args.state[i])) << i;
      }
      args.state.clear();
      args.training = true;
      const BackwardResults d =
          mixer.backward(args, mixer.forward(args), {at::ones_like(x), {}, {}, {}, {}});
      for (const at::Tensor& dparam : d.dparams) EXPECT_EQ(dparam.abs().sum().item<double>(), 0);
    }
  }
}

TEST(GdnPlugin, TheOutputProjectionOfPreOutputIsY) {
  AbiMixer mixer(layer_info(GRAFT_LAYER_O_BIAS));
  const std::vector<at::Tensor> params = random_params(mixer);
  const OracleParams named = by_name(mixer, params);
  const ForwardResults r = mixer.forward({randn({2, 9, kModel}), params, {}, {}, {}});
  EXPECT_LE(error(at::linear(r.taps[1], named.at("o_proj.weight"), named.at("o_proj.bias")), r.y),
            1e-14);
}

TEST(GdnPlugin, TakesStridedInput) {
  AbiMixer mixer(layer_info());
  const std::vector<at::Tensor> params = random_params(mixer);
  const at::Tensor wide = randn({2, 7, 3 * kModel});
  const at::Tensor x =
      wide.slice(2, kModel, 2 * kModel).transpose(0, 1).contiguous().transpose(0, 1);
  const at::Tensor view = wide.slice(2, kModel, 2 * kModel);
  ASSERT_FALSE(view.is_contiguous());
  EXPECT_LE(
      error(mixer.forward({view, params, {}, {}, {}}).y, mixer.forward({x, params, {}, {}, {}}).y),
      1e-14);
}

TEST(GdnPlugin, BFloat16KeepsTheGatesInFloat32) {
  AbiMixer mixer(layer_info(), settings()[2].options);
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
  EXPECT_LE(error(got.y, want.y), 0.05);
  EXPECT_LE(((got.y.to(at::kFloat) - want.y).abs().mean() / want.y.abs().mean()).item<double>(),
            0.02);
  const BackwardResults d = mixer.backward(args, got, {at::randn_like(x), {}, {}, {}, {}});
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_EQ(d.dparams[i].scalar_type(), params[i].scalar_type());
    EXPECT_TRUE(d.dparams[i].isfinite().all().item<bool>()) << mixer.specs()[i]->name;
    EXPECT_GT(d.dparams[i].abs().max().item<double>(), 0) << mixer.specs()[i]->name;
  }
}

// ------------------------------------------------------------------ backward

struct Derivatives {
  at::Tensor dx;
  std::vector<at::Tensor> dparams;
};

// Of sum(dy y) + sum(ds s) + sum(dtap tap), by autograd through the formulas.
Derivatives expected_gradients(const AbiMixer& mixer, const OptionMap& setting,
                               const ForwardArgs& args, const BackwardArgs& from) {
  const OracleOptions options = oracle_options(mixer, setting);
  const at::Tensor x = args.x.detach().clone().requires_grad_(true);
  std::vector<at::Tensor> leaves{x};
  for (const at::Tensor& p : args.params) leaves.push_back(p.detach().clone().requires_grad_(true));
  const OracleParams named = by_name(mixer, {leaves.begin() + 1, leaves.end()});
  const Expected out = expected(Oracle(options, named), x);
  at::Tensor loss = (out.y * from.dy).sum();
  if (!from.dstate.empty()) loss = loss + (out.s * from.dstate[0]).sum();
  for (size_t i = 0; i < from.dtaps.size(); ++i) loss = loss + (out.taps[i] * from.dtaps[i]).sum();
  const auto grads = torch::autograd::grad({loss}, leaves);
  return {grads[0], {grads.begin() + 1, grads.end()}};
}

TEST(GdnPlugin, GradientsEqualThoseOfTheFormulasAndNoneIsZero) {
  for (const Setting& setting : settings()) {
    for (const bool recompute : {false, true}) {
      OptionMap with = setting.options;
      with["recompute"] = recompute;
      at::manual_seed(11);
      AbiMixer mixer(layer_info(), with);
      ForwardArgs args{randn({2, 19, kModel}), random_params(mixer), {}, {}, {}};
      args.training = true;
      const ForwardResults kept = mixer.forward(args);
      EXPECT_EQ(kept.saved.empty(), recompute);
      BackwardArgs from{randn({2, 19, kModel}), {}, {}, {}, {}};
      from.dstate.resize(kept.state.size());
      from.dstate[0] = at::randn_like(kept.state[0]);
      for (const at::Tensor& tap : kept.taps) from.dtaps.push_back(at::randn_like(tap));
      const BackwardResults got = mixer.backward(args, kept, from);
      const Derivatives want = expected_gradients(mixer, setting.options, args, from);
      EXPECT_LE(error(got.dx, want.dx), 1e-10) << setting.name << " x";
      for (size_t i = 0; i < args.params.size(); ++i) {
        EXPECT_LE(error(got.dparams[i], want.dparams[i]), 1e-10)
            << setting.name << " " << mixer.specs()[i]->name;
        EXPECT_GT(got.dparams[i].abs().max().item<double>(), 1e-6)
            << setting.name << " " << mixer.specs()[i]->name;
      }
    }
  }
}

TEST(GdnPlugin, BackwardAccumulatesSkipsFrozenParametersAndWithoutTaps) {
  AbiMixer mixer(layer_info());
  ForwardArgs args{randn({1, 9, kModel}), random_params(mixer), {}, {}, {}};
  args.training = true;
  args.want_state = args.want_taps = false;
  BackwardArgs from{randn({1, 9, kModel}), {}, {}, {}, {}};
  const BackwardResults plain = mixer.backward(args, mixer.forward(args), from);
  for (const at::Tensor& p : args.params) from.accumulate_onto.push_back(at::full_like(p, 2));
  const BackwardResults added = mixer.backward(args, mixer.forward(args), from);
  for (size_t i = 0; i < args.params.size(); ++i) {
    EXPECT_LE(error(added.dparams[i], plain.dparams[i] + 2), 1e-13) << i;
  }
  from.accumulate_onto.clear();
  from.frozen.assign(args.params.size(), true);
  from.frozen[0] = false;
  const BackwardResults one = mixer.backward(args, mixer.forward(args), from);
  EXPECT_TRUE(at::equal(one.dparams[0], plain.dparams[0]));
  EXPECT_TRUE(at::equal(one.dx, plain.dx));
  from.frozen.clear();
  from.want_dx = false;
  const BackwardResults params_only = mixer.backward(args, mixer.forward(args), from);
  for (size_t i = 0; i < args.params.size(); ++i)
    EXPECT_TRUE(at::equal(params_only.dparams[i], plain.dparams[i])) << i;
}

TEST(GdnPlugin, AKeptGraphServesOnlyItsOwnForward) {
  AbiMixer mixer(layer_info());
  ForwardArgs a{randn({1, 9, kModel}), random_params(mixer), {}, {}, {}}, b = a;
  b.x = randn({1, 9, kModel});
  a.training = b.training = true;
  const BackwardArgs from{randn({1, 9, kModel}), {}, {}, {}, {}};
  const BackwardResults want_a = mixer.backward(a, mixer.forward(a), from);
  const BackwardResults want_b = mixer.backward(b, mixer.forward(b), from);
  EXPECT_GT(error(want_a.dx, want_b.dx), 1e-3);
  // Two forwards, then both backwards, the first of which has lost its graph.
  const ForwardResults kept_a = mixer.forward(a), kept_b = mixer.forward(b);
  EXPECT_TRUE(at::equal(mixer.backward(a, kept_a, from).dx, want_a.dx));
  EXPECT_TRUE(at::equal(mixer.backward(b, kept_b, from).dx, want_b.dx));
  // Twice from one forward.
  const ForwardResults kept = mixer.forward(a);
  EXPECT_TRUE(at::equal(mixer.backward(a, kept, from).dx, want_a.dx));
  EXPECT_TRUE(at::equal(mixer.backward(a, kept, from).dx, want_a.dx));
  // The same numbers elsewhere in memory.
  const ForwardResults moved_kept = mixer.forward(a);
  ForwardArgs moved = a;
  moved.x = a.x.clone();
  EXPECT_TRUE(at::equal(mixer.backward(moved, moved_kept, from).dx, want_a.dx));
}

// ------------------------------------------------------------------ state

TEST(GdnPlugin, StepsAndPiecesEqualTheWhole) {
  for (const Setting& setting : settings()) {
    at::manual_seed(5);
    AbiMixer mixer(layer_info(), setting.options);
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
      EXPECT_LE(error(at::cat(y, 1), whole.y), 1e-12) << setting.name;
      for (size_t i = 0; i < state.size(); ++i)
        EXPECT_LE(error(state[i], whole.state[i]), 1e-12) << setting.name << i;
    }
  }
}

TEST(GdnPlugin, AZeroStateIsNoState) {
  for (const Setting& setting : settings()) {
    AbiMixer mixer(layer_info(), setting.options);
    ForwardArgs args{randn({2, 6, kModel}), random_params(mixer), {}, {}, {}};
    const ForwardResults want = mixer.forward(args);
    for (const at::Tensor& s : want.state) args.state.push_back(at::zeros_like(s));
    EXPECT_LE(error(mixer.forward(args).y, want.y), 1e-14) << setting.name;
  }
}

TEST(GdnPlugin, PositionsOfTheHostAreUsed) {
  AbiMixer mixer(layer_info(), {{"rope", true}});
  ForwardArgs args{randn({1, 9, kModel}), random_params(mixer), {}, {}, {}};
  const ForwardResults counted_here = mixer.forward(args);
  args.positions = at::arange(9, at::kLong).unsqueeze(0);
  EXPECT_TRUE(at::equal(mixer.forward(args).y, counted_here.y));
  args.positions = args.positions + 1000;  // rotations are relative
  const ForwardResults later = mixer.forward(args);
  EXPECT_LE(error(later.y, counted_here.y), 1e-9);
  EXPECT_EQ(later.state[1].item<int64_t>(), 1009);
  args.positions = args.positions * 2;
  EXPECT_GT(error(mixer.forward(args).y, counted_here.y), 1e-3);
}

TEST(GdnPlugin, GradientsFlowThroughTheState) {
  for (const Setting& setting : settings()) {
    at::manual_seed(13);
    AbiMixer mixer(layer_info(), setting.options);
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
    EXPECT_LE(error(at::cat({d1.dx, d2.dx}, 1), want.dx), 1e-11) << setting.name;
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_LE(error(d1.dparams[i] + d2.dparams[i], want.dparams[i]), 1e-11)
          << setting.name << " " << mixer.specs()[i]->name;
    }
  }
}

// ------------------------------------------------------------------ padding

TEST(GdnPlugin, PaddedTokensAreAsIfTheyWereNotThere) {
  const std::vector<std::vector<int64_t>> masks = {{0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
                                                   {1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0},
                                                   {1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1}};
  for (const Setting& setting : settings()) {
    at::manual_seed(17);
    AbiMixer mixer(layer_info(), setting.options);
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
        EXPECT_LE(error(got.y.index_select(1, real), want.y), 1e-13) << setting.name;
        EXPECT_EQ(got.y.index_select(1, pads).abs().sum().item<double>(), 0) << setting.name;
        for (size_t i = 0; i < got.taps.size(); ++i) {
          EXPECT_LE(error(got.taps[i].index_select(1, real), want.taps[i]), 1e-13) << setting.name;
          EXPECT_EQ(got.taps[i].index_select(1, pads).abs().sum().item<double>(), 0)
              << setting.name;
        }
        for (size_t i = 0; i < got.state.size(); ++i) {
          EXPECT_LE(error(got.state[i], want.state[i]), 1e-13) << setting.name << " state " << i;
        }
        BackwardArgs padded_from{
            at::full({1, 11, kModel}, NAN, at::kDouble).index_copy(1, real, from.dy),
            {},
            {},
            {},
            {}};
        const BackwardResults d_got = mixer.backward(padded, got, padded_from);
        EXPECT_LE(error(d_got.dx.index_select(1, real), d_want.dx), 1e-12) << setting.name;
        EXPECT_EQ(d_got.dx.index_select(1, pads).abs().sum().item<double>(), 0) << setting.name;
        for (size_t i = 0; i < params.size(); ++i) {
          EXPECT_LE(error(d_got.dparams[i], d_want.dparams[i]), 1e-12)
              << setting.name << " " << mixer.specs()[i]->name;
        }
      }
    }
  }
}

TEST(GdnPlugin, RowsOfABatchMayBePaddedDifferently) {
  AbiMixer mixer(layer_info(), settings()[2].options);
  const std::vector<at::Tensor> params = random_params(mixer);
  const at::Tensor x = randn({3, 7, kModel});
  const at::Tensor mask =
      at::tensor({1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0})
          .view({3, 7})
          .to(at::kByte);
  const ForwardResults got = mixer.forward({x, params, {}, {}, mask});
  for (int64_t b = 0; b < 3; ++b) {
    const ForwardResults alone = mixer.forward(
        {x.slice(0, b, b + 1).contiguous(), params, {}, {}, mask.slice(0, b, b + 1).contiguous()});
    EXPECT_LE(error(got.y.slice(0, b, b + 1), alone.y), 1e-13);
    for (size_t i = 0; i < got.state.size(); ++i)
      EXPECT_LE(error(got.state[i].slice(0, b, b + 1), alone.state[i]), 1e-13);
  }
  EXPECT_EQ(got.y[2].abs().sum().item<double>(), 0);
}

// ------------------------------------------------------------------ hard cases

// maxtext PR 5295, fla PR 508: a key that is exactly zero.
TEST(GdnPlugin, AZeroKeyHasAFiniteGradient) {
  AbiMixer mixer(layer_info());
  ForwardArgs args{
      at::randn({1, 9, kModel}), as_type(random_params(mixer), at::kFloat), {}, {}, {}};
  args.x.select(1, 4).zero_();
  args.training = true;
  const ForwardResults out = mixer.forward(args);
  EXPECT_TRUE(out.y.isfinite().all().item<bool>());
  const BackwardResults d = mixer.backward(args, out, {at::randn_like(args.x), {}, {}, {}, {}});
  EXPECT_TRUE(d.dx.isfinite().all().item<bool>());
  for (const at::Tensor& dparam : d.dparams) EXPECT_TRUE(dparam.isfinite().all().item<bool>());
}

TEST(GdnPlugin, WrongTensorsAreErrorsThatNameThem) {
  AbiMixer mixer(layer_info());
  const ForwardArgs good{randn({1, 4, kModel}), random_params(mixer), {}, {}, {}};
  ForwardArgs bad = good;
  bad.x = randn({1, 4, kModel + 1});
  AbiError e = failure_of([&] { mixer.forward(bad); });
  EXPECT_EQ(e.code, GRAFT_INVALID_ARGUMENT);
  EXPECT_STREQ(e.what(), "tensor:x: expected shape [1, 4, 12], got [1, 4, 13]");
  bad = good;
  bad.params[0] = randn({24, 11});
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "tensor:q_proj.weight: expected shape [24, 12], got [24, 11]");
  bad = good;
  bad.params.pop_back();
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "params: expected 10 parameters, got 9");
  bad = good;
  bad.state = {randn({1, 3, 8, 7})};
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "tensor:state: expected shape [1, 3, 8, 8], got [1, 3, 8, 7]");
  bad.state = {at::randn({1, 3, 8, 8})};
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "tensor:state: expected dtype float64, got float32");
  bad = good;
  bad.pad_mask = at::ones({1, 5}, at::kByte);
  EXPECT_STREQ(failure_of([&] { mixer.forward(bad); }).what(),
               "tensor:pad_mask: expected shape [1, 4], got [1, 5]");
  EXPECT_EQ(mixer.forward(good).y.size(1), 4);  // still usable
}

// ------------------------------------------------------------------ natural values

std::vector<at::Tensor> float_params(const AbiMixer& mixer) {
  return as_type(random_params(mixer), at::kFloat);
}

TEST(GdnPlugin, SetsHalfLives) {
  AbiMixer mixer(layer_info());
  const std::vector<at::Tensor> params = float_params(mixer);
  const std::vector<double> half_lives = {1, 37.5, INFINITY};
  const auto written = mixer.set_natural(GRAFT_NATURAL_HALF_LIFE, half_lives, params);
  const OracleParams named = by_name(mixer, params);
  for (size_t i = 0; i < written.size(); ++i) {
    const std::string name = mixer.specs()[i]->name;
    EXPECT_EQ(written[i] != 0, name == "a_proj.weight" || name == "A_log" || name == "dt_bias")
        << name;
  }
  EXPECT_EQ(named.at("a_proj.weight").abs().max().item<float>(), 0);
  const at::Tensor decay = (-named.at("A_log").exp() * at::softplus(named.at("dt_bias"))).exp();
  EXPECT_NEAR(decay[0].item<double>(), 0.5, 1e-6);
  EXPECT_NEAR(std::pow(decay[1].item<double>(), 37.5), 0.5, 1e-4);
  EXPECT_EQ(decay[2].item<double>(), 1.0);
}

TEST(GdnPlugin, SetsConstantGatesWhereItHasBiases) {
  AbiMixer mixer(layer_info(),
                 {{"write_gate_bias", true}, {"output_gate_bias", true}, {"output_norm", false}});
  std::vector<at::Tensor> params = float_params(mixer);
  mixer.set_natural(GRAFT_NATURAL_WRITE_GATE, {0.15, 0.0, 1.0}, params);
  mixer.set_natural(GRAFT_NATURAL_OUTPUT_GATE, {1.0, -0.2, 2.5}, params);
  OracleParams named = by_name(mixer, params);
  const at::Tensor beta = named.at("b_proj.bias").sigmoid();
  EXPECT_NEAR(beta[0].item<double>(), 0.15, 1e-6);
  EXPECT_NEAR(beta[1].item<double>(), 0, 1e-12);
  EXPECT_NEAR(beta[2].item<double>(), 1, 1e-6);
  EXPECT_EQ(named.at("b_proj.weight").abs().max().item<float>(), 0);
  // The factor between head output and pre output, for whatever input.
  const ForwardResults r = mixer.forward({at::randn({2, 5, kModel}), params, {}, {}, {}});
  const at::Tensor factor = at::tensor({1.0, -0.2, 2.5}).view({1, 1, 3, 1}).to(at::kFloat);
  EXPECT_LE(error(r.taps[1].view_as(r.taps[0]), r.taps[0] * factor), 1e-6);
}

TEST(GdnPlugin, SaysWhichNaturalValuesItCannotSet) {
  AbiMixer mixer(layer_info());
  const std::vector<at::Tensor> params = float_params(mixer);
  const auto failure = [&](const char* what, std::vector<double> values) {
    return failure_of([&] { mixer.set_natural(what, values, params); });
  };
  EXPECT_EQ(failure(GRAFT_NATURAL_WRITE_GATE, {0.5, 0.5, 0.4}).code, GRAFT_UNIMPLEMENTED);
  EXPECT_THAT(failure(GRAFT_NATURAL_WRITE_GATE, {0.5, 0.5, 0.4}).what(),
              HasSubstr("set the option write_gate_bias"));
  mixer.set_natural(GRAFT_NATURAL_WRITE_GATE, {0.5, 0.5, 0.5}, params);
  EXPECT_EQ(failure(GRAFT_NATURAL_OUTPUT_GATE, {1, 1, 1}).code, GRAFT_UNIMPLEMENTED);
  EXPECT_EQ(failure("temperature", {1, 1, 1}).code, GRAFT_UNIMPLEMENTED);
  EXPECT_EQ(failure(GRAFT_NATURAL_HALF_LIFE, {1, 1}).code, GRAFT_INVALID_ARGUMENT);
  EXPECT_STREQ(failure(GRAFT_NATURAL_HALF_LIFE, {1, 1}).what(),
               "natural:half-life: expected 3 values, one a head, got 2");
  EXPECT_EQ(failure(GRAFT_NATURAL_HALF_LIFE, {1, -1, 1}).code, GRAFT_OUT_OF_RANGE);
  EXPECT_EQ(failure(GRAFT_NATURAL_WRITE_GATE, {0.5, 1.5, 0.5}).code, GRAFT_OUT_OF_RANGE);
  AbiMixer ungated(layer_info(), {{"output_gate", false}});
  EXPECT_THAT(ungated.set_natural(GRAFT_NATURAL_OUTPUT_GATE, {1, 1, 1}, float_params(ungated)),
              ::testing::Each(0));
}

}  // namespace
}  // namespace graft::gdn
