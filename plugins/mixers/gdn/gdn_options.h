// The options a user sets, and what they mean for one layer.
#pragma once

#include <cstdint>
#include <vector>

#include "graft/description.hpp"
#include "rope.h"

namespace graft::gdn {

struct BlockOptions {
  int64_t model_dim = 0, heads = 0, key_dim = 0, value_dim = 0;
  bool silu_q = true, silu_k = true, silu_v = true;
  bool qk_norm = false;  // q_norm.weight, k_norm.weight
  double qk_norm_eps = 1e-6;
  bool qk_l2norm = true;
  mixers::Rope rope;       // of the teacher, or none
  int64_t short_conv = 0;  // width; 0 = none
  bool conv_bias = false;
  bool qkv_bias = false, write_gate_bias = false, o_bias = false;
  bool output_gate = true, output_gate_bias = false, output_norm = true;
  double norm_eps = 1e-5;
  int64_t chunk = 64;
};

std::vector<sdk::Option> option_schema();

// Throws sdk::Status with where = "config.<key>" for what cannot be built.
BlockOptions block_options(const sdk::LayerInfo& layer, const sdk::Config& config);

}  // namespace graft::gdn
