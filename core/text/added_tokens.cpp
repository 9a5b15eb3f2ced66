#include "core/text/added_tokens.h"

#include <algorithm>

#include "core/base/suggest.h"
#include "core/text/utf8.h"

namespace graft::text {

namespace {

constexpr std::uint32_t kNoNode = 0;  // the root is nobody's child

bool word_character_before(std::string_view text, std::size_t position) {
  return position > 0 && is_word_character(previous_character(text, position));
}

bool word_character_at(std::string_view text, std::size_t position) {
  return position < text.size() && is_word_character(next_character(text, position));
}

// Where the white space that ends at `position` begins, but not before `limit`.
std::size_t white_space_begin(std::string_view text, std::size_t position, std::size_t limit) {
  while (position > limit) {
    std::size_t before = position;
    if (!is_white_space(previous_character(text, before))) break;
    position = before;
  }
  return position;
}

std::size_t white_space_end(std::string_view text, std::size_t position) {
  while (position < text.size()) {
    std::size_t behind = position;
    if (!is_white_space(next_character(text, behind))) break;
    position = behind;
  }
  return position;
}

}  // namespace

Trie::Trie() : starts_(256) {}

std::uint32_t Trie::step(std::uint32_t node, char byte) const {
  const auto found = steps_.find((std::uint64_t{node} << 8U) | static_cast<unsigned char>(byte));
  return found == steps_.end() ? kNoNode : found->second;
}

void Trie::insert(std::string_view key, std::size_t value) {
  if (key.empty()) return;
  starts_[static_cast<unsigned char>(key.front())] = true;
  std::uint32_t node = 0;
  for (const char byte : key) {
    const auto [entry, is_new] = steps_.try_emplace(
        (std::uint64_t{node} << 8U) | static_cast<unsigned char>(byte), node_count_);
    if (is_new) ++node_count_;
    node = entry->second;
  }
  ends_.try_emplace(node, value);
}

std::optional<Trie::Match> Trie::find(std::string_view text, std::size_t from) const {
  if (ends_.empty()) return std::nullopt;
  for (; from < text.size(); ++from) {
    if (!starts_[static_cast<unsigned char>(text[from])]) continue;
    std::optional<Match> longest;
    std::uint32_t node = 0;
    for (std::size_t end = from; end < text.size();) {
      node = step(node, text[end++]);
      if (node == kNoNode) break;
      if (const auto value = ends_.find(node); value != ends_.end()) {
        longest = Match{from, end, value->second};
      }
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

AddedTokens::AddedTokens(const JsonNode& node, const BpeModel& model,
                         const Normalizer& normalizer) {
  for (const JsonNode& element : node.elements()) read(element, model);
  // Special tokens first: of two that normalise to the same string, one of them is found.
  Regex::Workspace workspace;
  for (const bool special : {true, false}) {
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      const AddedToken& token = tokens_[i];
      if (token.special != special) continue;
      if (token.normalized) {
        normalized_.insert(normalizer.apply(token.content, workspace), i);
      } else {
        plain_.insert(token.content, i);
      }
    }
  }
}

std::int32_t AddedTokens::next_free_id(const BpeModel& model) const {
  return std::max(largest_id() + 1, static_cast<std::int32_t>(model.size()));
}

void AddedTokens::read(const JsonNode& node, const BpeModel& model) {
  AddedToken token;
  token.id = static_cast<std::int32_t>(node.at("id").integer(0, BpeModel::kLargestId));
  token.content = node.at("content").string();
  token.single_word = node.at("single_word").boolean();
  token.lstrip = node.at("lstrip").boolean();
  token.rstrip = node.at("rstrip").boolean();
  token.normalized = node.at("normalized").boolean();
  token.special = node.at("special").boolean();
  if (token.content.empty()) node.at("content").fail("an added token cannot be empty");
  if (by_content_.contains(token.content)) {
    node.at("content").fail("the token " + quoted(token.content) + " stands here twice");
  }
  const auto in_vocab = model.token_to_id(token.content);
  const std::int32_t expected = in_vocab ? *in_vocab : next_free_id(model);
  if (token.id != expected) {
    node.at("id").fail("the token " + quoted(token.content) + " has the id " +
                       std::to_string(token.id) + ", but " +
                       (in_vocab ? "model.vocab says " : "the next free one is ") +
                       std::to_string(expected));
  }
  if (const std::string* other = model.id_to_token(token.id); other && !in_vocab) {
    node.at("id").fail("the token " + quoted(token.content) + " has the id " +
                       std::to_string(token.id) + ", which " + quoted(*other) +
                       " has in model.vocab");
  }
  by_id_.emplace(token.id, tokens_.size());
  by_content_.emplace(token.content, tokens_.size());
  tokens_.push_back(std::move(token));
}

std::optional<AddedTokens::Found> AddedTokens::next(const Trie& trie, std::string_view text,
                                                    std::size_t& from, std::size_t done) const {
  while (const std::optional<Trie::Match> match = trie.find(text, from)) {
    from = match->end;
    const AddedToken& token = tokens_[match->value];
    if (token.single_word &&
        (word_character_before(text, match->begin) || word_character_at(text, match->end))) {
      continue;
    }
    Found found{match->begin, match->end, token.id};
    if (token.lstrip) found.begin = white_space_begin(text, found.begin, done);
    if (token.rstrip) found.end = white_space_end(text, found.end);
    return found;
  }
  return std::nullopt;
}

const AddedToken* AddedTokens::find(std::int32_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

std::optional<std::int32_t> AddedTokens::token_to_id(std::string_view content) const {
  const auto found = by_content_.find(std::string(content));
  if (found == by_content_.end()) return std::nullopt;
  return tokens_[found->second].id;
}

bool AddedTokens::is_special(std::string_view content) const {
  const auto found = by_content_.find(std::string(content));
  return found != by_content_.end() && tokens_[found->second].special;
}

}  // namespace graft::text
