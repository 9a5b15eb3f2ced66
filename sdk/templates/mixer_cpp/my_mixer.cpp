// A token mixer with LibTorch: linear attention with a learned decay, of which only the forward
// pass is written; gradients come from autograd. Its heart is attend() below, three lines in their
// simplest form; all around it is what a mixer has to say of itself.
//
// Start here: change attend(), and declare what it needs in param_specs().
#include <algorithm>
#include <cmath>
#include <vector>

#include "graft/torch_mixer.hpp"

namespace {

namespace sdk = graft::sdk;

// A role of our own, under our own name: initializers that know it can look for it, all others
// leave the parameter at its start.
constexpr const char* kHeadScale = "org.example.role.head-scale";

class MyMixer final : public sdk::TorchMixer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.my-mixer";
    d.alias = "my_mixer";
    d.name = "My mixer";
    d.version = "0.1.0";
    d.license = "Apache-2.0";
    d.description = "linear attention with a decay for each head";
    d.caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO | GRAFT_CAP_STATEFUL_GRAD |
             GRAFT_CAP_PAD_MASK | GRAFT_CAP_STRIDED | GRAFT_CAP_DETERMINISTIC;
    d.dtypes = {sdk::float32, sdk::bfloat16, sdk::float64};
    d.options.push_back(
        sdk::Option::real("half_life", 64, "tokens until a head has forgotten half, at the start")
            .range(0.01, 1e6));
    d.options.push_back(
        sdk::Option::integer("chunk_size", 64, "tokens computed at once; the results are the same")
            .range(1, 4096));
    return d;
  }

  MyMixer(const sdk::LayerInfo& layer, const sdk::Config& config)
      : model_(layer.model_dim),
        heads_(layer.n_heads),
        dim_(layer.head_dim),
        half_life_(config.get<double>("half_life")),
        chunk_(config.get<int64_t>("chunk_size")) {
    if (model_ <= 0 || heads_ <= 0 || dim_ <= 0) {
      throw sdk::Status(
          GRAFT_INVALID_ARGUMENT, "layer",
          sdk::cat("expected sizes above 0, got ", heads_, " heads of ", dim_, " in ", model_));
    }
    if (!(half_life_ > 0)) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, "config.half_life",
                        sdk::cat("expected more than 0, got ", half_life_));
    }
  }

  // [params]
  void param_specs(sdk::ParamSpecs& specs) override {
    const auto n = static_cast<int32_t>(heads_), d = static_cast<int32_t>(dim_);
    const auto projection = [&](const char* name, const char* role) {
      specs.add(name, role, "heads*key,model", {heads_ * dim_, model_}).heads(n, d).normal(0, 0.02);
    };
    projection("q_proj.weight", GRAFT_ROLE_QUERY);
    projection("k_proj.weight", GRAFT_ROLE_KEY);
    projection("v_proj.weight", GRAFT_ROLE_VALUE);
    specs.add("o_proj.weight", GRAFT_ROLE_OUTPUT, "model,heads*value", {model_, heads_ * dim_})
        .heads(n, d)
        .normal(0, 0.02);
    specs.add("decay", GRAFT_ROLE_DECAY_GATE_BIAS, "heads", {heads_})
        .heads(n, 1)
        .domain("logit")
        .doc("what a head keeps from token to token, before the sigmoid")
        .constant(raw_decay(half_life_))
        .fp32()
        .no_decay();
    // [role]
    specs.add("head_scale", kHeadScale, "heads", {heads_})
        .heads(n, 1)
        .doc("factor of each head's output")
        .ones()
        .no_decay();
    // [/role]
  }
  // [/params]

  void tensors(const graft_plan_in& in, sdk::Plan& plan) override {
    plan.state.add("state", "batch,heads,key,value", {in.batch, heads_, dim_, dim_},
                   same_as_x(in.dtype), "sum of k v^T, decayed");
    plan.taps.add(GRAFT_TAP_HEAD_OUTPUT, "batch,tokens,heads,value",
                  {in.batch, in.tokens, heads_, dim_}, in.dtype, "before the heads' factors");
    plan.taps.add(GRAFT_TAP_PRE_OUTPUT, "batch,tokens,heads*value",
                  {in.batch, in.tokens, heads_ * dim_}, in.dtype, "before the output projection");
  }

  // [compute]
  sdk::TorchOutput compute(const sdk::TorchInput& in) override {
    if (in.x.size(2) != model_) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, "tensor:x",
                        sdk::cat("expected a width of ", model_, ", got ", in.x.size(2)));
    }
    const int64_t batch = in.x.size(0), tokens = in.x.size(1);
    const at::ScalarType type = in.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    // A padded token may hold anything, NaN too.
    const at::Tensor pads = in.pad_mask.defined() ? ~in.pad_mask.unsqueeze(-1) : at::Tensor();
    const at::Tensor x = pads.defined() ? in.x.masked_fill(pads, 0) : in.x;

    const auto heads = [&](const char* weight) {  // [B,H,T,dim]
      return at::linear(x, in.weight(weight))
          .to(type)
          .view({batch, tokens, heads_, dim_})
          .transpose(1, 2);
    };
    const at::Tensor q = heads("q_proj.weight") / std::sqrt(static_cast<double>(dim_));
    const at::Tensor k = heads("k_proj.weight"), v = heads("v_proj.weight");
    at::Tensor state = in.state.empty() ? at::zeros({batch, heads_, dim_, dim_}, q.options())
                                        : in.state[0].to(type);

    // Below this a decay is 0 in float64 too, and its logarithm still a number.
    at::Tensor log_decay =
        at::log_sigmoid(in.param("decay").to(type)).clamp_min(-700).view({heads_, 1});
    log_decay = log_decay.expand({batch, heads_, tokens});
    if (pads.defined()) log_decay = log_decay.masked_fill(pads.view({batch, 1, tokens}), 0);

    std::vector<at::Tensor> pieces;
    for (int64_t from = 0; from < tokens; from += chunk_) {
      const int64_t n = std::min(chunk_, tokens - from);
      const auto part = [&](const at::Tensor& u) { return u.narrow(2, from, n); };
      pieces.push_back(attend(part(q), part(k), part(v), part(log_decay), state));
    }
    at::Tensor o = pieces.empty() ? at::zeros_like(q) : at::cat(pieces, 2);
    o = o.transpose(1, 2);  // [B,T,H,dim]
    // Outputs at pads are 0, and a gradient that comes in there, maybe NaN, goes nowhere.
    if (pads.defined()) o = o.masked_fill(pads.unsqueeze(-1), 0);
    const at::Tensor scaled = (o * in.param("head_scale").to(type).view({heads_, 1}))
                                  .reshape({batch, tokens, heads_ * dim_})
                                  .to(in.x.scalar_type());
    at::Tensor y = at::linear(scaled, in.weight("o_proj.weight"));
    if (pads.defined()) y = y.masked_fill(pads, 0);
    return {.y = y, .state = {state}, .taps = {o, scaled}};
  }
  // [/compute]

  // "A half-life of 32 tokens", as initializers say it, in terms of our parameters.
  void set_natural(std::string_view what, std::span<const double> values,
                   sdk::NaturalParams& params) override {
    if (what != GRAFT_NATURAL_HALF_LIFE) return sdk::Mixer::set_natural(what, values, params);
    if (values.size() != static_cast<std::size_t>(heads_)) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, "natural:half-life",
                        sdk::cat("expected ", heads_, " values, got ", values.size()));
    }
    std::vector<float> raw;
    for (const double value : values) raw.push_back(static_cast<float>(raw_decay(value)));
    std::ranges::copy(raw, params.write("decay").begin());
  }

 private:
  static DLDataType same_as_x(DLDataType x) {
    return sdk::same_dtype(x, sdk::float64) ? sdk::float64 : sdk::float32;
  }

  // a = 2^(-1/half_life) = sigmoid(raw). Beyond 80 a is 1 (or 0) in float64 too, and a parameter is
  // always finite: an endless half-life is that.
  static double raw_decay(double half_life) {
    if (!(half_life > 0)) {
      throw sdk::Status(GRAFT_OUT_OF_RANGE, "natural:half-life",
                        sdk::cat("expected more than 0, got ", half_life));
    }
    const double forgotten = -std::expm1(-std::log(2.0) / half_life);  // 1 - a, exactly
    return std::clamp(std::log1p(-forgotten) - std::log(forgotten), -80.0, 80.0);
  }

  // Attention without the softmax over a chunk, and over all before it through the state.
  // q, k, v [B,H,T,dim]; log_decay [B,H,T]; state [B,H,dim,dim] becomes that after the chunk.
  // Without decay and state it would be
  //
  //   const at::Tensor scores = q.matmul(k.transpose(-1, -2)).tril();
  //   return scores.matmul(v);
  //
  // [attend]
  static at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& log_decay, at::Tensor& state) {
    const at::Tensor since_start = log_decay.cumsum(-1).unsqueeze(-1);  // [B,H,T,1]
    const at::Tensor until_end = since_start.narrow(2, q.size(2) - 1, 1) - since_start;
    // From token s to token t the state loses exp(since_start[t] - since_start[s]). Above the
    // diagonal that would overflow: it is cut off before exp(), not after.
    const at::Tensor between = (since_start - since_start.transpose(-1, -2)).tril().exp();
    const at::Tensor scores = (q.matmul(k.transpose(-1, -2)) * between).tril();
    const at::Tensor o = scores.matmul(v) + (q * since_start.exp()).matmul(state);
    state = state * since_start.narrow(2, q.size(2) - 1, 1).exp() +
            (k * until_end.exp()).transpose(-1, -2).matmul(v);
    return o;
  }
  // [/attend]

  int64_t model_, heads_, dim_;
  double half_life_;
  int64_t chunk_;
};

}  // namespace

GRAFT_DEFINE_PLUGIN((sdk::LibraryInfo{
                        .id = "org.example.my-mixer", .version = "0.1.0", .license = "Apache-2.0"}),
                    sdk::mixer<MyMixer>())
