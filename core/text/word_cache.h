#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace graft::text {

// Ids of words seen before. Bounded: when full it starts anew, and long words are not kept (they
// rarely come again).
class WordCache {
 public:
  static constexpr std::size_t kMostWords = std::size_t{1} << 16;
  static constexpr std::size_t kLongestWord = 64;

  // Valid until the next insert().
  std::optional<std::span<const std::int32_t>> find(std::string_view word) const {
    if (word.size() > kLongestWord) return std::nullopt;
    const auto found = places_.find(word);
    if (found == places_.end()) return std::nullopt;
    return std::span(ids_).subspan(found->second.begin, found->second.count);
  }

  void insert(std::string_view word, std::span<const std::int32_t> ids) {
    if (word.size() > kLongestWord) return;
    if (places_.size() == kMostWords) {
      places_.clear();
      ids_.clear();
    }
    const bool is_new =
        places_.try_emplace(std::string(word), Place{ids_.size(), ids.size()}).second;
    if (is_new) ids_.insert(ids_.end(), ids.begin(), ids.end());
  }

  std::size_t size() const { return places_.size(); }

 private:
  struct Place {
    std::size_t begin;
    std::size_t count;
  };
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view word) const {
      return std::hash<std::string_view>()(word);
    }
  };

  std::unordered_map<std::string, Place, Hash, std::equal_to<>> places_;
  std::vector<std::int32_t> ids_;
};

}  // namespace graft::text
