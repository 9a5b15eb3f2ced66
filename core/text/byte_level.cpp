#include "core/text/byte_level.h"

#include <array>

#include "core/text/utf8.h"

namespace graft::text {

namespace {

constexpr char32_t kFirstStandIn = 0x100;
constexpr std::size_t kAlphabetEnd = 0x144;

constexpr bool stands_for_itself(unsigned byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr std::array<char32_t, 256> make_characters() {
  std::array<char32_t, 256> characters{};
  char32_t next = kFirstStandIn;
  for (unsigned byte = 0; byte < 256; ++byte) {
    characters[byte] = stands_for_itself(byte) ? static_cast<char32_t>(byte) : next++;
  }
  return characters;
}

constexpr std::array<char32_t, 256> kCharacters = make_characters();

constexpr std::array<std::int16_t, kAlphabetEnd> make_bytes() {
  std::array<std::int16_t, kAlphabetEnd> bytes{};
  for (std::int16_t& byte : bytes) byte = -1;
  for (std::size_t byte = 0; byte < 256; ++byte) {
    bytes[kCharacters[byte]] = static_cast<std::int16_t>(byte);
  }
  return bytes;
}

constexpr std::array<std::int16_t, kAlphabetEnd> kBytes = make_bytes();

}  // namespace

char32_t byte_to_character(std::uint8_t byte) { return kCharacters[byte]; }

void append_byte_level(std::string& out, std::string_view bytes) {
  for (const char byte : bytes) {
    const char32_t character = kCharacters[static_cast<unsigned char>(byte)];
    if (character < 0x80) {
      out.push_back(static_cast<char>(character));
    } else {  // below U+0144: two bytes
      out.push_back(static_cast<char>(0xC0U | (character >> 6U)));
      out.push_back(static_cast<char>(0x80U | (character & 0x3FU)));
    }
  }
}

void append_bytes_of(std::string& out, std::string_view token) {
  const std::size_t before = out.size();
  for (std::size_t position = 0; position < token.size();) {
    const char32_t character = next_character(token, position);
    if (character >= kAlphabetEnd || kBytes[character] < 0) {
      out.resize(before);
      out.append(token);
      return;
    }
    out.push_back(static_cast<char>(kBytes[character]));
  }
}

}  // namespace graft::text
