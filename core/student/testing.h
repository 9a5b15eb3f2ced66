#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/file.h"
#include "core/base/testing.h"
#include "core/loader/registry.h"
#include "core/student/model.h"
#include "core/student/torch_abi.h"
#include "core/teacher/testing.h"

// For tests only: a teacher of two layers that reads and writes bytes, and the plugins of this
// build tree.

namespace graft {

// GPT-2's spelling of a byte: itself where printable, else a character from U+0100 on.
inline std::string spelled_byte(int byte) {
  const auto printable = [](int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 128) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
}

// A tokenizer.json whose tokens are the 256 bytes.
inline std::string byte_tokenizer_json() {
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[spelled_byte(byte)] = byte;
  const nlohmann::json byte_level = {{"type", "ByteLevel"},
                                     {"add_prefix_space", false},
                                     {"trim_offsets", true},
                                     {"use_regex", true}};
  return nlohmann::json{
      {"version", "1.0"},
      {"added_tokens", nlohmann::json::array()},
      {"normalizer", nullptr},
      {"pre_tokenizer", byte_level},
      {"post_processor", nullptr},
      {"decoder", byte_level},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}}
      .dump();
}

// The golden Llama (2 layers, 4 heads of 16, 2 of them for keys, 320 tokens) with a byte tokenizer,
// in `folder`.
inline std::filesystem::path make_tiny_teacher(const std::filesystem::path& folder,
                                               const std::string& model = "llama") {
  ModelFiles::golden(model).write(folder);
  write_file_atomically(folder / "tokenizer.json", byte_tokenizer_json());
  write_file_atomically(folder / "generation_config.json",
                        read_text(kModels / model / "generation_config.json"));
  return folder;
}

// Prose of a small grammar, not the same for two seeds; `bytes` long.
inline std::string made_up_prose(std::uint64_t seed, std::size_t bytes) {
  static const char* const words[] = {"the ",   "river ",  "old ",     "walked ", "over ",
                                      "stone ", "bridge ", "and ",     "saw ",    "a ",
                                      "light ", "in ",     "window, ", "where ",  "nobody ",
                                      "had ",   "lived ",  "for ",     "years. "};
  std::string text;
  while (text.size() < bytes) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    text += words[(seed >> 33) % std::size(words)];
  }
  text.resize(bytes);
  return text;
}

// The plugins of this build tree, served as the host serves them.
class BuiltPlugins {
 public:
  BuiltPlugins()
      : services_(torch_host_settings()),
        registry_({std::filesystem::path(GRAFT_BUILD_DIR) / "lib/graft/plugins"}, services_) {}
  PluginRegistry& registry() { return registry_; }

 private:
  HostServices services_;
  PluginRegistry registry_;
};

}  // namespace graft
