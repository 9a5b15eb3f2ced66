#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "graft/graft.h"

namespace graft {

// A struct of the other side at the size we know: what an older side did not have is zero, what a
// newer one has behind is left out. Nobody reads past struct_size in any other way.
template <class Struct>
Struct full_copy(const Struct* given) {
  Struct full{};
  if (given != nullptr) {
    std::memcpy(&full, given, std::min<std::size_t>(given->struct_size, sizeof full));
  }
  full.struct_size = sizeof full;
  return full;
}

inline const char* text_or_empty(const char* text) { return text == nullptr ? "" : text; }

}  // namespace graft
