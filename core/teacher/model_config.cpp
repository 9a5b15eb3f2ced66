#include "core/teacher/model_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <set>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/json.h"
#include "core/base/suggest.h"
#include "core/checkpoint/checkpoint.h"

namespace graft {
namespace {

using nlohmann::json;

constexpr int64_t kMaxDim = int64_t{1} << 24;  // products of two dims stay far inside int64

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// A value as a message shows it: short, on one line.
std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

// An object of a JSON file whose values are asked for by key, with the file and the key in every
// message. null counts as absent, as it does in transformers.
class Section {
 public:
  Section(const json& object, std::string file, std::string prefix = "")
      : object_(object), file_(std::move(file)), prefix_(std::move(prefix)) {
    if (!object.is_object()) {
      fail(ErrorKind::input,
           file_ + ": " + (prefix_.empty() ? "the file" : prefix_.substr(0, prefix_.size() - 1)) +
               " is " + shown(object) + ", not an object of keys and values");
    }
  }

  const std::string& file() const { return file_; }
  const json& object() const { return object_; }
  // A key as messages spell it.
  std::string name(const std::string& key) const { return prefix_ + key; }

  const json* find(const std::string& key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  bool has(const std::string& key) const { return find(key) != nullptr; }

  [[noreturn]] void refuse(const std::string& key, const std::string& why) const {
    const json* value = find(key);
    fail(ErrorKind::input,
         file_ + ": " + prefix_ + key + (value ? " is " + shown(*value) : "") + "; " + why);
  }

  Section section(const std::string& key) const {
    return Section(require(key), file_, prefix_ + key + ".");
  }

  int64_t integer(const std::string& key, std::optional<int64_t> otherwise, int64_t min = 1,
                  int64_t max = kMaxDim) const {
    if (otherwise && !has(key)) return *otherwise;
    const json& value = require(key);
    if (!value.is_number_integer()) refuse(key, "an integer is needed");
    const bool too_big = value.is_number_unsigned() &&
                         value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
    if (too_big || value.get<int64_t>() < min || value.get<int64_t>() > max) {
      refuse(key, "it must lie between " + std::to_string(min) + " and " + std::to_string(max));
    }
    return value.get<int64_t>();
  }

  double positive(const std::string& key, std::optional<double> otherwise) const {
    if (otherwise && !has(key)) return *otherwise;
    const json& value = require(key);
    if (!value.is_number()) refuse(key, "a number is needed");
    const double number = value.get<double>();
    if (!(number > 0.0) || !std::isfinite(number)) refuse(key, "it must be positive and finite");
    return number;
  }

  bool boolean(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!find(key)->is_boolean()) refuse(key, "true or false is needed");
    return find(key)->get<bool>();
  }

  std::string text(const std::string& key, const std::optional<std::string>& otherwise) const {
    if (otherwise && !has(key)) return *otherwise;
    const json& value = require(key);
    if (!value.is_string()) refuse(key, "a string is needed");
    return value.get<std::string>();
  }

 private:
  const json& require(const std::string& key) const {
    const json* value = find(key);
    if (value == nullptr) {
      fail(ErrorKind::input, file_ + ": the key " + quoted(prefix_ + key) + " is missing");
    }
    return *value;
  }

  const json& object_;
  std::string file_;
  std::string prefix_;
};

// ------------------------------------------------------------------------------------- families

std::string model_type_of(const Section& config) {
  const auto& known = known_model_types();
  std::string architecture;
  if (const json* list = config.find("architectures")) {
    if (!list->is_array() || list->empty() || !list->front().is_string()) {
      config.refuse("architectures", "a list of class names is needed");
    }
    architecture = list->front().get<std::string>();
    if (!architecture.ends_with("ForCausalLM")) {
      config.refuse("architectures", "a causal language model is needed, a ...ForCausalLM");
    }
  }
  if (!config.has("model_type")) {
    config.refuse("model_type",
                  "it is missing, so the family is not known; known: " + joined(known));
  }
  const std::string type = config.text("model_type", std::nullopt);
  if (std::find(known.begin(), known.end(), type) == known.end()) {
    fail(ErrorKind::input, config.file() + ": model_type " + quoted(type) +
                               (architecture.empty() ? "" : " (" + quoted(architecture) + ")") +
                               " is not a family that can be read; known: " + joined(known));
  }
  return type;
}

Activation activation_of(const Section& config, const char* otherwise) {
  const std::string name = config.text("hidden_act", otherwise);
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  config.refuse("hidden_act", "known are silu and gelu (the exact one)");
}

void read_dimensions(const Section& config, ModelConfig& out) {
  out.vocab_size = config.integer("vocab_size", std::nullopt);
  out.model_dim = config.integer("hidden_size", std::nullopt);
  out.n_layers = config.integer("num_hidden_layers", std::nullopt, 1, 10000);
  out.n_heads = config.integer("num_attention_heads", std::nullopt, 1, 65536);
  out.mlp_dim = config.integer("intermediate_size", std::nullopt);
  out.max_positions = config.integer("max_position_embeddings", std::nullopt, 1, int64_t{1} << 40);
  out.tied = config.boolean("tie_word_embeddings", false);
}

int64_t divided_head_dim(const Section& config, const ModelConfig& out) {
  if (out.model_dim % out.n_heads != 0) {
    config.refuse("hidden_size", "it is not divisible by num_attention_heads " +
                                     std::to_string(out.n_heads) + ", and there is no head_dim");
  }
  return out.model_dim / out.n_heads;
}

// Llama, Qwen2 and Qwen3: RMSNorm, gated MLP, grouped heads.
void read_llama_like(const Section& config, ModelConfig& out) {
  const bool llama = out.family == "llama";
  out.norm = NormKind::rms;
  out.norm_eps = config.positive("rms_norm_eps", std::nullopt);
  out.activation = activation_of(config, "silu");
  // transformers falls back to n_heads for Llama only; Qwen's default of 32 belongs to one model.
  out.n_kv_heads = llama && !config.has("num_key_value_heads")
                       ? out.n_heads
                       : config.integer("num_key_value_heads", std::nullopt, 1, 65536);
  if (out.n_heads % out.n_kv_heads != 0) {
    config.refuse("num_key_value_heads",
                  "it must divide num_attention_heads " + std::to_string(out.n_heads));
  }
  if (config.has("head_dim")) {
    out.head_dim = config.integer("head_dim", std::nullopt, 1, 65536);
  } else {
    out.head_dim = out.family == "qwen3" ? 128 : divided_head_dim(config, out);
  }
  const bool attention_bias = config.boolean("attention_bias", false);
  if (out.family == "qwen2") {
    out.qkv_bias = true;  // always, and never on the output: the key is not read by transformers
  } else {
    out.qkv_bias = out.o_bias = attention_bias;
  }
  out.mlp_bias = llama && config.boolean("mlp_bias", false);
  out.qk_norm = out.family == "qwen3";
}

void read_gpt_neox(const Section& config, ModelConfig& out) {
  out.norm = NormKind::layer;
  out.norm_eps = config.positive("layer_norm_eps", std::nullopt);
  out.activation = activation_of(config, "gelu");
  out.n_kv_heads = out.n_heads;
  out.head_dim = divided_head_dim(config, out);
  if (config.integer("head_dim", out.head_dim) != out.head_dim) {
    config.refuse("head_dim", "GPT-NeoX has hidden_size / num_attention_heads = " +
                                  std::to_string(out.head_dim));
  }
  out.qkv_bias = out.o_bias = config.boolean("attention_bias", true);
  out.mlp_bias = true;
  out.parallel_residual = config.boolean("use_parallel_residual", true);
}

// What would change the computation and is not implemented.
void refuse_unsupported(const Section& config, const ModelConfig& out) {
  if (config.has("quantization_config")) {
    config.refuse("quantization_config",
                  "quantised weights cannot be read; use the F32, F16 or BF16 checkpoint");
  }
  if (const json* types = config.find("layer_types")) {
    if (!types->is_array() || types->size() != static_cast<std::size_t>(out.n_layers)) {
      config.refuse("layer_types", "a list of num_hidden_layers = " + std::to_string(out.n_layers) +
                                       " names is needed");
    }
    for (std::size_t i = 0; i < types->size(); ++i) {
      if ((*types)[i] != "full_attention") {
        fail(ErrorKind::input, config.file() + ": layer_types[" + std::to_string(i) + "] is " +
                                   shown((*types)[i]) + "; only full_attention is implemented");
      }
    }
  } else if (config.boolean("use_sliding_window", false) && config.has("sliding_window") &&
             config.integer("max_window_layers", 28, 0) < out.n_layers) {
    config.refuse("use_sliding_window",
                  "sliding-window attention (layers from max_window_layers on) is not implemented");
  }
}

// ----------------------------------------------------------------------------------------- RoPE

// 1 / theta^(2i / dim) in the steps and the precision of transformers: a float32 exponent, a
// float32 power and a float32 reciprocal. The power itself is taken in double and rounded once.
std::vector<float> plain_inv_freq(double theta, int64_t dim) {
  std::vector<float> freq;
  for (int64_t i = 0; i < dim; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(dim);
    const double power = std::pow(double{static_cast<float>(theta)}, double{exponent});
    freq.push_back(1.0f / static_cast<float>(power));
  }
  return freq;
}

// Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between
// interpolated.
void scale_llama3(const Section& rope, double original_max, std::vector<float>& freq) {
  const float factor = static_cast<float>(rope.positive("factor", std::nullopt));
  const float low = static_cast<float>(rope.positive("low_freq_factor", std::nullopt));
  const float high = static_cast<float>(rope.positive("high_freq_factor", std::nullopt));
  if (!(high > low)) rope.refuse("high_freq_factor", "it must be above low_freq_factor");
  const float context = static_cast<float>(original_max);
  for (float& f : freq) {
    const float wavelength = 2.0f * std::numbers::pi_v<float> / f;
    if (wavelength < context / high) continue;
    if (wavelength > context / low) {
      f /= factor;
    } else {
      const float smooth = (context / wavelength - low) / (high - low);
      f = (1.0f - smooth) * f / factor + smooth * f;
    }
  }
}

// The object that holds the RoPE settings, under its older or newer name; null when there is none.
std::optional<Section> rope_section(const Section& config) {
  std::optional<Section> found;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(key)) continue;
    const Section section = config.section(key);
    for (const auto& [name, value] : section.object().items()) {
      if (value.is_object()) {
        section.refuse(name, "RoPE settings that differ by layer type are not implemented");
      }
    }
    if (section.object().empty()) continue;
    if (found && found->object() != section.object()) {
      config.refuse(key, "rope_scaling is " + shown(found->object()) +
                             "; both are names of the same settings: keep the one that is right");
    }
    if (!found) found.emplace(section);
  }
  return found;
}

// The kind of RoPE, under its older or newer key. Without a kind, settings beside it would be left
// out of the computation unseen.
std::string rope_type_of(const Section& rope) {
  const std::string newer = rope.text("rope_type", ""), older = rope.text("type", "");
  if (rope.has("rope_type") && rope.has("type") && newer != older) {
    rope.refuse("rope_type", rope.name("type") + " is " + quoted(older) +
                                 "; both say the kind of RoPE: keep the one that is right");
  }
  if (rope.has("rope_type")) return newer;
  if (rope.has("type")) return older;
  for (const auto& [key, value] : rope.object().items()) {
    if (value.is_null() || key == "rope_theta" || key == "partial_rotary_factor") continue;
    rope.refuse(key, "there is no " + rope.name("rope_type") +
                         " that says how it is used; known: default, linear, llama3");
  }
  return "default";
}

// The value from whichever place has it: transformers 5 puts everything into rope_parameters, older
// files have rope_theta at the top, GPT-NeoX names of its own. Where several have it they agree.
double agreed_positive(const std::optional<Section>& rope, const std::string& rope_key,
                       const Section& config, const std::vector<std::string>& keys,
                       double otherwise) {
  std::optional<double> agreed;
  std::string first;
  const auto take = [&](const Section& section, const std::string& key) {
    if (!section.has(key)) return;
    const double value = section.positive(key, std::nullopt);
    if (agreed && *agreed != value) {
      section.refuse(key, first + "; both mean the same: keep the one that is right");
    }
    if (agreed) return;
    agreed = value;
    first = section.name(key) + " is " + shown(*section.find(key));
  };
  if (rope) take(*rope, rope_key);
  for (const std::string& key : keys) take(config, key);
  return agreed.value_or(otherwise);
}

int64_t rotary_dim_of(const Section& config, const std::optional<Section>& rope,
                      const ModelConfig& out) {
  const bool neox = out.family == "gpt-neox";
  const std::vector<std::string> keys =
      neox ? std::vector<std::string>{"rotary_pct", "partial_rotary_factor"}
           : std::vector<std::string>{"partial_rotary_factor"};
  const double fraction =
      agreed_positive(rope, "partial_rotary_factor", config, keys, neox ? 0.25 : 1.0);
  const std::string what = neox ? "rotary_pct" : "partial_rotary_factor";
  if (!neox && fraction != 1.0) {
    fail(ErrorKind::input, config.file() + ": " + what + " is " + std::to_string(fraction) +
                               "; the " + out.family +
                               " family rotates whole heads, so it must be 1");
  }
  if (fraction > 1.0) {
    fail(ErrorKind::input, config.file() + ": " + what + " is " + std::to_string(fraction) +
                               "; it must be above 0 and at most 1");
  }
  const auto dim = static_cast<int64_t>(static_cast<double>(out.head_dim) * fraction);
  if (dim < 2 || dim % 2 != 0) {
    fail(ErrorKind::input, config.file() + ": " + std::to_string(dim) + " of the head's " +
                               std::to_string(out.head_dim) + " dims are rotated (head_dim, " +
                               what + "); an even number of at least 2 is needed");
  }
  return dim;
}

void read_rope(const Section& config, ModelConfig& out) {
  const std::optional<Section> rope = rope_section(config);
  out.rope.rotary_dim = rotary_dim_of(config, rope, out);
  const std::vector<std::string> theta_keys =
      out.family == "gpt-neox" ? std::vector<std::string>{"rotary_emb_base", "rope_theta"}
                               : std::vector<std::string>{"rope_theta"};
  out.rope.theta = agreed_positive(rope, "rope_theta", config, theta_keys, 10000.0);

  std::vector<float> freq = plain_inv_freq(out.rope.theta, out.rope.rotary_dim);
  const std::string type_key = rope && rope->has("rope_type") ? "rope_type" : "type";
  const std::string type = rope ? rope_type_of(*rope) : "default";
  if (type == "linear") {
    const float factor = static_cast<float>(rope->positive("factor", std::nullopt));
    for (float& f : freq) f /= factor;
  } else if (type == "llama3") {
    const auto max_positions = static_cast<double>(out.max_positions);
    const double in_rope = rope->positive("original_max_position_embeddings", max_positions);
    scale_llama3(*rope, config.positive("original_max_position_embeddings", in_rope), freq);
  } else if (type != "default") {
    rope->refuse(type_key, "this kind of RoPE is not implemented; known: default, linear, llama3");
  }
  if (type != "default") out.rope.scaling = type;
  out.rope.inv_freq.assign(freq.begin(), freq.end());
}

// --------------------------------------------------------------------------- bos and stop tokens

// Collects ids of one key that may hold an integer or a list of them. An id that no logit stands
// for can never be produced: it is left out, and said so.
void add_ids(const Section& section, const std::string& key, ModelConfig& out,
             std::set<int64_t>& ids) {
  const json* value = section.find(key);
  if (value == nullptr) return;
  const json list = value->is_array() ? *value : json::array({*value});
  for (const json& item : list) {
    if (!item.is_number_integer())
      section.refuse(key, "an integer or a list of integers is needed");
    const bool fits = (item.is_number_unsigned() || item.get<int64_t>() >= 0) &&
                      item.get<uint64_t>() < static_cast<uint64_t>(out.vocab_size);
    if (fits) {
      ids.insert(item.get<int64_t>());
    } else {
      out.notes.push_back(section.file() + ": " + key + " " + shown(item) +
                          " is outside the vocabulary of " + std::to_string(out.vocab_size) +
                          " and is not used");
    }
  }
}

void read_bos(const Section& section, ModelConfig& out) {
  std::set<int64_t> ids;
  add_ids(section, "bos_token_id", out, ids);
  if (!out.bos_id && !ids.empty()) out.bos_id = *ids.begin();
}

void set_stop_ids(const std::set<int64_t>& ids, ModelConfig& out) {
  out.stop_ids.assign(ids.begin(), ids.end());
}

// The id of a token by its text, from tokenizer_config.json or else tokenizer.json beside it.
std::optional<int64_t> token_id(const Section& tokenizer_config,
                                const std::filesystem::path& folder, const std::string& token) {
  if (const json* added = tokenizer_config.find("added_tokens_decoder");
      added && added->is_object()) {
    for (const auto& [id, entry] : added->items()) {
      const bool digits =
          !id.empty() && id.size() < 10 && id.find_first_not_of("0123456789") == std::string::npos;
      if (digits && entry.is_object() && entry.value("content", json()) == token)
        return std::stoll(id);
    }
  }
  const std::filesystem::path path = folder / "tokenizer.json";
  if (file_type_of(path) == std::filesystem::file_type::not_found) return std::nullopt;
  const json tokenizer = read_json(path);
  const Section root(tokenizer, path.string());
  if (const json* added = root.find("added_tokens"); added && added->is_array()) {
    for (const json& entry : *added) {
      if (!entry.is_object() || entry.value("content", json()) != token) continue;
      if (entry.contains("id") && entry["id"].is_number_integer())
        return entry["id"].get<int64_t>();
    }
  }
  const json::json_pointer vocab("/model/vocab");
  if (tokenizer.contains(vocab) && tokenizer[vocab].is_object()) {
    const auto it = tokenizer[vocab].find(token);
    if (it != tokenizer[vocab].end() && it->is_number_integer()) return it->get<int64_t>();
  }
  return std::nullopt;
}

void add_tokenizer_stop(const std::filesystem::path& folder, ModelConfig& out,
                        std::set<int64_t>& ids) {
  const std::filesystem::path path = folder / "tokenizer_config.json";
  if (file_type_of(path) == std::filesystem::file_type::not_found) return;
  const json content = read_json(path);
  const Section section(content, path.string());
  const json* eos = section.find("eos_token");
  if (eos == nullptr) return;
  const json& text = eos->is_object() && eos->contains("content") ? (*eos)["content"] : *eos;
  if (!text.is_string())
    section.refuse("eos_token", "a string or an object with content is needed");
  const auto token = text.get<std::string>();
  const auto id = token_id(section, folder, token);
  if (id && *id >= 0 && *id < out.vocab_size) {
    ids.insert(*id);
  } else {
    out.notes.push_back(path.string() + ": eos_token " + quoted(token) +
                        " has no id in the vocabulary of " + std::to_string(out.vocab_size) +
                        " and stops nothing");
  }
}

}  // namespace

const std::vector<std::string>& known_model_types() {
  static const std::vector<std::string> types = {"gpt_neox", "llama", "qwen2", "qwen3"};
  return types;
}

ModelConfig parse_model_config(const json& config, const std::string& file) {
  const Section section(config, file);
  ModelConfig out;
  out.raw = config;
  out.family = model_type_of(section);
  if (out.family == "gpt_neox") out.family = "gpt-neox";
  read_dimensions(section, out);
  if (out.family == "gpt-neox") {
    read_gpt_neox(section, out);
  } else {
    read_llama_like(section, out);
  }
  refuse_unsupported(section, out);
  read_rope(section, out);
  read_bos(section, out);
  std::set<int64_t> stop;
  add_ids(section, "eos_token_id", out, stop);
  set_stop_ids(stop, out);
  return out;
}

ModelConfig load_model_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  if (file_type_of(path) != std::filesystem::file_type::regular) {
    check_model_folder(folder);  // says what is there instead
    fail(ErrorKind::input, path.string() + ": not a file");
  }
  ModelConfig out = parse_model_config(read_json(path), path.string());
  std::set<int64_t> stop(out.stop_ids.begin(), out.stop_ids.end());
  const std::filesystem::path generation = folder / "generation_config.json";
  if (file_type_of(generation) != std::filesystem::file_type::not_found) {
    const json content = read_json(generation);
    const Section section(content, generation.string());
    read_bos(section, out);
    add_ids(section, "eos_token_id", out, stop);
  }
  add_tokenizer_stop(folder, out, stop);
  set_stop_ids(stop, out);
  return out;
}

}  // namespace graft
