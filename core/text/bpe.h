#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/text/json_node.h"

namespace graft::text {

// A hash table from pairs of ids to merges; built once, then only read.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank;   // lower is merged first
    std::int32_t merged;  // the id of the joined token
  };

  explicit MergeTable(std::size_t expected = 0);
  void insert(std::int32_t left, std::int32_t right, Merge merge);
  const Merge* find(std::int32_t left, std::int32_t right) const {
    for (std::size_t slot = hash(key(left, right));; ++slot) {
      const Entry& entry = entries_[slot & mask_];
      if (entry.key == key(left, right)) return &entry.merge;
      if (entry.key == kEmpty) return nullptr;
    }
  }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  struct Entry {
    std::uint64_t key = kEmpty;
    Merge merge{};
  };

  static std::uint64_t key(std::int32_t left, std::int32_t right) {
    return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32U) |
           static_cast<std::uint32_t>(right);
  }
  std::size_t hash(std::uint64_t key) const {
    // Fibonacci hashing (Knuth, TAOCP vol. 3, 6.4): the high bits of key * 2^64 / phi.
    return static_cast<std::size_t>((key * 0x9E3779B97F4A7C15U) >> shift_);
  }

  std::vector<Entry> entries_;
  std::size_t mask_ = 0;
  unsigned shift_ = 0;
};

// The "model" of tokenizer.json: byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) of one
// word at a time.
class BpeModel {
 public:
  // Ids above this are refused: no vocabulary is that large, and tables are indexed by id.
  static constexpr std::int64_t kLargestId = (std::int64_t{1} << 24) - 1;

  struct Symbol {
    std::int32_t id;  // -1: merged into the one before
    std::uint32_t previous;
    std::uint32_t next;
  };

  // Reused from word to word; one for each thread.
  struct Workspace {
    std::vector<Symbol> symbols;
    std::vector<std::uint64_t> queue;
    // Entries taken from the queue so far: the work done.
    std::uint64_t steps = 0;
  };

  explicit BpeModel(const JsonNode& node);
  // A copy's ids_ would point into the original.
  BpeModel(const BpeModel&) = delete;
  BpeModel& operator=(const BpeModel&) = delete;

  // Appends the ids of `word` (well-formed UTF-8). Throws Error(input) when a character is in need
  // of an unk_token that the vocabulary lacks.
  void encode(std::string_view word, Workspace& workspace, std::vector<std::int32_t>& ids) const;

  std::optional<std::int32_t> token_to_id(std::string_view token) const;
  // Null when no token has this id.
  const std::string* id_to_token(std::int32_t id) const;
  // How many tokens there are; ids may have holes, so the largest may be higher.
  std::size_t size() const { return ids_.size(); }
  std::int32_t largest_id() const { return static_cast<std::int32_t>(tokens_by_id_.size()) - 1; }

  // Whether a character outside the vocabulary vanishes (no unk_token and no complete
  // byte_fallback).
  bool drops_unknown() const { return !unk_token_ && !(byte_fallback_ && has_all_byte_tokens_); }

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  // Characters below are looked up in an array: ASCII and the byte-level alphabet.
  static constexpr char32_t kFewCharacters = 0x144;

  void read_options(const JsonNode& node);
  void read_vocab(const JsonNode& node);
  void read_merges(const JsonNode& node);
  void find_byte_tokens();
  std::int32_t merge_part(const JsonNode& merge, std::string_view token) const;

  std::int32_t character_id(std::string_view character) const;
  void to_symbols(std::string_view word, std::vector<Symbol>& symbols) const;
  void merge_all(Workspace& workspace) const;

  std::string file_;
  std::optional<std::string> unk_token_;
  bool fuse_unk_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
  bool has_all_byte_tokens_ = false;

  std::vector<std::string> tokens_by_id_;
  std::unordered_map<std::string_view, std::int32_t> ids_;  // the keys lie in tokens_by_id_
  std::array<std::int32_t, kFewCharacters> few_character_ids_{};
  std::array<std::int32_t, 256> byte_token_ids_{};
  MergeTable merges_;
  std::vector<std::int32_t> merged_by_rank_;
};

}  // namespace graft::text
