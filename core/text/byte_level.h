#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace graft::text {

// The byte-level alphabet of GPT-2 (Radford et al. 2019, encoder.py, bytes_to_unicode): every byte
// stands as one printable character, so that a BPE over characters is a BPE over bytes. Bytes that
// print in Latin-1 stand for themselves, the other 68 as U+0100..U+0143 in order.
char32_t byte_to_character(std::uint8_t byte);

// Appends the spelling of `bytes` in that alphabet, in UTF-8.
void append_byte_level(std::string& out, std::string_view bytes);

// Appends the bytes that `token` spells. A token with a character outside the alphabet (an added
// token such as "日") stands for its own bytes.
void append_bytes_of(std::string& out, std::string_view token);

}  // namespace graft::text
