#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/testing.h"
#include "core/text/byte_level.h"
#include "core/text/tokenizer.h"
#include "core/text/utf8.h"

// For tests only.

namespace graft::text {

using Ids = std::vector<std::int32_t>;

inline std::string golden(const std::string& name) {
  return std::string(GRAFT_TEST_DATA) + "/tokenizers/" + name;
}

inline nlohmann::json golden_json(const std::string& name) {
  std::ifstream file(golden(name));
  return nlohmann::json::parse(file);
}

inline std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// The spelling of one byte in the byte-level alphabet.
inline std::string spelling(int byte) {
  std::string spelled;
  append_character(spelled, byte_to_character(static_cast<std::uint8_t>(byte)));
  return spelled;
}

// A tokenizer.json with a byte-level BPE: each byte is its own id; `merges` ("a b") follow, each
// with the id of the token it makes.
inline nlohmann::json byte_level_json(const std::vector<std::string>& merges = {}) {
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[spelling(byte)] = byte;
  for (const std::string& merge : merges) {
    const std::size_t space = merge.find(' ');
    vocab[merge.substr(0, space) + merge.substr(space + 1)] = vocab.size();
  }
  return {{"version", "1.0"},
          {"added_tokens", nlohmann::json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
}

inline nlohmann::json added_token(const std::string& content, int id,
                                  const std::vector<std::string>& flags = {}) {
  nlohmann::json token = {{"id", id},        {"content", content}, {"single_word", false},
                          {"lstrip", false}, {"rstrip", false},    {"normalized", false},
                          {"special", false}};
  for (const std::string& flag : flags) token[flag] = true;
  return token;
}

inline Tokenizer tokenizer_of(const nlohmann::json& json) {
  return Tokenizer::from_json(json.dump(), "test.json");
}

}  // namespace graft::text
