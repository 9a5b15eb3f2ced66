// The smallest mixer that trains: what docs/first-plugin.md begins with.
#include "graft/torch_mixer.hpp"

namespace {

namespace sdk = graft::sdk;

// [plugin]
class ThreeLines final : public sdk::TorchMixer {
 public:
  static sdk::Description describe() {
    return {.id = "org.example.three-lines",
            .alias = "three_lines",
            .version = "0.1.0",
            .license = "Apache-2.0",
            .caps = GRAFT_CAP_BACKWARD};
  }

  ThreeLines(const sdk::LayerInfo& layer, const sdk::Config&)
      : model_(layer.model_dim), heads_(layer.n_heads), dim_(layer.head_dim) {}

  void param_specs(sdk::ParamSpecs& specs) override {
    const auto n = static_cast<int32_t>(heads_), d = static_cast<int32_t>(dim_);
    const int64_t w = heads_ * dim_;
    specs.add("q", GRAFT_ROLE_QUERY, "heads*key,model", {w, model_}).heads(n, d).normal(0, 0.02);
    specs.add("k", GRAFT_ROLE_KEY, "heads*key,model", {w, model_}).heads(n, d).normal(0, 0.02);
    specs.add("v", GRAFT_ROLE_VALUE, "heads*value,model", {w, model_}).heads(n, d).normal(0, 0.02);
    specs.add("o", GRAFT_ROLE_OUTPUT, "model,heads*value", {model_, w}).heads(n, d).normal(0, 0.02);
  }

  void tensors(const graft_plan_in&, sdk::Plan&) override {}  // no state, no taps

  sdk::TorchOutput compute(const sdk::TorchInput& in) override {
    const auto heads = [&](const char* weight) {  // [batch, heads, tokens, dim]
      return at::linear(in.x, in.weight(weight)).unflatten(2, {heads_, dim_}).transpose(1, 2);
    };
    const at::Tensor q = heads("q"), k = heads("k"), v = heads("v");
    // [three_lines]
    const at::Tensor scores = q.matmul(k.transpose(2, 3)).tril();
    const at::Tensor o = scores.matmul(v).transpose(1, 2).flatten(2);
    return {.y = at::linear(o, in.weight("o"))};
    // [/three_lines]
  }

 private:
  int64_t model_, heads_, dim_;
};
// [/plugin]

}  // namespace

// [define]
GRAFT_DEFINE_PLUGIN((sdk::LibraryInfo{.id = "org.example.three-lines",
                                      .version = "0.1.0",
                                      .license = "Apache-2.0"}),
                    sdk::mixer<ThreeLines>())
// [/define]
