#include "gdn_options.h"

#include <cmath>
#include <string>

#include "mixer_options.h"

namespace graft::gdn {

using mixers::follows;
using mixers::refuse_option;
using sdk::cat;
using sdk::Option;
using sdk::Status;

namespace {

constexpr int64_t kLargestSize = 65536;

void read_sizes(const sdk::LayerInfo& layer, const sdk::Config& config, BlockOptions& o) {
  o.model_dim = layer.model_dim;
  for (const char* const size : {"num_heads", "head_dim"}) {
    const int64_t given = config.get<int64_t>(size);
    if (given < 0 || given > kLargestSize) {
      refuse_option(size, cat("expected 0 to ", kLargestSize, ", got ", given));
    }
  }
  o.heads = config.get<int64_t>("num_heads");
  if (o.heads == 0) o.heads = layer.n_heads;
  o.key_dim = config.get<int64_t>("head_dim");
  if (o.key_dim == 0) o.key_dim = layer.head_dim;
  if (o.model_dim <= 0 || o.heads <= 0 || o.key_dim <= 0) {
    throw Status(GRAFT_INVALID_ARGUMENT, "layer",
                 cat("the layer's sizes must be positive, got model_dim ", o.model_dim, ", ",
                     o.heads, " heads of ", o.key_dim));
  }
  const double value_dim = static_cast<double>(o.key_dim) * config.get<double>("expand_v");
  o.value_dim = static_cast<int64_t>(std::llround(value_dim));
  if (o.value_dim < 1 || std::abs(value_dim - static_cast<double>(o.value_dim)) > 1e-6) {
    refuse_option("expand_v", cat("head_dim ", o.key_dim,
                                  " times expand_v must be a whole number, got ", value_dim));
  }
  o.chunk = config.get<int64_t>("chunk_size");
  if (o.chunk != 16 && o.chunk != 32 && o.chunk != 64 && o.chunk != 128) {
    refuse_option("chunk_size", cat("expected 16, 32, 64 or 128, got ", o.chunk));
  }
}

void read_conv(const sdk::Config& config, BlockOptions& o) {
  o.short_conv = mixers::short_conv_width(config);
  o.conv_bias = config.get<bool>("conv_bias");
  if (o.conv_bias && o.short_conv == 0)
    refuse_option("conv_bias", "there is no short conv to have a bias; set short_conv");
}

}  // namespace

std::vector<Option> option_schema() {
  return {
      Option::boolean("silu_q", true, "silu on the queries"),
      Option::boolean("silu_k", true, "silu on the keys"),
      Option::boolean("silu_v", true, "silu on the values"),
      Option::boolean("qk_l2norm", true,
                      "L2 norm of each query and key head (eps 1e-6 inside the root)"),
      mixers::follow_option("qk_norm",
                            "RMSNorm of each query and key head; auto: where the teacher has it"),
      Option::boolean("rope", false, "keep the teacher's RoPE on queries and keys"),
      Option::integer("short_conv", 0, "width of the causal conv on q, k, v: 0 (none) or 2 to 8")
          .range(0, 8)
          .shapes(),
      Option::boolean("conv_bias", false, "bias of the short conv").shapes(),
      mixers::follow_option("qkv_bias",
                            "bias of the q, k, v projections; auto: where the teacher has it"),
      mixers::follow_option("o_bias",
                            "bias of the output projection; auto: where the teacher has it"),
      Option::boolean("write_gate_bias", false, "bias of the write gate").shapes(),
      Option::boolean("output_gate", true, "silu gate on the normalised head output").shapes(),
      Option::boolean("output_gate_bias", false, "bias of the output gate").shapes(),
      Option::boolean("output_norm", true, "RMSNorm of each head's output").shapes(),
      Option::integer("num_heads", 0, "number of heads; 0: the teacher's")
          .range(int64_t{0}, kLargestSize)
          .shapes(),
      Option::integer("head_dim", 0, "width of a query or key head; 0: the teacher's")
          .range(int64_t{0}, kLargestSize)
          .shapes(),
      Option::real("expand_v", 1.0, "width of a value head over that of a key head")
          .range(0.0, 16.0)
          .shapes(),
      Option::integer("chunk_size", 64,
                      "tokens per chunk: 16, 32, 64 or 128; results differ by rounding only")
          .range(16, 128),
      Option::real("norm_eps", 1e-5, "eps of the output norm").range(0.0, 1.0),
      mixers::recompute_option(),
  };
}

BlockOptions block_options(const sdk::LayerInfo& layer, const sdk::Config& config) {
  BlockOptions o;
  read_sizes(layer, config, o);
  o.silu_q = config.get<bool>("silu_q");
  o.silu_k = config.get<bool>("silu_k");
  o.silu_v = config.get<bool>("silu_v");
  o.qk_norm = follows(config, "qk_norm", layer.has(GRAFT_LAYER_QK_NORM));
  o.qk_norm_eps = mixers::qk_norm_eps(layer);
  o.qk_l2norm = config.get<bool>("qk_l2norm");
  if (config.get<bool>("rope")) o.rope = mixers::teachers_rope(layer, o.key_dim);
  read_conv(config, o);
  o.qkv_bias = follows(config, "qkv_bias", layer.has(GRAFT_LAYER_QKV_BIAS));
  o.o_bias = follows(config, "o_bias", layer.has(GRAFT_LAYER_O_BIAS));
  o.write_gate_bias = config.get<bool>("write_gate_bias");
  o.output_gate = config.get<bool>("output_gate");
  o.output_gate_bias = config.get<bool>("output_gate_bias");
  if (o.output_gate_bias && !o.output_gate) {
    refuse_option("output_gate_bias", "there is no output gate to have a bias; set output_gate");
  }
  o.output_norm = config.get<bool>("output_norm");
  o.norm_eps = config.get<double>("norm_eps");
  return o;
}

}  // namespace graft::gdn
