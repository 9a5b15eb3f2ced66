#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace graft {

enum class NormKind { rms, layer };
enum class Activation { silu, gelu };  // gelu is the exact one, x * Phi(x)

// Rotary position embedding. Pair i rotates dims (i, i + rotary_dim / 2) of a head's first
// rotary_dim dims by position * inv_freq[i] (arXiv 2104.09864, in the half-split layout of
// transformers).
struct RopeConfig {
  double theta = 10000.0;
  int64_t rotary_dim = 0;  // even; head_dim unless the model rotates only a part of the head
  std::string scaling;     // "" (none), "linear" or "llama3"
  // [rotary_dim / 2] after scaling. float32 numbers, as transformers computes them, held as double.
  std::vector<double> inv_freq;
  double attention_factor = 1.0;  // cos and sin are multiplied by it
};

// What config.json, generation_config.json and tokenizer_config.json say about a decoder-only
// model.
struct ModelConfig {
  std::string family;  // "llama", "qwen2", "qwen3" or "gpt-neox"
  int64_t vocab_size = 0;
  int64_t model_dim = 0;
  int64_t n_layers = 0;
  int64_t n_heads = 0;
  int64_t n_kv_heads = 0;  // divides n_heads
  int64_t head_dim = 0;    // need not be model_dim / n_heads
  int64_t mlp_dim = 0;
  int64_t max_positions = 0;  // what the model was trained for; longer sequences are not refused
  NormKind norm = NormKind::rms;
  double norm_eps = 0.0;
  Activation activation = Activation::silu;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;            // RMSNorm over each query and key head, before RoPE
  bool parallel_residual = false;  // h + attention(norm1(h)) + mlp(norm2(h))
  bool tied = false;               // the output projection is the embedding
  RopeConfig rope;
  std::optional<int64_t> bos_id;
  std::vector<int64_t> stop_ids;   // ascending; union of the three files
  std::vector<std::string> notes;  // what a user should be told, e.g. a stop token that has no id
  nlohmann::json raw;              // config.json as it was read

  int64_t query_dim() const { return n_heads * head_dim; }
  int64_t key_dim() const { return n_kv_heads * head_dim; }
};

// The model families that can be read, as config.json's model_type spells them.
const std::vector<std::string>& known_model_types();

// Reads FOLDER/config.json and, where they exist, generation_config.json, tokenizer_config.json and
// tokenizer.json (the last only to look up the id of tokenizer_config's eos_token).
// Error(input) names the file and the key: a folder that is missing or not a Hugging Face one, an
// architecture that is not known, a missing key, a value of the wrong type or out of range, a
// feature that is not implemented (RoPE types other than default, linear and llama3, sliding
// windows, quantised weights).
ModelConfig load_model_config(const std::filesystem::path& folder);

// The same from config.json's content alone; `file` is what messages call it.
ModelConfig parse_model_config(const nlohmann::json& config, const std::string& file);

}  // namespace graft
