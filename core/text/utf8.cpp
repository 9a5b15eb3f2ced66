#include "core/text/utf8.h"

#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <cstdint>

namespace graft::text {

// ICU's macros convert freely between int, char and uint8_t.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"

namespace {

// A character has at most four bytes: the macros, which count in int32_t, see no more of a text.
constexpr std::size_t kLongest = U8_MAX_LENGTH;

// The code point at `position`, moved behind it; -1 for a maximal ill-formed part.
UChar32 next_or_ill_formed(std::string_view bytes, std::size_t& position) {
  const char* s = bytes.data() + position;
  const auto length = static_cast<int32_t>(std::min(bytes.size() - position, kLongest));
  int32_t i = 0;
  UChar32 c = 0;
  U8_NEXT(s, i, length, c);
  position += static_cast<std::size_t>(i);
  return c;
}

}  // namespace

char32_t next_character(std::string_view bytes, std::size_t& position) {
  const UChar32 c = next_or_ill_formed(bytes, position);
  return c < 0 ? kReplacement : static_cast<char32_t>(c);
}

char32_t previous_character(std::string_view bytes, std::size_t& position) {
  const std::size_t start = position - std::min(position, kLongest);
  const char* s = bytes.data() + start;
  auto i = static_cast<int32_t>(position - start);
  UChar32 c = 0;
  U8_PREV(s, 0, i, c);
  position = start + static_cast<std::size_t>(i);
  return c < 0 ? kReplacement : static_cast<char32_t>(c);
}

std::size_t without_cut_character(std::string_view bytes) {
  const std::size_t start = bytes.size() - std::min(bytes.size(), kLongest);
  const char* s = bytes.data() + start;
  auto length = static_cast<int32_t>(bytes.size() - start);
  U8_TRUNCATE_IF_INCOMPLETE(s, 0, length);
  return start + static_cast<std::size_t>(length);
}

void append_character(std::string& out, char32_t character) {
  char buffer[U8_MAX_LENGTH];
  std::size_t length = 0;
  const auto c = static_cast<uint32_t>(character);
  U8_APPEND_UNSAFE(buffer, length, c);
  out.append(buffer, length);
}

#pragma GCC diagnostic pop

std::size_t well_formed_prefix(std::string_view bytes) {
  std::size_t position = 0;
  while (position < bytes.size()) {
    if (static_cast<unsigned char>(bytes[position]) < 0x80) {
      ++position;
      continue;
    }
    const std::size_t start = position;
    if (next_or_ill_formed(bytes, position) < 0) return start;
  }
  return bytes.size();
}

bool is_well_formed(std::string_view bytes) { return well_formed_prefix(bytes) == bytes.size(); }

std::string replace_ill_formed(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  std::size_t position = 0;
  while (position < bytes.size()) {
    const std::string_view rest = bytes.substr(position);
    const std::size_t good = well_formed_prefix(rest);
    out.append(rest.substr(0, good));
    position += good;
    if (position < bytes.size()) {
      next_or_ill_formed(bytes, position);
      append_character(out, kReplacement);
    }
  }
  return out;
}

bool is_white_space(char32_t character) {
  return u_isUWhiteSpace(static_cast<UChar32>(character)) != 0;
}

bool is_word_character(char32_t character) {
  const auto c = static_cast<UChar32>(character);
  constexpr uint32_t kCategories = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_hasBinaryProperty(c, UCHAR_ALPHABETIC) != 0 || (U_GET_GC_MASK(c) & kCategories) != 0 ||
         u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL) != 0;
}

bool is_numeric(char32_t character) {
  return (U_GET_GC_MASK(static_cast<UChar32>(character)) & U_GC_N_MASK) != 0;
}

}  // namespace graft::text
