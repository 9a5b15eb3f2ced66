#include "gdn_mixer.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "gdn_options.h"
#include "natural.h"

namespace graft::gdn {

using mixers::entry;
using mixers::numbers;
using sdk::cat;
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

// Axes of the kept activations, by Activation.
struct KeptTensor {
  const char *name, *doc;
};
constexpr std::array<KeptTensor, kActivations> kKeptTensors = {
    {{"q", "output of q_proj"},
     {"k", "output of k_proj"},
     {"v", "output of v_proj"},
     {"gate", "output of g_proj"},
     {"decay", "output of a_proj"},
     {"write", "output of b_proj"},
     {"head", "what the recurrence gives"},
     {"errors", "v - S^T k of each token"},
     {"borders", "the state at the start of each chunk"}}};

}  // namespace

GatedDeltaNet::GatedDeltaNet(const sdk::LayerInfo& layer, const sdk::Config& config)
    : options_(block_options(layer, config)), recompute_(config.get<bool>("recompute")) {}

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
  for (std::size_t i = 0; i < kParams; ++i) {
    const auto found = specs.find(kParamNames[i]);
    param_index_[i] = found ? static_cast<int64_t>(*found) : -1;
  }
}

void GatedDeltaNet::sizes(const graft_plan_in& in, sdk::Plan& plan) {
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
  const bool narrow = sdk::same_dtype(in.dtype, sdk::bfloat16),
             training = (in.flags & GRAFT_X_TRAINING) != 0;
  const bool keep = training && !recompute_;
  for (std::size_t i = 0; i < kActivations && keep; ++i) {
    const int64_t size = activation_size(o, in.batch, in.tokens, i), rows = in.batch * in.tokens;
    const KeptTensor& tensor = kKeptTensors[i];
    if (i == kBorders) {
      plan.saved.add(tensor.name, "states,key,value",
                     {size / (o.key_dim * o.value_dim), o.key_dim, o.value_dim}, inner, tensor.doc);
    } else if (i != kGate || o.output_gate) {
      plan.saved.add(tensor.name, "batch,tokens,channels",
                     {in.batch, in.tokens, rows == 0 ? 0 : size / rows}, inner, tensor.doc);
    }
  }
  const auto bytes = [&]<class T>(T) {
    // A forward with TRAINING may turn out to be an inference.
    plan.workspace_forward = forward_workspace<T>(o, in.batch, in.tokens, false, narrow);
    if (keep)
      plan.workspace_forward = std::max(plan.workspace_forward,
                                        forward_workspace<T>(o, in.batch, in.tokens, true, narrow));
    if (training)
      plan.workspace_backward = backward_workspace<T>(o, in.batch, in.tokens, keep, narrow);
    plan.workspace_step = forward_workspace<T>(o, in.batch, 1, false, narrow);
  };
  if (sdk::same_dtype(inner, sdk::float64)) {
    bytes(double{});
  } else {
    bytes(float{});
  }
}

// The states of a plan, in the order in which they were declared.
template <class T>
BlockState<T> GatedDeltaNet::state_of(DLTensor* const* tensors) const {
  BlockState<T> state;
  state.s = numbers<T>(entry(tensors, 0));
  for (std::size_t s = 0; s < 3 && options_.short_conv > 0; ++s)
    state.tails[s] = numbers<T>(entry(tensors, 1 + s));
  return state;
}

template <class T>
BlockForward<T> GatedDeltaNet::block_call(const graft_mixer_forward& call, bool keep) const {
  BlockForward<T> block;
  block.tokens = mixers::tokens_of(call);
  block.x = call.x;
  for (std::size_t i = 0; i < kParams; ++i) {
    if (param_index_[i] >= 0) block.params[i] = numbers<const T>(call.params[param_index_[i]]);
  }
  const BlockState<T> in = state_of<T>(const_cast<DLTensor* const*>(call.state_in));
  block.state_in = {in.s, {in.tails[0], in.tails[1], in.tails[2]}};
  block.state_out = state_of<T>(call.state_out);
  if (options_.rope.exists()) {
    const std::size_t last = options_.short_conv > 0 ? 4 : 1;
    block.next_in = numbers<const int64_t>(entry(call.state_in, last));
    block.next_out = numbers<int64_t>(entry(call.state_out, last));
  }
  block.y = call.y;
  for (std::size_t i = 0; i < kTaps; ++i) block.taps[i] = entry(call.taps, i);
  block.keep = keep;
  std::size_t next = 0;
  for (std::size_t i = 0; i < kActivations && keep; ++i) {
    if (i != kGate || options_.output_gate) block.kept[i] = numbers<T>(call.saved[next++]);
  }
  return block;
}

template <class T>
BlockBackward<T> GatedDeltaNet::block_call(const graft_exec& exec,
                                           const graft_mixer_backward& call) const {
  BlockBackward<T> block;
  block.forward = block_call<T>(*call.fwd, !planned().saved.empty());
  block.dy = call.dy;
  for (std::size_t i = 0; i < kTaps; ++i) block.dtaps[i] = entry(call.dtaps, i);
  const BlockState<T> out = state_of<T>(const_cast<DLTensor* const*>(call.dstate_out));
  block.d_state_out = {out.s, {out.tails[0], out.tails[1], out.tails[2]}};
  block.d_state_in = state_of<T>(call.dstate_in);
  block.dx = call.dx;
  for (std::size_t i = 0; i < kParams; ++i) {
    if (param_index_[i] >= 0)
      block.dparams[i] = numbers<T>(entry(call.dparams, static_cast<std::size_t>(param_index_[i])));
  }
  block.accumulate = (exec.flags & GRAFT_X_ACCUMULATE) != 0;
  return block;
}

void GatedDeltaNet::forward(const graft_exec& exec, const graft_mixer_forward& call) {
  check_forward(exec, call, options_.model_dim, planned().workspace_forward);
  const bool keep = keeps(exec, call);
  if (is_double()) {
    block_forward(options_, block_call<double>(call, keep), exec.workspace);
  } else {
    block_forward(options_, block_call<float>(call, keep), exec.workspace);
  }
}

void GatedDeltaNet::step(const graft_exec& exec, const graft_mixer_forward& call) {
  check_forward(exec, call, options_.model_dim, planned().workspace_step);
  if (call.x->shape[1] != 1)
    throw Status(GRAFT_INVALID_ARGUMENT, "tensor:x",
                 cat("a step takes one token, got ", call.x->shape[1]));
  if (is_double()) {
    block_forward(options_, block_call<double>(call, false), exec.workspace);
  } else {
    block_forward(options_, block_call<float>(call, false), exec.workspace);
  }
}

void GatedDeltaNet::backward(const graft_exec& exec, const graft_mixer_backward& call) {
  check_backward(exec, call, options_.model_dim);
  if (is_double()) {
    block_backward(options_, block_call<double>(exec, call), exec.workspace);
  } else {
    block_backward(options_, block_call<float>(exec, call), exec.workspace);
  }
}

}  // namespace graft::gdn
