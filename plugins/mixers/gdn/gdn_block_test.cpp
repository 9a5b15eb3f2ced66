// The plugin's block, through the ABI, against the block in LibTorch operations: every option,
// type, kind of padding and state, forward and all gradients.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <vector>

#include "abi_harness.h"
#include "gdn_torch_block.h"
#include "mixer_testing.h"

namespace graft::gdn {
namespace {

using mixers::AbiMixer;
using mixers::BackwardArgs;
using mixers::BackwardResults;
using mixers::error;
using mixers::ForwardArgs;
using mixers::ForwardResults;
using mixers::OptionMap;

constexpr int64_t kModel = 20;
const std::vector<double> kInvFreq = {1.0, 0.3, 0.02};

graft_layer_info layer_info() {
  graft_layer_info info{};
  info.struct_size = sizeof info;
  info.n_layers = 1;
  info.n_heads = info.n_kv_heads = 3;
  info.head_dim = 10;
  info.model_dim = kModel;
  info.rope_scaling = "";
  info.family = "llama";
  info.param_dtype = {kDLFloat, 32, 1};
  info.norm_eps = 1e-6;
  info.rope_inv_freq = kInvFreq.data();
  info.n_rope_freq = static_cast<int32_t>(kInvFreq.size());
  info.rope_attention_factor = 1.1;
  return info;
}

// Each option away from its default at least once, alone and together.
std::vector<OptionMap> settings() {
  const OptionMap everything = {{"qk_norm", "on"},           {"rope", true},
                                {"short_conv", int64_t{4}},  {"conv_bias", true},
                                {"qkv_bias", "on"},          {"o_bias", "on"},
                                {"write_gate_bias", true},   {"output_gate_bias", true},
                                {"chunk_size", int64_t{16}}, {"expand_v", 1.5}};
  return {{},
          everything,
          {{"silu_q", false},
           {"silu_k", false},
           {"silu_v", false},
           {"qk_l2norm", false},
           {"chunk_size", int64_t{16}}},
          {{"silu_v", false}, {"rope", true}, {"o_bias", "on"}},
          {{"output_gate", false},
           {"output_norm", false},
           {"short_conv", int64_t{2}},
           {"silu_v", false}},
          {{"output_gate", false}, {"norm_eps", 0.01}, {"short_conv", int64_t{8}}},
          {{"output_norm", false},
           {"qk_norm", "on"},
           {"num_heads", int64_t{2}},
           {"head_dim", int64_t{7}},
           {"expand_v", 2.0}},
          {{"recompute", true},
           {"rope", true},
           {"short_conv", int64_t{3}},
           {"qkv_bias", "on"},
           {"output_gate_bias", true}}};
}

// The plugin and the reference for one set of options.
struct Pair {
  graft_layer_info layer = layer_info();
  AbiMixer mixer;
  BlockOptions options;

  explicit Pair(const OptionMap& given)
      : mixer(GDN_PLUGIN_FILE, layer, given),
        options(
            block_options(sdk::LayerInfo(&layer),
                          sdk::Config(mixers::CompleteConfig(
                                          *mixers::mixer_factory(GDN_PLUGIN_FILE).descs[0], given)
                                          .c()))) {}
};

struct Sizes {
  int64_t batch, tokens;
  bool padded, with_state;
};

struct Problem {
  ForwardArgs args;
  BackwardArgs from;
};

bool is_position(const at::Tensor& state) { return state.scalar_type() == at::kLong; }

Problem make_problem(Pair& pair, const Sizes& sizes, at::ScalarType type) {
  const auto inner = type == at::kDouble ? at::kDouble : at::kFloat;
  Problem p;
  p.args.x = at::randn({sizes.batch, sizes.tokens, kModel}, at::kDouble).to(type);
  p.from.dy = at::randn({sizes.batch, sizes.tokens, kModel}, at::kDouble).to(type);
  for (const graft_param_spec* spec : pair.mixer.specs()) {
    const at::IntArrayRef shape(spec->shape, static_cast<size_t>(spec->ndim));
    const bool norm = std::string(spec->name).find("norm") != std::string::npos;
    p.args.params.push_back((at::randn(shape, at::kDouble) * 0.3 + (norm ? 1 : 0)).to(inner));
  }
  if (sizes.padded) {
    const at::Tensor mask = at::rand({sizes.batch, sizes.tokens}).gt(0.3);
    mask.select(0, 0).fill_(false);  // a sequence of nothing but padding
    p.args.pad_mask = mask.to(at::kByte);
    // Nobody reads what stands at a pad.
    p.args.x.masked_fill_(mask.logical_not().unsqueeze(-1), NAN);
    p.from.dy.masked_fill_(mask.logical_not().unsqueeze(-1), NAN);
  }
  const graft_plan_out plan = pair.mixer.plan(sizes.batch, sizes.tokens, type, true);
  for (uint32_t i = 0; i < plan.n_state; ++i) {
    const at::IntArrayRef shape(plan.state[i]->shape, static_cast<size_t>(plan.state[i]->ndim));
    const bool position = mixers::torch_type(plan.state[i]->dtype) == at::kLong;
    if (sizes.with_state)
      p.args.state.push_back(position ? at::randint(0, 50, shape, at::kLong)
                                      : at::randn(shape, at::kDouble).to(inner));
    p.from.dstate.push_back(position ? at::Tensor() : at::randn(shape, at::kDouble).to(inner));
  }
  for (uint32_t i = 0; i < plan.n_taps; ++i) {
    const at::IntArrayRef shape(plan.taps[i]->shape, static_cast<size_t>(plan.taps[i]->ndim));
    p.from.dtaps.push_back(at::randn(shape, at::kDouble).to(type));
  }
  p.args.training = true;
  return p;
}

struct Reference {
  at::Tensor y;
  std::vector<at::Tensor> state, taps;
  at::Tensor dx;
  std::vector<at::Tensor> dparams, dstate;
};

std::vector<at::Tensor*> slots(const BlockOptions& o, torch_block::BlockState& state) {
  std::vector<at::Tensor*> out{&state.s};
  if (o.short_conv > 0) out.insert(out.end(), {&state.q_tail, &state.k_tail, &state.v_tail});
  if (o.rope.exists()) out.push_back(&state.next_position);
  return out;
}

// In float64 whatever the problem's type: what is left is the plugin's own rounding.
Reference reference(Pair& pair, const Problem& p) {
  const auto leaf = [](const at::Tensor& x) {
    return x.to(at::kDouble).detach().clone().requires_grad_(true);
  };
  torch_block::BlockInput in;
  at::Tensor dy = p.from.dy.to(at::kDouble);
  in.x = p.args.x.to(at::kDouble);
  if (p.args.pad_mask.defined()) {
    in.pad_mask = p.args.pad_mask.ne(0);
    in.x = in.x.masked_fill(in.pad_mask.logical_not().unsqueeze(-1), 0);
    dy = dy.masked_fill(in.pad_mask.logical_not().unsqueeze(-1), 0);
  }
  in.x = leaf(in.x);
  std::vector<at::Tensor> leaves{in.x};
  for (const at::Tensor& param : p.args.params) leaves.push_back(leaf(param));
  const auto slots_in = slots(pair.options, in.state);
  for (size_t i = 0; i < p.args.state.size(); ++i) {
    *slots_in[i] = is_position(p.args.state[i]) ? p.args.state[i] : leaf(p.args.state[i]);
    if (!is_position(p.args.state[i])) leaves.push_back(*slots_in[i]);
  }
  torch_block::BlockOutput out = gdn_block(in, pair.options, [&](std::string_view name) {
    for (size_t i = 0; i < p.args.params.size(); ++i) {
      if (name == pair.mixer.specs()[i]->name) return leaves[1 + i];
    }
    throw std::logic_error("no parameter of that name");
  });
  Reference r{out.y, {}, {out.head_output, out.pre_output, out.g, out.beta}, {}, {}, {}};
  at::Tensor loss = (out.y * dy).sum();
  for (at::Tensor* state : slots(pair.options, out.state)) r.state.push_back(*state);
  for (size_t i = 0; i < r.state.size(); ++i) {
    if (p.from.dstate[i].defined()) loss = loss + (r.state[i] * p.from.dstate[i]).sum();
  }
  for (size_t i = 0; i < r.taps.size(); ++i) loss = loss + (r.taps[i] * p.from.dtaps[i]).sum();
  const auto grads = torch::autograd::grad({loss}, leaves, {}, std::nullopt, false, true);
  r.dx = grads[0];
  size_t next = 1;
  for (; next <= p.args.params.size(); ++next) r.dparams.push_back(grads[next]);
  for (; next < grads.size(); ++next) r.dstate.push_back(grads[next]);
  return r;
}

void expect_equal(Pair& pair, const Problem& p, double tolerance, const std::string& what) {
  const Reference want = reference(pair, p);
  const ForwardResults got = pair.mixer.forward(p.args);
  EXPECT_LE(error(got.y, want.y), tolerance) << what << " y";
  for (size_t i = 0; i < want.taps.size(); ++i)
    EXPECT_LE(error(got.taps[i], want.taps[i]), tolerance) << what << " tap " << i;
  for (size_t i = 0; i < want.state.size(); ++i)
    EXPECT_LE(error(got.state[i], want.state[i]), tolerance) << what << " state " << i;
  const BackwardResults d = pair.mixer.backward(p.args, got, p.from);
  EXPECT_LE(error(d.dx, want.dx), tolerance) << what << " dx";
  for (size_t i = 0; i < want.dparams.size(); ++i) {
    const at::Tensor expected =
        want.dparams[i].defined() ? want.dparams[i] : at::zeros_like(p.args.params[i]);
    EXPECT_LE(error(d.dparams[i], expected), tolerance)
        << what << " d" << pair.mixer.specs()[i]->name;
  }
  for (size_t i = 0; i < want.dstate.size(); ++i)
    EXPECT_LE(error(d.dstate[i], want.dstate[i]), tolerance) << what << " dstate " << i;
}

TEST(GdnBlock, EqualsTheBlockOfLibTorchOperations) {
  const std::vector<OptionMap> all = settings();
  for (size_t s = 0; s < all.size(); ++s) {
    Pair pair(all[s]);
    for (const auto& [type, tolerance] :
         {std::pair(at::kDouble, 1e-10), {at::kFloat, 1e-4}, {at::kBFloat16, 0.02}}) {
      for (const Sizes& sizes : {Sizes{1, 1, false, false},
                                 {2, 15, false, true},
                                 {2, 16, true, false},
                                 {3, 17, true, true},
                                 {2, 65, true, true},
                                 {1, 130, false, false}}) {
        at::manual_seed(static_cast<uint64_t>(100 * s) + static_cast<uint64_t>(sizes.tokens));
        const std::string what = "setting " + std::to_string(s) + " T" +
                                 std::to_string(sizes.tokens) + " " + at::toString(type);
        expect_equal(pair, make_problem(pair, sizes, type), tolerance, what);
      }
    }
  }
}

}  // namespace
}  // namespace graft::gdn
