#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/text/bpe.h"
#include "core/text/json_node.h"
#include "core/text/normalizer.h"

namespace graft::text {

struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool single_word = false;  // matches only between characters that are no word characters
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space behind it along
  bool normalized = false;   // is looked for in normalised text, itself normalised
  bool special = false;
};

// Finds the longest of a set of strings at each place of a text, from left to right.
class Trie {
 public:
  struct Match {
    std::size_t begin;
    std::size_t end;
    std::size_t value;
  };

  Trie();
  // The first value wins when `key` was inserted before. Empty keys are never found.
  void insert(std::string_view key, std::size_t value);
  bool empty() const { return ends_.empty(); }
  // The first match at or after `from`. O(text.size() * longest key).
  std::optional<Match> find(std::string_view text, std::size_t from) const;

 private:
  std::uint32_t step(std::uint32_t node, char byte) const;

  std::uint32_t node_count_ = 1;
  std::unordered_map<std::uint64_t, std::uint32_t> steps_;  // (node << 8 | byte) -> node
  std::unordered_map<std::uint32_t, std::size_t> ends_;     // node -> value
  std::vector<bool> starts_;                                // by first byte
};

// The "added_tokens" of tokenizer.json: strings that are found in the text before the model sees
// it.
class AddedTokens {
 public:
  AddedTokens() = default;
  // Throws Error(input) on duplicates and on ids that `tokenizers` would not give (it takes the
  // vocabulary's, else the next free ones, and only warns when the file says otherwise).
  AddedTokens(const JsonNode& node, const BpeModel& model, const Normalizer& normalizer);

  // Cuts `text` at the tokens that are looked for as `normalized` says: visit(stretch, -1) for text
  // between them, which is not empty, and visit("", id) for a token, in order.
  template <typename Visit>
  void split(std::string_view text, bool normalized, Visit&& visit) const;

  const AddedToken* find(std::int32_t id) const;
  std::optional<std::int32_t> token_to_id(std::string_view content) const;
  bool is_special(std::string_view content) const;
  std::int32_t largest_id() const { return by_id_.empty() ? -1 : by_id_.rbegin()->first; }

 private:
  struct Found {
    std::size_t begin;
    std::size_t end;
    std::int32_t id;
  };

  void read(const JsonNode& node, const BpeModel& model);
  std::int32_t next_free_id(const BpeModel& model) const;
  // The next token in `text` from `from` on; `done` is the end of the last one.
  std::optional<Found> next(const Trie& trie, std::string_view text, std::size_t& from,
                            std::size_t done) const;

  std::vector<AddedToken> tokens_;
  std::map<std::int32_t, std::size_t> by_id_;
  std::unordered_map<std::string, std::size_t> by_content_;
  Trie plain_;
  Trie normalized_;
};

template <typename Visit>
void AddedTokens::split(std::string_view text, bool normalized, Visit&& visit) const {
  const Trie& trie = normalized ? normalized_ : plain_;
  std::size_t from = 0;
  std::size_t done = 0;
  while (const std::optional<Found> found = next(trie, text, from, done)) {
    if (found->begin > done) visit(text.substr(done, found->begin - done), -1);
    visit(std::string_view(), found->id);
    done = found->end;
  }
  if (done < text.size()) visit(text.substr(done), -1);
}

}  // namespace graft::text
