// A mixer of the C++ SDK without LibTorch, with a parameter, a state and a backward, for the tests.
//
//   s_t = a_h s_{t-1} + (1 - a_h) x_t,   y_t = s_t,   a_h = sigmoid(decay_h)
//
// Channel c of the model belongs to head h = c / (model / heads).
#include <cmath>
#include <cstdint>
#include <span>

#include "graft/plugin.hpp"

namespace {

namespace sdk = graft::sdk;

double sigmoid(double raw) { return 1.0 / (1.0 + std::exp(-raw)); }

class Leaky final : public sdk::Mixer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.leaky";
    d.alias = "leaky";
    d.name = "Leaky integrator";
    d.version = "1.0.0";
    d.license = "Apache-2.0";
    d.description =
        "an exponential moving average of the block's input, one time constant per head";
    d.caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO | GRAFT_CAP_STATEFUL_GRAD |
             GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_BATCH_INVARIANT | GRAFT_CAP_THREAD_INVARIANT;
    d.options.push_back(
        sdk::Option::integer("heads", 1, "time constants; a divisor of the model's width")
            .at_least(1)
            .shapes());
    d.options.push_back(
        sdk::Option::real("half_life", 8.0, "tokens until a head has forgotten half, at the start")
            .at_least(0.01));
    return d;
  }

  Leaky(const sdk::LayerInfo& layer, const sdk::Config& config)
      : model_(layer.model_dim),
        heads_(config.get<int64_t>("heads")),
        half_life_(config.get<double>("half_life")) {
    if (model_ % heads_ != 0) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, "config.heads",
                        sdk::cat("the model's width ", model_, " is no multiple of ", heads_));
    }
  }

  void param_specs(sdk::ParamSpecs& specs) override {
    specs.add("decay", GRAFT_ROLE_DECAY_GATE_BIAS, "heads", {heads_})
        .heads(static_cast<int32_t>(heads_), 1)
        .domain("logit")
        .doc("raw decay of each head")
        .constant(raw_decay(half_life_))
        .no_decay();
  }

  void plan(const graft_plan_in& in, sdk::Plan& out) override {
    if (!sdk::same_dtype(in.dtype, sdk::float32)) {
      throw sdk::Status(GRAFT_UNIMPLEMENTED, "plan.dtype",
                        sdk::cat("only float32 is there, not ", sdk::dtype_name(in.dtype)));
    }
    out.state.add("s", "batch,model", {in.batch, model_}, sdk::float32);
    // backward reads s_{t-1}, which is y_{t-1}, but has no y.
    if ((in.flags & GRAFT_X_TRAINING) != 0) {
      out.saved.add("s", "batch,tokens,model", {in.batch, in.tokens, model_}, sdk::float32);
    }
  }

  void forward(const graft_exec&, const graft_mixer_forward& call) override { run(call); }
  void step(const graft_exec&, const graft_mixer_forward& call) override { run(call); }

  void backward(const graft_exec& exec, const graft_mixer_backward& call) override {
    const auto& fwd = *call.fwd;
    const auto x = sdk::data<const float>(sdk::require(fwd.x, "x"), "x");
    const auto s = sdk::data<const float>(sdk::require(fwd.saved[0], "saved.s"), "saved.s");
    const auto dy = sdk::data<const float>(sdk::require(call.dy, "dy"), "dy");
    const auto dx = call.dx == nullptr ? std::span<float>() : sdk::data<float>(*call.dx, "dx");
    const auto raw = sdk::data<const float>(sdk::require(fwd.params[0], "decay"), "decay");
    const int64_t batch = fwd.x->shape[0], tokens = fwd.x->shape[1];
    const float* const s0 = optional_data<const float>(fwd.state_in, "state_in");
    const float* const ds_last = optional_data<const float>(call.dstate_out, "dstate_out");
    float* const ds0 = optional_data<float>(call.dstate_in, "dstate_in");
    std::vector<double> draw(static_cast<std::size_t>(heads_), 0.0);

    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t c = 0; c < model_; ++c) {
        const auto h = static_cast<std::size_t>(c / (model_ / heads_));
        const double a = sigmoid(raw[h]);
        double ds = ds_last == nullptr ? 0.0 : ds_last[b * model_ + c];
        double da = 0.0;
        for (int64_t t = tokens; t-- > 0;) {
          const auto i = static_cast<std::size_t>((b * tokens + t) * model_ + c);
          const double before = t > 0 ? s[i - static_cast<std::size_t>(model_)]
                                      : (s0 == nullptr ? 0.0 : s0[b * model_ + c]);
          ds += dy[i];
          da += ds * (before - x[i]);
          if (!dx.empty()) dx[i] = static_cast<float>((1.0 - a) * ds);
          ds *= a;
        }
        if (ds0 != nullptr) ds0[b * model_ + c] = static_cast<float>(ds);
        draw[h] += da * a * (1.0 - a);
      }
    }
    if (call.dparams == nullptr || call.dparams[0] == nullptr) return;
    const auto out = sdk::data<float>(*call.dparams[0], "ddecay");
    const bool accumulate = (exec.flags & GRAFT_X_ACCUMULATE) != 0;
    for (std::size_t h = 0; h < out.size(); ++h) {
      out[h] = static_cast<float>((accumulate ? out[h] : 0.0) + draw[h]);
    }
  }

  void set_natural(std::string_view what, std::span<const double> values,
                   sdk::NaturalParams& params) override {
    if (what != GRAFT_NATURAL_HALF_LIFE) return Mixer::set_natural(what, values, params);
    const auto raw = params.write("decay");
    if (values.size() != raw.size()) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, "natural:half-life",
                        sdk::cat("expected ", raw.size(), " values, got ", values.size()));
    }
    for (std::size_t h = 0; h < raw.size(); ++h) raw[h] = static_cast<float>(raw_decay(values[h]));
  }

 private:
  // a = 2^(-1/half_life) = sigmoid(raw)
  static double raw_decay(double half_life) {
    if (!(half_life > 0)) {
      throw sdk::Status(GRAFT_OUT_OF_RANGE, "natural:half-life",
                        sdk::cat("expected more than 0, got ", half_life));
    }
    // 1 - a, without the cancellation at long half-lives.
    const double forgotten = -std::expm1(-std::log(2.0) / half_life);
    return std::log1p(-forgotten) - std::log(forgotten);
  }

  template <class T, class Tensor>
  static T* optional_data(Tensor* const* tensors, const char* name) {
    if (tensors == nullptr || tensors[0] == nullptr) return nullptr;
    return sdk::data<T>(*tensors[0], name).data();
  }

  void run(const graft_mixer_forward& call) const {
    const auto x = sdk::data<const float>(sdk::require(call.x, "x"), "x");
    sdk::check_shape(*call.x, "x", {-1, -1, model_});
    const int64_t batch = call.x->shape[0], tokens = call.x->shape[1];
    const auto y = sdk::data<float>(sdk::require(call.y, "y"), "y");
    sdk::check_shape(*call.y, "y", {batch, tokens, model_});
    const auto raw = sdk::data<const float>(sdk::require(call.params[0], "decay"), "decay");
    float* const saved = optional_data<float>(call.saved, "saved.s");
    const float* const from = optional_data<const float>(call.state_in, "state_in");
    float* const to = optional_data<float>(call.state_out, "state_out");
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t c = 0; c < model_; ++c) {
        const double a = sigmoid(raw[static_cast<std::size_t>(c / (model_ / heads_))]);
        double s = from == nullptr ? 0.0 : from[b * model_ + c];
        for (int64_t t = 0; t < tokens; ++t) {
          const auto i = static_cast<std::size_t>((b * tokens + t) * model_ + c);
          s = a * s + (1.0 - a) * x[i];
          y[i] = static_cast<float>(s);
          if (saved != nullptr) saved[i] = y[i];
        }
        if (to != nullptr) to[b * model_ + c] = static_cast<float>(s);
      }
    }
  }

  int64_t model_;
  int64_t heads_;
  double half_life_;
};

}  // namespace

GRAFT_DEFINE_PLUGIN((sdk::LibraryInfo{.id = "org.example.leaky-pack",
                                      .vendor = "graft",
                                      .version = "1.0.0",
                                      .license = "Apache-2.0"}),
                    sdk::mixer<Leaky>())
