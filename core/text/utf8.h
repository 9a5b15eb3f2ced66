#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace graft::text {

inline constexpr char32_t kReplacement = U'\uFFFD';

bool is_well_formed(std::string_view bytes);

// Offset of the first byte that is not part of a well-formed character; bytes.size() if there is
// none.
std::size_t well_formed_prefix(std::string_view bytes);

// Each maximal ill-formed part becomes one U+FFFD (Unicode 15, section 3.9, "U+FFFD Substitution of
// Maximal Subparts"), as in Python's "replace" and Rust's from_utf8_lossy.
std::string replace_ill_formed(std::string_view bytes);

// Length of `bytes` without a character that its last bytes begin but do not finish.
std::size_t without_cut_character(std::string_view bytes);

// The character at `position`, which is moved behind it; U+FFFD for an ill-formed part.
char32_t next_character(std::string_view bytes, std::size_t& position);

// The character before `position`, which is moved to its start.
char32_t previous_character(std::string_view bytes, std::size_t& position);

void append_character(std::string& out, char32_t character);

// Bytes in the character that starts with `lead`, in well-formed text.
constexpr std::size_t character_length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1U : byte < 0xE0 ? 2U : byte < 0xF0 ? 3U : 4U;
}

// Unicode White_Space, which includes U+0085 and U+3000.
bool is_white_space(char32_t character);
// What \w means to Rust's regex crate: UTS #18 Annex C.
bool is_word_character(char32_t character);
// General category N (Nd, Nl, No).
bool is_numeric(char32_t character);

}  // namespace graft::text
