#include "core/teacher/layout.h"

#include <algorithm>
#include <array>

#include "core/base/error.h"

namespace graft {
namespace {

bool is_neox(const ModelConfig& config) { return config.family == "gpt-neox"; }

std::string layer_prefix(const ModelConfig& config, int64_t layer) {
  return (is_neox(config) ? "gpt_neox.layers." : "model.layers.") + std::to_string(layer) + ".";
}

// Appends NAME.weight and, where the model has one, NAME.bias.
void add_linear(std::vector<TensorLayout>& out, const std::string& name, int64_t rows,
                int64_t columns, bool bias) {
  out.push_back({name + ".weight", {rows, columns}});
  if (bias) out.push_back({name + ".bias", {rows}});
}

void add_norm(std::vector<TensorLayout>& out, const ModelConfig& config, const std::string& name) {
  out.push_back({name + ".weight", {config.model_dim}});
  if (config.norm == NormKind::layer) out.push_back({name + ".bias", {config.model_dim}});
}

void add_attention(std::vector<TensorLayout>& out, const ModelConfig& config, int64_t layer) {
  const std::string prefix = attention_prefix(config, layer);
  const int64_t d = config.model_dim;
  if (is_neox(config)) {
    add_linear(out, prefix + "query_key_value", 3 * config.query_dim(), d, config.qkv_bias);
    add_linear(out, prefix + "dense", d, config.query_dim(), config.o_bias);
    return;
  }
  add_linear(out, prefix + "q_proj", config.query_dim(), d, config.qkv_bias);
  add_linear(out, prefix + "k_proj", config.key_dim(), d, config.qkv_bias);
  add_linear(out, prefix + "v_proj", config.key_dim(), d, config.qkv_bias);
  add_linear(out, prefix + "o_proj", d, config.query_dim(), config.o_bias);
  if (config.qk_norm) {
    out.push_back({prefix + "q_norm.weight", {config.head_dim}});
    out.push_back({prefix + "k_norm.weight", {config.head_dim}});
  }
}

void add_mlp(std::vector<TensorLayout>& out, const ModelConfig& config, int64_t layer) {
  const std::string prefix = layer_prefix(config, layer) + "mlp.";
  const int64_t d = config.model_dim;
  if (is_neox(config)) {
    add_linear(out, prefix + "dense_h_to_4h", config.mlp_dim, d, config.mlp_bias);
    add_linear(out, prefix + "dense_4h_to_h", d, config.mlp_dim, config.mlp_bias);
    return;
  }
  add_linear(out, prefix + "gate_proj", config.mlp_dim, d, config.mlp_bias);
  add_linear(out, prefix + "up_proj", config.mlp_dim, d, config.mlp_bias);
  add_linear(out, prefix + "down_proj", d, config.mlp_dim, config.mlp_bias);
}

// Points into the config.
graft_layer_info borrowed_info(const ModelConfig& config, int64_t layer) {
  if (layer < 0 || layer >= config.n_layers) {
    fail(ErrorKind::internal, "there is no layer " + std::to_string(layer) + " in a model of " +
                                  std::to_string(config.n_layers) + " layers");
  }
  graft_layer_info info{};
  info.struct_size = sizeof info;
  info.layer = static_cast<int32_t>(layer);
  info.n_layers = static_cast<int32_t>(config.n_layers);
  info.n_heads = static_cast<int32_t>(config.n_heads);
  info.n_kv_heads = static_cast<int32_t>(config.n_kv_heads);
  info.head_dim = static_cast<int32_t>(config.head_dim);
  info.model_dim = config.model_dim;
  info.max_positions = config.max_positions;
  info.rope_theta = config.rope.theta;
  info.rope_fraction =
      static_cast<double>(config.rope.rotary_dim) / static_cast<double>(config.head_dim);
  info.rope_scaling = config.rope.scaling.c_str();
  info.family = config.family.c_str();
  info.param_dtype = DLDataType{kDLFloat, 32, 1};
  info.flags = (config.qkv_bias ? GRAFT_LAYER_QKV_BIAS : 0u) |
               (config.o_bias ? GRAFT_LAYER_O_BIAS : 0u) |
               (config.qk_norm ? GRAFT_LAYER_QK_NORM : 0u) |
               (config.parallel_residual ? GRAFT_LAYER_PARALLEL_RESIDUAL : 0u);
  info.norm_eps = config.norm_eps;
  info.rope_inv_freq = config.rope.inv_freq.data();
  info.n_rope_freq = static_cast<int32_t>(config.rope.inv_freq.size());
  info.rope_attention_factor = config.rope.attention_factor;
  return info;
}

}  // namespace

std::vector<TensorLayout> checkpoint_layout(const ModelConfig& config,
                                            const std::set<int64_t>& replaced) {
  std::vector<TensorLayout> out;
  out.push_back({embedding_name(config), {config.vocab_size, config.model_dim}});
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    const std::string prefix = layer_prefix(config, layer);
    add_norm(out, config, prefix + "input_layernorm");
    if (!replaced.contains(layer)) add_attention(out, config, layer);
    add_norm(out, config, prefix + "post_attention_layernorm");
    add_mlp(out, config, layer);
  }
  add_norm(out, config, is_neox(config) ? "gpt_neox.final_layer_norm" : "model.norm");
  if (!config.tied) {
    out.push_back({output_projection_name(config), {config.vocab_size, config.model_dim}});
  }
  return out;
}

std::string embedding_name(const ModelConfig& config) {
  return is_neox(config) ? "gpt_neox.embed_in.weight" : "model.embed_tokens.weight";
}

std::string output_projection_name(const ModelConfig& config) {
  return is_neox(config) ? "embed_out.weight" : "lm_head.weight";
}

std::string attention_prefix(const ModelConfig& config, int64_t layer) {
  return layer_prefix(config, layer) + (is_neox(config) ? "attention." : "self_attn.");
}

std::string mlp_output_name(const ModelConfig& config, int64_t layer) {
  return layer_prefix(config, layer) + (is_neox(config) ? "mlp.dense_4h_to_h" : "mlp.down_proj") +
         ".weight";
}

bool is_unused_buffer(std::string_view name) {
  constexpr std::array<std::string_view, 3> suffixes = {".rotary_emb.inv_freq", ".attention.bias",
                                                        ".attention.masked_bias"};
  return std::any_of(suffixes.begin(), suffixes.end(),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

std::vector<RoleLayout> attention_roles(const ModelConfig& config) {
  const auto heads = static_cast<int32_t>(config.n_heads);
  const auto kv_heads = static_cast<int32_t>(config.n_kv_heads);
  const auto dim = static_cast<int32_t>(config.head_dim);
  const int64_t d = config.model_dim;
  std::vector<RoleLayout> roles = {
      {"q_proj.weight", GRAFT_ROLE_QUERY, "heads*key,model", {config.query_dim(), d}, heads, dim},
      {"k_proj.weight", GRAFT_ROLE_KEY, "heads*key,model", {config.key_dim(), d}, kv_heads, dim},
      {"v_proj.weight",
       GRAFT_ROLE_VALUE,
       "heads*value,model",
       {config.key_dim(), d},
       kv_heads,
       dim},
      {"o_proj.weight",
       GRAFT_ROLE_OUTPUT,
       "model,heads*value",
       {d, config.query_dim()},
       heads,
       dim},
  };
  if (config.qkv_bias) {
    roles.push_back(
        {"q_proj.bias", GRAFT_ROLE_QUERY_BIAS, "heads*key", {config.query_dim()}, heads, dim});
    roles.push_back(
        {"k_proj.bias", GRAFT_ROLE_KEY_BIAS, "heads*key", {config.key_dim()}, kv_heads, dim});
    roles.push_back(
        {"v_proj.bias", GRAFT_ROLE_VALUE_BIAS, "heads*value", {config.key_dim()}, kv_heads, dim});
  }
  if (config.o_bias) roles.push_back({"o_proj.bias", GRAFT_ROLE_OUTPUT_BIAS, "model", {d}, 0, 0});
  if (config.qk_norm) {
    roles.push_back({"q_norm.weight", GRAFT_ROLE_QUERY_NORM, "key", {config.head_dim}, 0, dim});
    roles.push_back({"k_norm.weight", GRAFT_ROLE_KEY_NORM, "key", {config.head_dim}, 0, dim});
  }
  return roles;
}

LayerInfo::LayerInfo(const ModelConfig& config, int64_t layer)
    : info_(borrowed_info(config, layer)) {}

}  // namespace graft
