#pragma once

#include <cstdint>
#include <string>

#include "graft/graft.h"

namespace graft {

// Versions of the plugin ABI, both ends included.
struct AbiRange {
  std::uint32_t min, max;

  bool contains(std::uint32_t abi) const { return min <= abi && abi <= max; }
  bool overlaps(const AbiRange& other) const { return min <= other.max && other.min <= max; }
};

// What this host speaks: a plugin built for an earlier minor works as it is.
inline constexpr AbiRange kHostAbi{GRAFT_ABI(GRAFT_ABI_MAJOR(GRAFT_ABI_CURRENT), 0),
                                   GRAFT_ABI_CURRENT};

inline std::string abi_text(std::uint32_t abi) {
  return std::to_string(GRAFT_ABI_MAJOR(abi)) + "." + std::to_string(GRAFT_ABI_MINOR(abi));
}

// "1.0", "1.0 to 1.2".
inline std::string abi_text(const AbiRange& range) {
  return abi_text(range.min) + (range.min == range.max ? "" : " to " + abi_text(range.max));
}

}  // namespace graft
