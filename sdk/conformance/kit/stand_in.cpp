#include "kit/stand_in.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "graft/plugin.hpp"

namespace graft::conformance {
namespace {

using sdk::Status;
using Vector = std::vector<double>;

// Far enough out that float32 shows nothing of the rest: exp(-80) tokens^-1 is no decay.
constexpr double kNever = -80, kFarOut = 40;
constexpr double kSiluMinimum = -0.278;

double sigmoid(double u) { return 1 / (1 + std::exp(-u)); }
double silu(double u) { return u * sigmoid(u); }
double softplus(double u) { return u > 30 ? u : std::log1p(std::exp(u)); }
double softplus_inverse(double value) { return value + std::log(-std::expm1(-value)); }
double logit(double p) { return std::clamp(std::log(p) - std::log1p(-p), -kFarOut, kFarOut); }

// On the branch right of the minimum, where silu rises.
double silu_inverse(double value) {
  double low = -1.278, high = std::max(value, 0.0) + 2;
  for (int i = 0; i < 80; ++i) {
    const double middle = (low + high) / 2;
    (silu(middle) < value ? low : high) = middle;
  }
  return low;
}

// The order of param_specs.
enum Param : std::size_t {
  kQuery,
  kKey,
  kValue,
  kOutput,
  kDecay,
  kDecayBias,
  kDecayScale,
  kWrite,
  kWriteBias,
  kGate,
  kGateBias,
  kNorm,
  kMapQuery,
  kMapKey
};

class StandIn final : public sdk::Mixer {
 public:
  StandIn(const sdk::LayerInfo& layer, const sdk::Config& config)
      : heads_(layer.n_heads),
        dim_(layer.head_dim),
        model_(layer.model_dim),
        eps_(layer.norm_eps),
        maps_(config.get<bool>("feature_maps")) {}

  static sdk::Description describe() {
    return {.id = "org.graft.conformance.stand-in",
            .alias = "stand_in",
            .name = "Stand-in",
            .version = "1.0.0",
            .license = "Apache-2.0",
            .description = "a plain linear recurrence with all parts an initializer may set",
            .options = {sdk::Option::boolean("feature_maps", false,
                                             "maps of queries and keys, of the roles of that name")
                            .shapes()}};
  }

  void param_specs(sdk::ParamSpecs& specs) override {
    const double spread = 1 / std::sqrt(static_cast<double>(model_));
    const auto heads = static_cast<std::int32_t>(heads_), dim = static_cast<std::int32_t>(dim_);
    const auto rows = [&](const char* name, const char* role) -> sdk::ParamSpec& {
      return specs.add(name, role, "heads*key,model", {heads_ * dim_, model_})
          .heads(heads, dim)
          .normal(0, spread);
    };
    const auto gate = [&](const char* name, const char* role, const char* domain) {
      specs.add(name, role, "heads,model", {heads_, model_})
          .heads(heads, 1)
          .domain(domain)
          .normal(0, spread);
    };
    const auto per_head = [&](const char* name, const char* role, const char* domain) {
      specs.add(name, role, "heads", {heads_}).heads(heads, 1).domain(domain);
    };
    rows("q_proj.weight", GRAFT_ROLE_QUERY);
    rows("k_proj.weight", GRAFT_ROLE_KEY);
    rows("v_proj.weight", GRAFT_ROLE_VALUE);
    specs.add("o_proj.weight", GRAFT_ROLE_OUTPUT, "model,heads*value", {model_, heads_ * dim_})
        .heads(heads, dim)
        .normal(0, spread);
    gate("a_proj.weight", GRAFT_ROLE_DECAY_GATE, "softplus-inv");
    per_head("dt_bias", GRAFT_ROLE_DECAY_GATE_BIAS, "softplus-inv");
    per_head("A_log", GRAFT_ROLE_DECAY_SCALE, "log");
    gate("b_proj.weight", GRAFT_ROLE_WRITE_GATE, "logit");
    per_head("b_proj.bias", GRAFT_ROLE_WRITE_GATE_BIAS, "logit");
    rows("g_proj.weight", GRAFT_ROLE_OUTPUT_GATE).domain("silu-inv");
    specs.add("g_proj.bias", GRAFT_ROLE_OUTPUT_GATE_BIAS, "heads*value", {heads_ * dim_})
        .heads(heads, dim)
        .domain("silu-inv");
    specs.add("o_norm.weight", GRAFT_ROLE_NORM, "value", {dim_}).heads(0, dim).ones();
    if (!maps_) return;
    specs.add("map_q", GRAFT_ROLE_FEATURE_MAP_Q, "heads,feature,key", {heads_, dim_, dim_})
        .heads(heads, dim)
        .eye();
    specs.add("map_k", GRAFT_ROLE_FEATURE_MAP_K, "heads,feature,key", {heads_, dim_, dim_})
        .heads(heads, dim)
        .eye();
  }

  void plan(const graft_plan_in& in, sdk::Plan& out) override {
    if (!sdk::same_dtype(in.dtype, sdk::float32)) {
      throw Status(GRAFT_UNIMPLEMENTED, "plan.dtype",
                   sdk::cat("only float32 is there, not ", sdk::dtype_name(in.dtype)));
    }
    const std::int64_t B = in.batch, T = in.tokens;
    out.taps.add(GRAFT_TAP_HEAD_OUTPUT, "batch,tokens,heads,value", {B, T, heads_, dim_}, in.dtype);
    out.taps.add(GRAFT_TAP_PRE_OUTPUT, "batch,tokens,heads*value", {B, T, heads_ * dim_}, in.dtype);
    out.taps.add(GRAFT_TAP_LOG_DECAY, "batch,tokens,heads", {B, T, heads_}, in.dtype);
    out.taps.add(GRAFT_TAP_WRITE_GATE, "batch,tokens,heads", {B, T, heads_}, in.dtype);
  }

  void forward(const graft_exec&, const graft_mixer_forward& call) override {
    sdk::check_shape(sdk::require(call.x, "x"), "x", {-1, -1, model_});
    const auto x = sdk::data<const float>(*call.x, "x");
    const std::int64_t sequences = call.x->shape[0], tokens = call.x->shape[1];
    for (std::int64_t b = 0; b < sequences; ++b) {
      Vector state(static_cast<std::size_t>(heads_ * dim_ * dim_));
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t at = b * tokens + t;
        one_token(call, at, x.subspan(index(at * model_), index(model_)), state);
      }
    }
  }

  void set_natural(std::string_view what, std::span<const double> values,
                   sdk::NaturalParams& params) override {
    if (static_cast<std::int64_t>(values.size()) != heads_) {
      throw Status(GRAFT_INVALID_ARGUMENT, sdk::cat("natural:", what),
                   sdk::cat("expected ", heads_, " values, got ", values.size()));
    }
    if (what == GRAFT_NATURAL_HALF_LIFE) return set_half_life(values, params);
    if (what == GRAFT_NATURAL_WRITE_GATE) {
      check_range(what, values, 0, 1);
      return set_gate(values, params, "b_proj.weight", "b_proj.bias", 1, logit);
    }
    if (what == GRAFT_NATURAL_OUTPUT_GATE) {
      check_range(what, values, kSiluMinimum, 1e4);
      return set_gate(values, params, "g_proj.weight", "g_proj.bias", dim_, silu_inverse);
    }
    Mixer::set_natural(what, values, params);
  }

 private:
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

  static void check_range(std::string_view what, std::span<const double> values, double least,
                          double most) {
    for (const double value : values) {
      if (value >= least && value <= most) continue;
      throw Status(GRAFT_OUT_OF_RANGE, sdk::cat("natural:", what),
                   sdk::cat("expected ", least, " to ", most, ", got ", value));
    }
  }

  void set_half_life(std::span<const double> values, sdk::NaturalParams& params) const {
    check_range(GRAFT_NATURAL_HALF_LIFE, values, 1e-3, std::numeric_limits<double>::infinity());
    std::ranges::fill(params.write("a_proj.weight"), 0.0F);
    const auto bias = params.write("dt_bias"), scale = params.write("A_log");
    for (std::size_t h = 0; h < values.size(); ++h) {
      const double decay = std::log(2.0) / values[h];
      bias[h] = static_cast<float>(decay > 0 ? softplus_inverse(decay) : 0.0);
      scale[h] = static_cast<float>(decay > 0 ? 0.0 : kNever);
    }
  }

  template <class Inverse>
  static void set_gate(std::span<const double> values, sdk::NaturalParams& params,
                       const char* weight, const char* bias, std::int64_t rows, Inverse inverse) {
    std::ranges::fill(params.write(weight), 0.0F);
    const auto raw = params.write(bias);
    for (std::size_t i = 0; i < raw.size(); ++i)
      raw[i] = static_cast<float>(inverse(values[i / index(rows)]));
  }

  static std::span<const float> param(const graft_mixer_forward& call, Param which) {
    return sdk::data<const float>(sdk::require(call.params[which], "param"), "param");
  }

  // x W^T + b
  static Vector project(std::span<const float> weight, std::span<const float> bias,
                        std::span<const float> x) {
    Vector out(weight.size() / x.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      double sum = bias.empty() ? 0 : static_cast<double>(bias[i]);
      for (std::size_t j = 0; j < x.size(); ++j)
        sum += static_cast<double>(weight[i * x.size() + j]) * static_cast<double>(x[j]);
      out[i] = sum;
    }
    return out;
  }

  Vector features(const graft_mixer_forward& call, Param which, Vector of) const {
    if (!maps_) return of;
    const auto map = param(call, which);
    Vector out(of.size());
    const std::size_t d = index(dim_);
    for (std::size_t i = 0; i < out.size(); ++i) {
      double sum = 0;
      for (std::size_t j = 0; j < d; ++j)
        sum += static_cast<double>(map[i * d + j]) * of[i / d * d + j];
      out[i] = softplus(sum);
    }
    return out;
  }

  static void store(const graft_mixer_forward& call, std::size_t tap, std::int64_t at,
                    const Vector& values) {
    if (call.taps == nullptr || call.taps[tap] == nullptr) return;
    const auto out = sdk::data<float>(*call.taps[tap], "tap");
    for (std::size_t i = 0; i < values.size(); ++i)
      out[index(at) * values.size() + i] = static_cast<float>(values[i]);
  }

  // The token of number `at` over all sequences.
  void one_token(const graft_mixer_forward& call, std::int64_t at, std::span<const float> x,
                 Vector& state) const {
    const Vector q = features(call, kMapQuery, project(param(call, kQuery), {}, x));
    const Vector k = features(call, kMapKey, project(param(call, kKey), {}, x));
    const Vector v = project(param(call, kValue), {}, x);
    Vector decay = project(param(call, kDecay), param(call, kDecayBias), x);
    Vector write = project(param(call, kWrite), param(call, kWriteBias), x);
    const auto scale = param(call, kDecayScale);
    for (std::size_t h = 0; h < decay.size(); ++h) {
      decay[h] = -std::exp(static_cast<double>(scale[h])) * softplus(decay[h]);
      write[h] = sigmoid(write[h]);
    }
    const Vector o = recur(q, k, v, decay, write, state);
    const Vector z = normalise_and_gate(call, o, x);
    store(call, 0, at, o);
    store(call, 1, at, z);
    store(call, 2, at, decay);
    store(call, 3, at, write);
    if (call.y == nullptr) return;
    const auto y = sdk::data<float>(*call.y, "y");
    const auto output = param(call, kOutput);
    for (std::size_t i = 0; i < index(model_); ++i) {
      double sum = 0;
      for (std::size_t j = 0; j < z.size(); ++j)
        sum += static_cast<double>(output[i * z.size() + j]) * z[j];
      y[index(at * model_) + i] = static_cast<float>(sum);
    }
  }

  Vector recur(const Vector& q, const Vector& k, const Vector& v, const Vector& decay,
               const Vector& write, Vector& state) const {
    const std::size_t d = index(dim_);
    Vector o(q.size());
    for (std::size_t h = 0; h < index(heads_); ++h) {
      const double keep = std::exp(decay[h]);
      for (std::size_t i = 0; i < d; ++i) {
        for (std::size_t j = 0; j < d; ++j) {
          double& s = state[(h * d + i) * d + j];
          s = keep * s + write[h] * k[h * d + i] * v[h * d + j];
          o[h * d + j] += s * q[h * d + i] / static_cast<double>(d);
        }
      }
    }
    return o;
  }

  Vector normalise_and_gate(const graft_mixer_forward& call, const Vector& o,
                            std::span<const float> x) const {
    const Vector gate = project(param(call, kGate), param(call, kGateBias), x);
    const auto norm = param(call, kNorm);
    const std::size_t d = index(dim_);
    Vector z(o.size());
    for (std::size_t h = 0; h < index(heads_); ++h) {
      double squares = 0;
      for (std::size_t j = 0; j < d; ++j) squares += o[h * d + j] * o[h * d + j];
      const double unit = 1 / std::sqrt(squares / static_cast<double>(d) + eps_);
      for (std::size_t j = 0; j < d; ++j) {
        const std::size_t i = h * d + j;
        z[i] = o[i] * unit * static_cast<double>(norm[j]) * silu(gate[i]);
      }
    }
    return z;
  }

  std::int64_t heads_, dim_, model_;
  double eps_;
  bool maps_;
};

using Components = sdk::detail::Components<sdk::Mixer, sdk::LayerInfo, sdk::Config>;

const Components& components() {
  static const Components& all = *[] {
    auto* const made = new Components;
    auto [description, make] = sdk::mixer<StandIn>();
    made->add(std::move(description), std::move(make));
    return made;
  }();
  return all;
}

graft_status create(const char* id, const graft_layer_info* layer, const graft_config* config,
                    graft_mixer** out, graft_error* error) noexcept {
  return sdk::detail::guarded(error, [&] {
    *out = &components().create(id, sdk::LayerInfo(layer), sdk::Config(config))->c;
  });
}

}  // namespace

const graft_mixer_factory& stand_in_mixers() {
  static const graft_mixer_factory factory{sizeof factory, components().count(),
                                           components().descs(), &create};
  return factory;
}

}  // namespace graft::conformance
