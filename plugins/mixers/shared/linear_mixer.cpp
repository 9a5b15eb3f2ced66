#include "linear_mixer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "mixer_options.h"
#include "natural.h"

namespace graft::mixers {

using sdk::cat;
using sdk::Option;
using sdk::ParamSpec;
using sdk::ParamSpecs;
using sdk::Status;

namespace {

// As fla starts fresh projections.
constexpr double kProjectionDeviation = 0.02;

// exp(A_log) dt of a state that halves in 760 tokens: close to no decay, yet with a gradient that
// AdamW does not lose in its eps.
constexpr double kDefaultDecayScale = -7;
// 1 - exp(-exp(-30)) is 0 in float32: no decay.
constexpr double kNoDecayScale = -30;

int32_t narrow(int64_t n) { return static_cast<int32_t>(n); }

struct SpecWriter {
  ParamSpecs& specs;
  const LinearBlockOptions& o;

  void projection(const std::string& name, const std::string& role, int64_t heads, bool bias,
                  const std::string& doc) const {
    specs.add(name + ".weight", role, "heads*key,model", {heads * o.head_dim, o.model_dim})
        .heads(narrow(heads), narrow(o.head_dim))
        .normal(0, kProjectionDeviation)
        .doc(doc);
    if (!bias) return;
    specs.add(name + ".bias", role + "-bias", "heads*key", {heads * o.head_dim})
        .heads(narrow(heads), narrow(o.head_dim))
        .no_decay()
        .doc(doc + ", bias");
  }

  void norm(const std::string& name, const std::string& role, const std::string& doc) const {
    specs.add(name, role, "key", {o.head_dim}).ones().no_decay().doc(doc);
  }

  void conv(const std::string& stream, const std::string& role, int64_t heads) const {
    const int64_t channels = heads * o.head_dim;
    specs.add(stream + "_conv1d.weight", role, "heads*key,one,kernel", {channels, 1, o.short_conv})
        .heads(narrow(heads), narrow(o.head_dim))
        .domain("residual")
        .doc(cat("causal depthwise conv on ", stream,
                 ", less the identity kernel; the last tap is the current token"));
    if (!o.conv_bias) return;
    specs.add(stream + "_conv1d.bias", role + "-bias", "heads*key", {channels})
        .heads(narrow(heads), narrow(o.head_dim))
        .no_decay()
        .doc(cat("causal depthwise conv on ", stream, ", bias"));
  }

  void feature_map(const std::string& stream, const std::string& role) const {
    const std::string name = "feature_map_" + stream;
    specs.add(name + ".weight", role, "heads,feature,key", {o.heads, o.feature_dim, o.head_dim})
        .heads(narrow(o.heads), narrow(o.feature_dim))
        .eye()
        .no_decay()
        .doc(cat("feature map of ", stream, " before its softmax"));
    specs.add(name + ".bias", role + "-bias", "heads,feature", {o.heads, o.feature_dim})
        .heads(narrow(o.heads), narrow(o.feature_dim))
        .no_decay()
        .doc(cat("feature map of ", stream, ", bias"));
  }

  void decay() const {
    specs.add("dt_proj.weight", GRAFT_ROLE_DECAY_GATE, "heads,model", {o.heads, o.model_dim})
        .heads(narrow(o.heads), 1)
        .domain("softplus-inv")
        .doc("dt before softplus: strength of a write, and of the decay before it");
    specs.add("dt_bias", GRAFT_ROLE_DECAY_GATE_BIAS, "heads", {o.heads})
        .heads(narrow(o.heads), 1)
        .domain("softplus-inv")
        .constant(softplus_inverse(1))
        .fp32()
        .no_decay()
        .doc("dt, bias");
    specs.add("A_log", GRAFT_ROLE_DECAY_SCALE, "heads", {o.heads})
        .heads(narrow(o.heads), 1)
        .domain("log")
        .constant(kDefaultDecayScale)
        .fp32()
        .no_decay()
        .doc("log of the decay's factor of dt");
  }

  void gate() const {
    specs
        .add("g_proj.weight", GRAFT_ROLE_OUTPUT_GATE, "heads*value,model",
             {o.heads * o.head_dim, o.model_dim})
        .heads(narrow(o.heads), narrow(o.head_dim))
        .domain("silu-inv")
        .doc("output gate before silu");
    specs.add("g_proj.bias", GRAFT_ROLE_OUTPUT_GATE_BIAS, "heads*value", {o.heads * o.head_dim})
        .heads(narrow(o.heads), narrow(o.head_dim))
        .domain("silu-inv")
        .constant(silu_inverse(1))
        .no_decay()
        .doc("output gate, bias");
  }

  void output() const {
    specs
        .add("o_proj.weight", GRAFT_ROLE_OUTPUT, "model,heads*value",
             {o.model_dim, o.heads * o.head_dim})
        .heads(narrow(o.heads), narrow(o.head_dim))
        .normal(0, kProjectionDeviation)
        .doc("output projection");
    if (!o.o_bias) return;
    specs.add("o_proj.bias", GRAFT_ROLE_OUTPUT_BIAS, "model", {o.model_dim})
        .no_decay()
        .doc("output projection, bias");
  }
};

// The states of a plan, in the order in which they were declared.
struct StateList {
  const LinearBlockOptions& o;

  LinearBlockState read(const std::vector<at::Tensor>& given) const {
    LinearBlockState state;
    if (given.empty()) return state;
    std::size_t i = 0;
    for (at::Tensor* tensor : slots(state)) *tensor = given.at(i++);
    return state;
  }
  std::vector<at::Tensor> write(LinearBlockState state) const {
    std::vector<at::Tensor> out;
    for (at::Tensor* tensor : slots(state)) out.push_back(*tensor);
    return out;
  }
  std::vector<at::Tensor*> slots(LinearBlockState& state) const {
    std::vector<at::Tensor*> out{&state.s};
    if (o.short_conv > 0) out.insert(out.end(), {&state.q_tail, &state.k_tail, &state.v_tail});
    if (o.rope.exists()) out.push_back(&state.next_position);
    return out;
  }
};

void read_sizes(const sdk::LayerInfo& layer, const sdk::Config& config, LinearBlockOptions& o) {
  o.model_dim = layer.model_dim;
  o.heads = layer.n_heads;
  o.kv_heads = layer.n_kv_heads;
  o.head_dim = layer.head_dim;
  if (o.model_dim <= 0 || o.heads <= 0 || o.head_dim <= 0 || o.kv_heads <= 0 ||
      o.heads % o.kv_heads != 0) {
    throw Status(GRAFT_INVALID_ARGUMENT, "layer",
                 cat("the layer's sizes must be positive and its heads a multiple of its key-value "
                     "heads, got model_dim ",
                     o.model_dim, ", ", o.heads, " heads of ", o.head_dim, ", ", o.kv_heads,
                     " key-value heads"));
  }
  o.feature_dim = config.get<int64_t>("feature_dim");
  if (o.feature_dim == 0) o.feature_dim = o.head_dim;
}

}  // namespace

std::vector<Option> linear_option_schema() {
  return {
      Option::boolean("rope", true,
                      "keep the teacher's RoPE on queries and keys, where it has one"),
      follow_option("qk_norm",
                    "RMSNorm of each query and key head; auto: where the teacher has it"),
      follow_option("qkv_bias", "bias of the q, k, v projections; auto: where the teacher has it"),
      follow_option("o_bias", "bias of the output projection; auto: where the teacher has it"),
      Option::integer("feature_dim", 0,
                      "rows of each feature map, which gives twice as many features; 0: head_dim")
          .range(0, 1024)
          .shapes(),
      Option::real("feature_floor", 1e-12, "least value of a feature").range(0.0, 1e-3),
      Option::real("eps", 1e-20, "added to the normaliser").range(1e-30, 1e-3),
      Option::integer("chunk_size", 64, "tokens per chunk; results differ by rounding only")
          .range(1, 512),
      recompute_option(),
  };
}

LinearBlockOptions linear_block_options(const sdk::LayerInfo& layer, const sdk::Config& config) {
  LinearBlockOptions o;
  read_sizes(layer, config, o);
  // A teacher without RoPE (rope_theta 0) has none to keep.
  if (config.get<bool>("rope") && !layer.rope_inv_freq.empty())
    o.rope = teachers_rope(layer, o.head_dim);
  o.qk_norm = follows(config, "qk_norm", layer.has(GRAFT_LAYER_QK_NORM));
  o.qk_norm_eps = qk_norm_eps(layer);
  o.qkv_bias = follows(config, "qkv_bias", layer.has(GRAFT_LAYER_QKV_BIAS));
  o.o_bias = follows(config, "o_bias", layer.has(GRAFT_LAYER_O_BIAS));
  o.feature_floor = config.get<double>("feature_floor");
  o.eps = config.get<double>("eps");
  o.chunk = config.get<int64_t>("chunk_size");
  return o;
}

LinearMixer::LinearMixer(const LinearBlockOptions& options, bool recompute)
    : TorchMixer(recompute ? sdk::Activations::recomputed : sdk::Activations::kept),
      options_(options) {}

sdk::Description LinearMixer::describe_common() {
  return {.version = "0.1.0",
          .license = "Apache-2.0",
          .caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO | GRAFT_CAP_PAD_MASK |
                  GRAFT_CAP_STRIDED | GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_STATEFUL_GRAD,
          .param_schema = 1,
          .dtypes = {sdk::float32, sdk::float64, sdk::bfloat16},
          .devices = {kDLCPU}};
}

void LinearMixer::param_specs(ParamSpecs& specs) {
  const LinearBlockOptions& o = options_;
  const SpecWriter writer{specs, o};
  writer.projection("q_proj", GRAFT_ROLE_QUERY, o.heads, o.qkv_bias, "queries");
  writer.projection("k_proj", GRAFT_ROLE_KEY, o.kv_heads, o.qkv_bias, "keys");
  writer.projection("v_proj", GRAFT_ROLE_VALUE, o.kv_heads, o.qkv_bias, "values");
  if (o.qk_norm) {
    writer.norm("q_norm.weight", GRAFT_ROLE_QUERY_NORM, "RMSNorm of a query head");
    writer.norm("k_norm.weight", GRAFT_ROLE_KEY_NORM, "RMSNorm of a key head");
  }
  if (o.short_conv > 0) {
    writer.conv("q", GRAFT_ROLE_SHORT_CONV_Q, o.heads);
    writer.conv("k", GRAFT_ROLE_SHORT_CONV_K, o.kv_heads);
    writer.conv("v", GRAFT_ROLE_SHORT_CONV_V, o.kv_heads);
  }
  writer.feature_map("q", GRAFT_ROLE_FEATURE_MAP_Q);
  writer.feature_map("k", GRAFT_ROLE_FEATURE_MAP_K);
  if (o.decay) writer.decay();
  if (o.output_gate) writer.gate();
  writer.output();
}

void LinearMixer::tensors(const graft_plan_in& in, sdk::Plan& plan) {
  const LinearBlockOptions& o = options_;
  const DLDataType inner = sdk::same_dtype(in.dtype, sdk::float64) ? sdk::float64 : sdk::float32;
  plan.state.add("state", "batch,heads,feature,value+1",
                 {in.batch, o.heads, o.features(), o.head_dim + 1}, inner,
                 "sum of features times (value, 1)");
  if (o.short_conv > 0) {
    for (const auto& [name, heads] : {std::pair("q_conv_tail", o.heads),
                                      {"k_conv_tail", o.kv_heads},
                                      {"v_conv_tail", o.kv_heads}}) {
      plan.state.add(name, "batch,kernel-1,channels",
                     {in.batch, o.short_conv - 1, heads * o.head_dim}, inner,
                     "the short conv's last inputs");
    }
  }
  if (o.rope.exists()) {
    plan.state.add("next_position", "batch", {in.batch}, sdk::int64,
                   "position of the next token when the call gives no positions");
  }
  plan.taps.add(GRAFT_TAP_HEAD_OUTPUT, "batch,tokens,heads,value",
                {in.batch, in.tokens, o.heads, o.head_dim}, in.dtype, "what the recurrence gives");
  plan.taps.add(GRAFT_TAP_PRE_OUTPUT, "batch,tokens,heads*value",
                {in.batch, in.tokens, o.heads * o.head_dim}, in.dtype,
                "after the gate, before the output projection");
  if (!o.decay) return;
  plan.taps.add(GRAFT_TAP_LOG_DECAY, "batch,tokens,heads", {in.batch, in.tokens, o.heads}, in.dtype,
                "-exp(A_log) dt");
  plan.taps.add(GRAFT_TAP_WRITE_GATE, "batch,tokens,heads", {in.batch, in.tokens, o.heads},
                in.dtype, "dt");
}

sdk::TorchOutput LinearMixer::compute(const sdk::TorchInput& in) {
  if (in.x.size(2) != options_.model_dim) {
    throw Status(GRAFT_INVALID_ARGUMENT, "tensor:x",
                 cat("expected shape [", in.x.size(0), ", ", in.x.size(1), ", ", options_.model_dim,
                     "], got ", sdk::shape_string(in.x.sizes())));
  }
  const StateList states{options_};
  const LinearBlockOutput out =
      linear_block({{in.x, in.positions, in.pad_mask, {}}, states.read(in.state)}, options_,
                   [&](std::string_view name) { return in.param(name); });
  std::vector<at::Tensor> taps{out.head_output, out.pre_output};
  if (options_.decay) taps.insert(taps.end(), {out.g, out.dt});
  return {out.y, states.write(out.state), std::move(taps)};
}

// ------------------------------------------------------------------ natural values

// dt = 1 and exp(-exp(A_log)) = 2^{-1/half-life}.
void LinearMixer::set_half_life(std::span<const double> values, sdk::NaturalParams& params) const {
  check_range(GRAFT_NATURAL_HALF_LIFE, values, 1e-3, std::numeric_limits<double>::infinity());
  if (!options_.decay) {
    if (all_are(values, std::numeric_limits<double>::infinity())) return;
    impossible(GRAFT_NATURAL_HALF_LIFE, "this mixer does not forget: its half-life is infinite");
  }
  fill(params, "dt_proj.weight", 0);
  fill(params, "dt_bias", softplus_inverse(1));
  const auto raw = params.write("A_log");
  for (std::size_t h = 0; h < values.size(); ++h) {
    raw[h] = static_cast<float>(std::max(kNoDecayScale, std::log(std::log(2.0) / values[h])));
  }
}

void LinearMixer::set_write_gate(std::span<const double> values, sdk::NaturalParams& params) const {
  check_range(GRAFT_NATURAL_WRITE_GATE, values, 0, 1);
  if (!all_are(values, 1)) {
    impossible(
        GRAFT_NATURAL_WRITE_GATE,
        "values are averaged with weights that sum to 1, so a constant write gate other than "
        "1 would change nothing");
  }
  if (!options_.decay) return;
  // The half-life stays what it was at the bias's dt.
  const auto bias = params.read("dt_bias");
  const auto raw = params.write("A_log");
  for (std::size_t h = 0; h < values.size(); ++h) {
    const double dt = std::log1p(std::exp(static_cast<double>(bias[h])));
    raw[h] = static_cast<float>(std::max(kNoDecayScale, raw[h] + std::log(dt)));
  }
  fill(params, "dt_proj.weight", 0);
  fill(params, "dt_bias", softplus_inverse(1));
}

void LinearMixer::set_output_gate(std::span<const double> values,
                                  sdk::NaturalParams& params) const {
  if (!options_.output_gate) {
    if (all_are(values, 1)) return;
    impossible(GRAFT_NATURAL_OUTPUT_GATE, "without an output gate the factor is 1 and stays so");
  }
  check_range(GRAFT_NATURAL_OUTPUT_GATE, values, kSiluMinimum, 1e4);
  fill(params, "g_proj.weight", 0);
  set_silu_bias(params, "g_proj.bias", values, options_.head_dim);
}

void LinearMixer::set_natural(std::string_view what, std::span<const double> values,
                              sdk::NaturalParams& params) {
  check_head_count(what, values, options_.heads);
  if (what == GRAFT_NATURAL_HALF_LIFE) {
    set_half_life(values, params);
  } else if (what == GRAFT_NATURAL_WRITE_GATE) {
    set_write_gate(values, params);
  } else if (what == GRAFT_NATURAL_OUTPUT_GATE) {
    set_output_gate(values, params);
  } else {
    TorchMixer::set_natural(what, values, params);
  }
}

}  // namespace graft::mixers
