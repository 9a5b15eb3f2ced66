#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace graft {

namespace text {
class TokenizerImpl;
class DecodeChain;
}  // namespace text

// A byte-pair-encoding tokenizer read from a Hugging Face tokenizer.json. Token ids equal those of
// the `tokenizers` library. Immutable: every const member may be called from several threads at
// once. Copies are cheap and share everything.
class Tokenizer {
 public:
  // Throws Error(input) naming file and key when the file is missing, malformed, or uses a
  // component that is not supported.
  static Tokenizer from_file(const std::filesystem::path& path);

  // The same from text already in memory; `name` stands for the file in messages.
  static Tokenizer from_json(std::string_view json, const std::string& name);

  // Token ids of `text`. Ill-formed UTF-8 counts as U+FFFD, one for each maximal ill-formed part,
  // as Python's bytes.decode("utf-8", "replace") has it. `add_special_tokens` applies the file's
  // post-processor (a BOS token, where there is one). Time is O(n log n) at worst in the bytes of
  // text.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens = false) const;

  // The text of `ids`, always well-formed UTF-8: bytes that form no character become U+FFFD. An id
  // that no token has adds nothing (models pad their vocabulary beyond the tokenizer's).
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens = false) const;

  // One more than the highest token id, added tokens included.
  int32_t vocab_size() const;

  // Ids of tokens as they are spelled in tokenizer.json (byte-level spelling, "Ġthe" for " the").
  std::optional<int32_t> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(int32_t id) const;
  bool is_special(int32_t id) const;

  // sha256 of the tokenizer.json, lower-case hex.
  const std::string& content_hash() const;

  // What the file asks for and is not done, one sentence each; for the log.
  const std::vector<std::string>& notes() const;

 private:
  friend class StreamDecoder;
  explicit Tokenizer(std::shared_ptr<const text::TokenizerImpl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const text::TokenizerImpl> impl_;
};

// Decodes ids as they come, for printing while generating. push() returns the characters that
// became complete, never part of one; what push() and finish() returned, joined, equals
// Tokenizer::decode(). Not for use by several threads at once.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens = false);
  ~StreamDecoder();
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;

  std::string push(int32_t id);

  // The rest (U+FFFD for a character cut short); the decoder then starts anew.
  std::string finish();

 private:
  std::shared_ptr<const text::TokenizerImpl> tokenizer_;
  bool skip_special_tokens_;
  std::unique_ptr<text::DecodeChain> chain_;
};

}  // namespace graft
