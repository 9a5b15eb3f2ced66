#include "core/text/shared_span.h"

#include <unordered_set>

namespace graft {
namespace {

// Polynomial rolling hash modulo 2^64 of the last `length` tokens. A hit is confirmed by nothing
// else, since one false alarm in 2^64 / 1e8 pairs will not be met.
class RollingHash {
 public:
  explicit RollingHash(std::size_t length) : length_(length) {
    for (std::size_t i = 1; i < length; ++i) top_ *= kBase;
  }
  // Takes a token; `oldest` is the one `length` before it, where there is one. True when `length`
  // tokens are in.
  bool add(std::int32_t token, std::int32_t oldest) {
    if (count_ >= length_) value_ -= number(oldest) * top_;
    value_ = value_ * kBase + number(token);
    return ++count_ >= length_;
  }
  std::uint64_t value() const { return value_; }

 private:
  static constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15u;
  static std::uint64_t number(std::int32_t token) { return static_cast<std::uint64_t>(token) + 1; }

  std::size_t length_, count_ = 0;
  std::uint64_t top_ = 1, value_ = 0;
};

}  // namespace

const Document* sharing_document(const std::vector<Document>& trained,
                                 const std::vector<std::span<const std::int32_t>>& evaluated) {
  constexpr auto length = static_cast<std::size_t>(kSharedSpan);
  std::unordered_set<std::uint64_t> seen;
  for (const std::span<const std::int32_t> part : evaluated) {
    RollingHash hash(length);
    for (std::size_t i = 0; i < part.size(); ++i)
      if (hash.add(part[i], i < length ? 0 : part[i - length])) seen.insert(hash.value());
  }
  // One stream: a document shorter than the span still counts with its neighbours.
  RollingHash hash(length);
  std::vector<std::int32_t> last(length);
  std::size_t at = 0;
  for (const Document& document : trained)
    for (const std::int32_t token : document.tokens) {
      std::int32_t& oldest = last[at++ % length];
      const bool full = hash.add(token, oldest);
      oldest = token;
      if (full && seen.contains(hash.value())) return &document;
    }
  return nullptr;
}

}  // namespace graft
