#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/abi/owned_layer_info.h"
#include "core/teacher/model_config.h"
#include "graft/graft.h"

// What a model of a known family consists of, before any weight is read.
namespace graft {

// One tensor of a checkpoint.
struct TensorLayout {
  std::string name;  // as in the Hugging Face checkpoint
  std::vector<int64_t> shape;
};

// Every tensor a checkpoint of this model holds, in the order of the forward pass. The attention
// tensors of `replaced` layers are left out; so is the output projection of a tied model.
std::vector<TensorLayout> checkpoint_layout(const ModelConfig& config,
                                            const std::set<int64_t>& replaced = {});

std::string embedding_name(const ModelConfig& config);          // [vocab, model]
std::string output_projection_name(const ModelConfig& config);  // [vocab, model], absent when tied
// "model.layers.3.self_attn." or "gpt_neox.layers.3.attention."
std::string attention_prefix(const ModelConfig& config, int64_t layer);

// [model, mlp]: "model.layers.3.mlp.down_proj.weight" or
// "gpt_neox.layers.3.mlp.dense_4h_to_h.weight"
std::string mlp_output_name(const ModelConfig& config, int64_t layer);

// True for buffers that old checkpoints carry and nobody reads: rotary_emb.inv_freq and NeoX'
// attention.bias (the causal mask) and attention.masked_bias.
bool is_unused_buffer(std::string_view name);

// A parameter of a layer's attention block, as initializers see it.
struct RoleLayout {
  std::string name;  // "q_proj.weight", the same in all families
  std::string role;  // GRAFT_ROLE_*
  std::string axes;  // "heads*key,model": see graft_param_spec
  std::vector<int64_t> shape;
  int32_t heads = 0;     // on the heads axis: n_kv_heads for keys and values; 0 = no such axis
  int32_t head_dim = 0;  // 0 where heads is 0, but for q_norm and k_norm
};

// Query, key, value, output, then the biases and the query and key norms this model has. A fused
// projection appears as its parts.
std::vector<RoleLayout> attention_roles(const ModelConfig& config);

// graft_layer_info with the strings and arrays it points to.
class LayerInfo {
 public:
  // Error(internal) when there is no such layer.
  LayerInfo(const ModelConfig& config, int64_t layer);

  // Points into this object: valid while it lives and does not move.
  graft_layer_info c_info() const { return info_.c_info(); }

 private:
  OwnedLayerInfo info_;
};

}  // namespace graft
