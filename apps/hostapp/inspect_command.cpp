#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "apps/hostapp/commands.h"
#include "apps/hostapp/table.h"
#include "core/checkpoint/checkpoint.h"
#include "core/teacher/model_config.h"

namespace graft {
namespace {

std::string shape_of(const TensorView& tensor) {
  std::string text = "[";
  for (const auto size : tensor.shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::uint64_t elements(const TensorView& tensor) { return tensor.bytes / size_of(tensor.dtype); }

std::string describe_rope(const RopeConfig& rope, std::int64_t head_dim) {
  std::string text = "theta " + format_figure(rope.theta);
  if (rope.rotary_dim != head_dim)
    text += ", first " + std::to_string(rope.rotary_dim) + " dims of a head";
  if (!rope.scaling.empty()) text += ", " + rope.scaling + " scaling";
  return text;
}

void print_line(const std::string& what, const std::string& value) {
  std::cout << what << std::string(what.size() < 14 ? 14 - what.size() : 1, ' ') << value << "\n";
}

void print_config(const ModelConfig& config) {
  print_line("family", config.family);
  print_line("layers", std::to_string(config.n_layers));
  print_line("width", std::to_string(config.model_dim) + ", MLP " + std::to_string(config.mlp_dim));
  print_line("heads", std::to_string(config.n_heads) + " of " + std::to_string(config.head_dim) +
                          ", " + std::to_string(config.n_kv_heads) + " for keys and values");
  print_line("vocabulary",
             std::to_string(config.vocab_size) + (config.tied ? ", tied" : ", not tied"));
  print_line("positions", std::to_string(config.max_positions));
  print_line("RoPE", describe_rope(config.rope, config.head_dim));
  for (const std::string& note : config.notes) print_line("note", note);
}

std::string text_of(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// The member of that name, or null: a file may say anything.
const nlohmann::json& member(const nlohmann::json& object, const char* name) {
  static const nlohmann::json nothing;
  const auto found = object.find(name);  // end() for what is no object
  return found == object.end() ? nothing : *found;
}

void print_members(const nlohmann::json& object, const std::string& indent) {
  if (!object.is_object()) return;
  for (const auto& [key, value] : object.items()) print_line(indent + key, text_of(value));
}

void print_student(const nlohmann::json& section) {
  const nlohmann::json& mixer = member(section, "mixer");
  print_line("mixer", text_of(member(mixer, "alias")) + " " + text_of(member(mixer, "version")) +
                          " (" + text_of(member(mixer, "id")) + ")");
  print_line("converted", text_of(member(section, "layers")));
  print_members(member(mixer, "options"), "  ");
  print_members(member(section, "provenance"), "");
}

void print_weights(const Checkpoint& checkpoint, bool every_tensor) {
  struct Count {
    std::uint64_t tensors = 0, elements = 0, bytes = 0;
  };
  std::map<std::string, Count> by_type;
  Count all;
  std::vector<std::vector<std::string>> rows = {{"TENSOR", "TYPE", "SHAPE"}};
  for (const std::string& name : checkpoint.names()) {
    const TensorView& tensor = checkpoint.at(name);
    for (Count* count : {&all, &by_type[graft::name(tensor.dtype)]}) {
      count->tensors += 1;
      count->elements += elements(tensor);
      count->bytes += tensor.bytes;
    }
    rows.push_back({name, graft::name(tensor.dtype), shape_of(tensor)});
  }
  const auto describe = [](const Count& count) {
    return std::to_string(count.elements) + " parameters in " + std::to_string(count.tensors) +
           " tensors, " + format_figure(static_cast<double>(count.bytes) / (1024.0 * 1024.0)) +
           " MiB";
  };
  print_line("weights",
             describe(all) + ", " + std::to_string(checkpoint.files().size()) + " file(s)");
  for (const auto& [type, count] : by_type) print_line("  " + type, describe(count));
  if (every_tensor) std::cout << "\n" << format_table(rows);
}

}  // namespace

void run_inspect(const std::string& folder, bool every_tensor) {
  check_model_folder(folder);
  const ModelConfig config = load_model_config(folder);
  const Checkpoint checkpoint = Checkpoint::open(folder);
  print_line("model", folder);
  print_config(config);
  const nlohmann::json& section = member(config.raw, "graft");
  if (section.is_object()) print_student(section);
  print_weights(checkpoint, every_tensor);
}

}  // namespace graft
