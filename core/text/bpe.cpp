#include "core/text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/text/utf8.h"

namespace graft::text {

namespace {

constexpr std::int32_t kAbsent = -1;

std::string byte_token(unsigned byte) {
  constexpr std::string_view digits = "0123456789ABCDEF";
  return std::string("<0x") + digits[byte >> 4U] + digits[byte & 15U] + '>';
}

}  // namespace

MergeTable::MergeTable(std::size_t expected) {
  // At most half full.
  const std::size_t slots = std::bit_ceil(std::max<std::size_t>(2 * expected, 16));
  entries_.resize(slots);
  mask_ = slots - 1;
  shift_ = 64U - static_cast<unsigned>(std::countr_zero(slots));
}

void MergeTable::insert(std::int32_t left, std::int32_t right, Merge merge) {
  for (std::size_t slot = hash(key(left, right));; ++slot) {
    Entry& entry = entries_[slot & mask_];
    if (entry.key != kEmpty && entry.key != key(left, right)) continue;
    entry = {key(left, right), merge};
    return;
  }
}

BpeModel::BpeModel(const JsonNode& node) : file_(node.file()) {
  read_options(node);
  read_vocab(node.at("vocab"));
  read_merges(node.at("merges"));
}

void BpeModel::read_options(const JsonNode& node) {
  // Files of before version 0.9 of `tokenizers` do not name the type.
  if (const auto type = node.find("type"); type && type->string() != "BPE") {
    node.fail_unsupported_type("BPE");
  }
  if (const auto dropout = node.find("dropout")) {
    const nlohmann::json& value = dropout->value();
    if (!value.is_number() || value.get<double>() != 0.0) {
      dropout->fail("only null and 0 are supported (the same text would have changing ids), got " +
                    value.dump());
    }
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto affix = node.find(key);
    if (affix && !affix->string().empty()) {
      affix->fail("only null and \"\" are supported, got " + quoted(affix->string()));
    }
  }
  if (const auto token = node.find("unk_token")) unk_token_ = token->string();
  const auto flag = [&](const char* key) {
    const auto value = node.find(key);
    return value && value->boolean();
  };
  fuse_unk_ = flag("fuse_unk");
  byte_fallback_ = flag("byte_fallback");
  ignore_merges_ = flag("ignore_merges");
}

void BpeModel::read_vocab(const JsonNode& node) {
  const nlohmann::json& vocab = node.object();
  if (vocab.empty()) node.fail("it has no tokens");
  std::int64_t largest = -1;
  for (const auto& [token, id] : vocab.items()) {
    largest = std::max(largest, node.child(id, quoted(token)).integer(0, kLargestId));
  }
  std::vector<bool> taken(static_cast<std::size_t>(largest) + 1);
  tokens_by_id_.resize(taken.size());
  ids_.reserve(vocab.size());
  few_character_ids_.fill(kAbsent);
  for (const auto& [token, value] : vocab.items()) {
    const auto id = value.get<std::int32_t>();
    const auto index = static_cast<std::size_t>(id);
    if (taken[index]) {
      node.fail(quoted(tokens_by_id_[index]) + " and " + quoted(token) + " both have the id " +
                std::to_string(id));
    }
    taken[index] = true;
    tokens_by_id_[index] = token;
    ids_.emplace(tokens_by_id_[index], id);
    std::size_t length = 0;
    const char32_t character = token.empty() ? kFewCharacters : next_character(token, length);
    if (length == token.size() && character < kFewCharacters) few_character_ids_[character] = id;
  }
  find_byte_tokens();
}

void BpeModel::find_byte_tokens() {
  has_all_byte_tokens_ = true;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const auto id = token_to_id(byte_token(byte));
    byte_token_ids_[byte] = id.value_or(kAbsent);
    has_all_byte_tokens_ = has_all_byte_tokens_ && id;
  }
}

std::int32_t BpeModel::merge_part(const JsonNode& merge, std::string_view token) const {
  const auto id = token_to_id(token);
  if (!id) merge.fail("the token " + quoted(token) + " is not in model.vocab");
  return *id;
}

// A merge is "left right", or ["left", "right"] since version 0.20 of `tokenizers`.
void BpeModel::read_merges(const JsonNode& node) {
  const nlohmann::json& merges = node.array();
  merges_ = MergeTable(merges.size());
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const nlohmann::json& value = merges[i];
    const auto place = [&] { return node.child(value, i); };
    std::string_view left;
    std::string_view right;
    if (value.is_string()) {
      const std::string_view both = value.get_ref<const std::string&>();
      if (both.starts_with("#version")) continue;
      const std::size_t space = both.find(' ');
      if (space == both.npos || both.find(' ', space + 1) != both.npos) {
        place().fail("expected two tokens with a space between them, got " + quoted(both));
      }
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else if (value.is_array() && value.size() == 2 && value[0].is_string() &&
               value[1].is_string()) {
      left = value[0].get_ref<const std::string&>();
      right = value[1].get_ref<const std::string&>();
    } else {
      place().fail("expected \"left right\" or [\"left\", \"right\"]");
    }
    const JsonNode merge = place();
    const std::int32_t left_id = merge_part(merge, left);
    const std::int32_t right_id = merge_part(merge, right);
    const std::int32_t merged = merge_part(merge, std::string(left).append(right));
    merges_.insert(left_id, right_id, {static_cast<std::uint32_t>(merged_by_rank_.size()), merged});
    merged_by_rank_.push_back(merged);
  }
}

std::optional<std::int32_t> BpeModel::token_to_id(std::string_view token) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const std::string* BpeModel::id_to_token(std::int32_t id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= tokens_by_id_.size()) return nullptr;
  const std::string& token = tokens_by_id_[static_cast<std::size_t>(id)];
  // An id in a hole has the empty string, which may also be a token.
  if (token.empty() && token_to_id(token) != id) return nullptr;
  return &token;
}

std::int32_t BpeModel::character_id(std::string_view character) const {
  std::size_t position = 0;
  if (character.size() <= 2) {
    const char32_t c = next_character(character, position);
    if (c < kFewCharacters) return few_character_ids_[c];
  }
  return token_to_id(character).value_or(kAbsent);
}

// One symbol for each character. The order in which an unknown character and byte tokens come out
// when only some bytes have tokens follows `tokenizers`, models/bpe/model.rs.
void BpeModel::to_symbols(std::string_view word, std::vector<Symbol>& symbols) const {
  symbols.clear();
  const auto add = [&](std::int32_t id) { symbols.push_back({id, 0, 0}); };
  bool unknown_pending = false;
  std::int32_t unknown = kAbsent;
  const auto flush_unknown = [&] {
    if (unknown_pending) add(unknown);
    unknown_pending = false;
  };
  for (std::size_t position = 0; position < word.size();) {
    const std::string_view character = word.substr(position, character_length(word[position]));
    position += character.size();
    if (const std::int32_t id = character_id(character); id != kAbsent) {
      flush_unknown();
      add(id);
      continue;
    }
    const auto id_of = [&](char byte) { return byte_token_ids_[static_cast<unsigned char>(byte)]; };
    if (byte_fallback_ && std::all_of(character.begin(), character.end(),
                                      [&](char byte) { return id_of(byte) != kAbsent; })) {
      for (const char byte : character) add(id_of(byte));
      continue;
    }
    if (!unk_token_) continue;
    if (unknown == kAbsent) {
      const auto id = token_to_id(*unk_token_);
      if (!id) {
        fail(ErrorKind::input, file_ + ": model.unk_token: " + quoted(*unk_token_) +
                                   " is not in model.vocab, but the character " +
                                   quoted(character) + " needs it");
      }
      unknown = *id;
    }
    if (!fuse_unk_) flush_unknown();
    unknown_pending = true;
  }
  flush_unknown();
}

void BpeModel::encode(std::string_view word, Workspace& workspace,
                      std::vector<std::int32_t>& ids) const {
  if (ignore_merges_) {
    if (const auto id = token_to_id(word)) {
      ids.push_back(*id);
      return;
    }
  }
  if (word.size() >= kNone) {
    fail(ErrorKind::input, "a word of 4 GiB or more cannot be tokenised; split the text");
  }
  to_symbols(word, workspace.symbols);
  merge_all(workspace);
  for (const Symbol& symbol : workspace.symbols) {
    if (symbol.id != kAbsent) ids.push_back(symbol.id);
  }
}

// Merges the pair of lowest rank, the leftmost of equals, until none is left. The queue holds
// rank and position of pairs seen so far; each merge adds at most two, so that n characters need
// O(n log n) time. An entry whose pair has changed since is passed over, unless the pair now there
// gives the same token (as `tokenizers` has it, models/bpe/word.rs).
void BpeModel::merge_all(Workspace& workspace) const {
  std::vector<Symbol>& symbols = workspace.symbols;
  std::vector<std::uint64_t>& queue = workspace.queue;
  const auto count = static_cast<std::uint32_t>(symbols.size());
  queue.clear();
  const auto entry_of = [&](std::uint32_t left, std::uint32_t right, auto&& use) {
    if (const MergeTable::Merge* merge = merges_.find(symbols[left].id, symbols[right].id)) {
      use((static_cast<std::uint64_t>(merge->rank) << 32U) | left);
    }
  };
  const auto push = [&](std::uint64_t entry) {
    queue.push_back(entry);
    std::push_heap(queue.begin(), queue.end(), std::greater<>());
  };
  for (std::uint32_t i = 0; i < count; ++i) {
    symbols[i].previous = i == 0 ? kNone : i - 1;
    symbols[i].next = i + 1 == count ? kNone : i + 1;
    if (i + 1 < count) entry_of(i, i + 1, [&](std::uint64_t entry) { queue.push_back(entry); });
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());
  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    const std::uint64_t entry = queue.back();
    queue.pop_back();
    ++workspace.steps;
    const auto at = static_cast<std::uint32_t>(entry);
    Symbol& left = symbols[at];
    if (left.id == kAbsent || left.next == kNone) continue;
    Symbol& right = symbols[left.next];
    const std::int32_t merged = merged_by_rank_[entry >> 32U];
    const MergeTable::Merge* now = merges_.find(left.id, right.id);
    if (now == nullptr || now->merged != merged) continue;
    left.id = merged;
    left.next = right.next;
    right.id = kAbsent;
    if (left.next != kNone) symbols[left.next].previous = at;
    if (left.previous != kNone) entry_of(left.previous, at, push);
    if (left.next != kNone) entry_of(at, left.next, push);
  }
}

}  // namespace graft::text
