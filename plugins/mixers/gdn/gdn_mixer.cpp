#include "gdn_mixer.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "gdn_options.h"
#include "natural.h"

namespace graft::gdn {

using sdk::cat;
using sdk::ParamSpec;
using sdk::ParamSpecs;
using sdk::Status;

namespace {

// The deviation of the prototype's and fla's fresh projections.
constexpr double kProjectionDeviation = 0.02;

int32_t narrow(int64_t n) { return static_cast<int32_t>(n); }

// Adds "<name>.weight" and, where asked, "<name>.bias" of a projection from the model to heads.
struct Projection {
  ParamSpecs& specs;
  const BlockOptions& o;

  void add(const std::string& name, const std::string& role, const std::string& rows, int64_t width,
           bool bias, const std::string& domain, const std::string& doc) const {
    specs.add(name + ".weight", role, rows + ",model", {o.heads * width, o.model_dim})
        .heads(narrow(o.heads), narrow(width))
        .domain(domain)
        .normal(0, kProjectionDeviation)
        .doc(doc);
    if (!bias) return;
    specs.add(name + ".bias", role + "-bias", rows, {o.heads * width})
        .heads(narrow(o.heads), narrow(width))
        .domain(domain)
        .no_decay()
        .doc(doc + ", bias");
  }
};

void add_streams(ParamSpecs& specs, const BlockOptions& o) {
  const Projection projection{specs, o};
  projection.add("q_proj", GRAFT_ROLE_QUERY, "heads*key", o.key_dim, o.qkv_bias, "", "queries");
  projection.add("k_proj", GRAFT_ROLE_KEY, "heads*key", o.key_dim, o.qkv_bias, "", "keys");
  projection.add("v_proj", GRAFT_ROLE_VALUE, "heads*value", o.value_dim, o.qkv_bias, "", "values");
  if (o.qk_norm) {
    specs.add("q_norm.weight", GRAFT_ROLE_QUERY_NORM, "key", {o.key_dim})
        .ones()
        .no_decay()
        .doc("RMSNorm of a query head");
    specs.add("k_norm.weight", GRAFT_ROLE_KEY_NORM, "key", {o.key_dim})
        .ones()
        .no_decay()
        .doc("RMSNorm of a key head");
  }
  if (o.short_conv == 0) return;
  // As LibTorch starts a convolution with one input channel per group.
  const double bound = 1.0 / std::sqrt(static_cast<double>(o.short_conv));
  for (const auto& [stream, role, axis, width] :
       {std::tuple("q", GRAFT_ROLE_SHORT_CONV_Q, "heads*key", o.key_dim),
        {"k", GRAFT_ROLE_SHORT_CONV_K, "heads*key", o.key_dim},
        {"v", GRAFT_ROLE_SHORT_CONV_V, "heads*value", o.value_dim}}) {
    const std::string name = cat(stream, "_conv1d");
    specs.add(name + ".weight", role, cat(axis, ",one,kernel"), {o.heads * width, 1, o.short_conv})
        .heads(narrow(o.heads), narrow(width))
        .uniform(-bound, bound)
        .doc(cat("causal depthwise conv on ", stream, "; the last tap is the current token"));
    if (!o.conv_bias) continue;
    specs.add(name + ".bias", cat(role, "-bias"), axis, {o.heads * width})
        .heads(narrow(o.heads), narrow(width))
        .no_decay()
        .doc(cat("causal depthwise conv on ", stream, ", bias"));
  }
}

void add_gates(ParamSpecs& specs, const BlockOptions& o) {
  const Projection projection{specs, o};
  projection.add("a_proj", GRAFT_ROLE_DECAY_GATE, "heads", 1, false, "softplus-inv",
                 "decay gate dt before softplus");
  projection.add("b_proj", GRAFT_ROLE_WRITE_GATE, "heads", 1, o.write_gate_bias, "logit",
                 "write gate beta before sigmoid");
  // fla draws exp(A_log) uniformly from (0, 16) and softplus(dt_bias) log-uniformly from [0.001,
  // 0.1]; these are the nearest uniform distributions of the raw values: exp(A_log) in [1, 16], and
  // softplus^-1(y) = log(expm1(y)).
  specs.add("A_log", GRAFT_ROLE_DECAY_SCALE, "heads", {o.heads})
      .heads(narrow(o.heads), 1)
      .domain("log")
      .uniform(0, std::log(16.0))
      .fp32()
      .no_decay()
      .doc("log of the factor of the decay gate");
  specs.add("dt_bias", GRAFT_ROLE_DECAY_GATE_BIAS, "heads", {o.heads})
      .heads(narrow(o.heads), 1)
      .domain("softplus-inv")
      .uniform(mixers::softplus_inverse(0.001), mixers::softplus_inverse(0.1))
      .fp32()
      .no_decay()
      .doc("decay gate, bias");
}

void add_output(ParamSpecs& specs, const BlockOptions& o) {
  if (o.output_gate) {
    Projection{specs, o}.add("g_proj", GRAFT_ROLE_OUTPUT_GATE, "heads*value", o.value_dim,
                             o.output_gate_bias, "silu-inv", "output gate before silu");
  }
  if (o.output_norm) {
    specs.add("o_norm.weight", GRAFT_ROLE_NORM, "value", {o.value_dim})
        .ones()
        .no_decay()
        .doc("RMSNorm of a head's output");
  }
  specs
      .add("o_proj.weight", GRAFT_ROLE_OUTPUT, "model,heads*value",
           {o.model_dim, o.heads * o.value_dim})
      .heads(narrow(o.heads), narrow(o.value_dim))
      .normal(0, kProjectionDeviation)
      .doc("output projection");
  if (o.o_bias) {
    specs.add("o_proj.bias", GRAFT_ROLE_OUTPUT_BIAS, "model", {o.model_dim})
        .no_decay()
        .doc("output projection, bias");
  }
}

// The states of a plan, in the order in which they were declared.
struct StateList {
  const BlockOptions& o;

  BlockState read(const std::vector<at::Tensor>& given) const {
    BlockState state;
    if (given.empty()) return state;
    std::size_t i = 0;
    for (at::Tensor* tensor : slots(state)) *tensor = given.at(i++);
    return state;
  }
  std::vector<at::Tensor> write(BlockState state) const {
    std::vector<at::Tensor> out;
    for (at::Tensor* tensor : slots(state)) out.push_back(*tensor);
    return out;
  }
  std::vector<at::Tensor*> slots(BlockState& state) const {
    std::vector<at::Tensor*> out{&state.s};
    if (o.short_conv > 0) out.insert(out.end(), {&state.q_tail, &state.k_tail, &state.v_tail});
    if (o.rope.exists()) out.push_back(&state.next_position);
    return out;
  }
};

}  // namespace

GatedDeltaNet::GatedDeltaNet(const sdk::LayerInfo& layer, const sdk::Config& config)
    : TorchMixer(config.get<bool>("recompute") ? sdk::Activations::recomputed
                                               : sdk::Activations::kept),
      options_(block_options(layer, config)) {}

sdk::Description GatedDeltaNet::describe() {
  return {.id = "org.graft.gdn",
          .alias = "gdn",
          .name = "Gated DeltaNet",
          .version = "0.1.0",
          .license = "Apache-2.0",
          .citation = "https://arxiv.org/abs/2412.06464",
          .description =
              "Gated delta rule: a fixed-size state per head that decays, and unlearns what it "
              "overwrites",
          .caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO | GRAFT_CAP_PAD_MASK |
                  GRAFT_CAP_STRIDED | GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_STATEFUL_GRAD |
                  GRAFT_CAP_TAPS_ONLY,
          .param_schema = 1,
          .options = option_schema(),
          .dtypes = {sdk::float32, sdk::float64, sdk::bfloat16},
          .devices = {kDLCPU}};
}

void GatedDeltaNet::param_specs(ParamSpecs& specs) {
  add_streams(specs, options_);
  add_gates(specs, options_);
  add_output(specs, options_);
}

void GatedDeltaNet::tensors(const graft_plan_in& in, sdk::Plan& plan) {
  const BlockOptions& o = options_;
  const DLDataType inner = sdk::same_dtype(in.dtype, sdk::float64) ? sdk::float64 : sdk::float32;
  plan.state.add("state", "batch,heads,key,value", {in.batch, o.heads, o.key_dim, o.value_dim},
                 inner, "S of the delta rule");
  if (o.short_conv > 0) {
    for (const auto& [name, width] : {std::pair("q_conv_tail", o.key_dim),
                                      {"k_conv_tail", o.key_dim},
                                      {"v_conv_tail", o.value_dim}}) {
      plan.state.add(name, "batch,kernel-1,channels", {in.batch, o.short_conv - 1, o.heads * width},
                     inner, "the short conv's last inputs");
    }
  }
  if (o.rope.exists()) {
    plan.state.add("next_position", "batch", {in.batch}, sdk::int64,
                   "position of the next token when the call gives no positions");
  }
  plan.taps.add(GRAFT_TAP_HEAD_OUTPUT, "batch,tokens,heads,value",
                {in.batch, in.tokens, o.heads, o.value_dim}, in.dtype, "what the recurrence gives");
  plan.taps.add(GRAFT_TAP_PRE_OUTPUT, "batch,tokens,heads*value",
                {in.batch, in.tokens, o.heads * o.value_dim}, in.dtype,
                "after norm and gate, before the output projection");
  plan.taps.add(GRAFT_TAP_LOG_DECAY, "batch,tokens,heads", {in.batch, in.tokens, o.heads}, in.dtype,
                "g");
  plan.taps.add(GRAFT_TAP_WRITE_GATE, "batch,tokens,heads", {in.batch, in.tokens, o.heads},
                in.dtype, "beta");
}

sdk::TorchOutput GatedDeltaNet::compute(const sdk::TorchInput& in) {
  if (in.x.size(2) != options_.model_dim) {
    throw Status(GRAFT_INVALID_ARGUMENT, "tensor:x",
                 cat("expected shape [", in.x.size(0), ", ", in.x.size(1), ", ", options_.model_dim,
                     "], got ", sdk::shape_string(in.x.sizes())));
  }
  const StateList states{options_};
  const BlockOutput out =
      gdn_block({in.x, states.read(in.state), in.positions, in.pad_mask, in.want_y,
                 /*want_pre_output=*/in.want_tap(1)},
                options_, [&](std::string_view name) { return in.param(name); });
  return {out.y, states.write(out.state), {out.head_output, out.pre_output, out.g, out.beta}};
}

}  // namespace graft::gdn
