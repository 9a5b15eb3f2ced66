#include "core/eval/model_folder.h"

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/message.h"
#include "core/checkpoint/checkpoint.h"
#include "core/student/student_io.h"

namespace graft {
namespace {

bool has_attention(const std::filesystem::path& folder, const ModelConfig& config) {
  if (!is_student(folder)) return true;
  return static_cast<std::int64_t>(read_student_section(folder).layers.size()) < config.n_layers;
}

}  // namespace

ModelFolder open_model_folder(const std::filesystem::path& folder,
                              const std::function<void(const std::string&)>& say) {
  check_model_folder(folder);
  ModelConfig config = load_model_config(folder);
  const bool attends = has_attention(folder, config);
  Tokenizer tokenizer = Tokenizer::from_file(folder / "tokenizer.json");
  check_vocabulary(tokenizer, config, folder);
  if (say) {
    for (const std::string& note : config.notes) say(note);
    for (const std::string& note : tokenizer.notes()) say(note);
  }
  return {folder, std::move(config), std::move(tokenizer), attends};
}

void check_vocabulary(const Tokenizer& tokenizer, const ModelConfig& config,
                      const std::filesystem::path& folder) {
  if (tokenizer.vocab_size() <= config.vocab_size) return;
  fail(ErrorKind::input, (folder / "tokenizer.json").string() + ": the tokenizer has " +
                             std::to_string(tokenizer.vocab_size()) + " tokens, the model only " +
                             std::to_string(config.vocab_size) + " (vocab_size in config.json)");
}

void check_same_tokenizer(const ModelFolder& model, const ModelFolder& teacher) {
  if (model.tokenizer.content_hash() == teacher.tokenizer.content_hash()) return;
  fail(ErrorKind::input, quoted_path(teacher.path / "tokenizer.json") + " differs from " +
                             quoted_path(model.path / "tokenizer.json") +
                             ": tokens of the two cannot be compared; give the teacher that the "
                             "student was made from");
}

std::string beyond_context(const ModelConfig& config, std::int64_t tokens, const std::string& key) {
  if (tokens <= config.max_positions) return "";
  return key + ": " + std::to_string(tokens) + " tokens are more than the model's context of " +
         std::to_string(config.max_positions);
}

void check_context(const ModelFolder& model, std::int64_t tokens, const std::string& key) {
  const std::string beyond = beyond_context(model.config, tokens, key);
  if (beyond.empty()) return;
  if (model.attends)
    fail(ErrorKind::usage,
         beyond + " (max_position_embeddings in " + quoted_path(model.path / "config.json") + ")");
  log_warning(beyond + "; without attention it runs, but beyond what its teacher was trained for");
}

}  // namespace graft
