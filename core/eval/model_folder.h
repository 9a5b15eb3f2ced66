#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "core/teacher/model_config.h"
#include "core/text/tokenizer.h"

namespace graft {

// What is known of a teacher's or student's folder before its weights are read.
struct ModelFolder {
  std::filesystem::path path;
  ModelConfig config;
  Tokenizer tokenizer;
  bool attends;  // at least one layer is attention: a teacher or a hybrid
};

// Error(input) for what is no model folder (with the one that may be meant), for a config.json or
// tokenizer.json that cannot be used, and for two that do not fit each other. `say` gets what a
// user should be told of them.
ModelFolder open_model_folder(const std::filesystem::path& folder,
                              const std::function<void(const std::string&)>& say = {});

// A model's vocabulary may be padded beyond the tokenizer's, but not the reverse: Error(input).
void check_vocabulary(const Tokenizer& tokenizer, const ModelConfig& config,
                      const std::filesystem::path& folder);

// Error(input) when tokens of the one mean something else to the other.
void check_same_tokenizer(const ModelFolder& model, const ModelFolder& teacher);

// "KEY: 300 tokens are more than the model's context of 256", or "" when they are not.
std::string beyond_context(const ModelConfig& config, std::int64_t tokens, const std::string& key);

// Error(usage) for tokens beyond the context of a model with attention; a model without has no such
// limit, and it is only warned.
void check_context(const ModelFolder& model, std::int64_t tokens, const std::string& key);

}  // namespace graft
