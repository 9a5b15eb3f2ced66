#include "core/text/utf8.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "core/text/byte_level.h"

namespace graft::text {
namespace {

TEST(Utf8, ReplacesMaximalIllFormedParts) {
  const std::string bad = "\uFFFD";
  struct Case {
    std::string bytes;
    std::string replaced;
  };
  // The table of Unicode 15, section 3.9, and edges of each length.
  const std::vector<Case> cases = {
      {"", ""},
      {"abc", "abc"},
      {"\x80", bad},
      {"a\xFF"
       "b",
       "a" + bad + "b"},
      {"\xC3", bad},
      {"\xC3\xA9", "é"},
      {"\xC0\xAF", bad + bad},
      {"\xE0\x80\xBF", bad + bad + bad},
      {"\xED\xA0\x80", bad + bad + bad},
      {"\xE2\x82", bad},
      {"\xE2\x82"
       "x",
       bad + "x"},
      {"\xF0\x9F\x98", bad},
      {"\xF0\x9F\x98\x80", "😀"},
      {"\xF0\x80\x80\x41", bad + bad + bad + "A"},
      {"\xF4\x90\x80\x80", bad + bad + bad + bad},
      {"\xF0\x9F\x98\xF0\x9F\x98\x80", bad + "😀"},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(replace_ill_formed(c.bytes), c.replaced) << testing::PrintToString(c.bytes);
    EXPECT_EQ(is_well_formed(c.bytes), c.bytes == c.replaced) << testing::PrintToString(c.bytes);
  }
}

TEST(Utf8, WellFormedPrefixEndsBeforeTheFirstBadByte) {
  EXPECT_EQ(well_formed_prefix("aé\xE2\x82"), 3U);
  EXPECT_EQ(well_formed_prefix("\xFF"), 0U);
  EXPECT_EQ(well_formed_prefix("日本"), 6U);
}

TEST(Utf8, FindsACharacterThatIsCut) {
  EXPECT_EQ(without_cut_character(""), 0U);
  EXPECT_EQ(without_cut_character("ab"), 2U);
  EXPECT_EQ(without_cut_character("ab\xF0\x9F\x98"), 2U);
  EXPECT_EQ(without_cut_character("ab\xF0\x9F\x98\x80"), 6U);
  EXPECT_EQ(without_cut_character("\xE2"), 0U);
  // Bytes that no further byte can mend are not held back.
  EXPECT_EQ(without_cut_character("ab\x80"), 3U);
  EXPECT_EQ(without_cut_character("ab\xC0"), 3U);
  EXPECT_EQ(without_cut_character("ab\xED\xA0"), 4U);
}

TEST(Utf8, EveryCharacterComesBackFromItsBytes) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string bytes;
    append_character(bytes, c);
    ASSERT_EQ(bytes.size(), character_length(bytes.front()));
    std::size_t position = 0;
    ASSERT_EQ(next_character(bytes, position), c);
    ASSERT_EQ(position, bytes.size());
    ASSERT_EQ(previous_character(bytes, position), c);
    ASSERT_EQ(position, 0U);
  }
}

// Streaming relies on it: text cut where without_cut_character() says gives the same replacements.
TEST(Utf8, CutTextIsReplacedAsTheWhole) {
  std::mt19937 random(1);
  const std::string alphabet = "ab\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xED\xA0\xFF";
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (std::size_t n = random() % 12; n > 0; --n) bytes += alphabet[random() % alphabet.size()];
    for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
      const std::size_t safe = without_cut_character(std::string_view(bytes).substr(0, cut));
      ASSERT_EQ(replace_ill_formed(bytes.substr(0, safe)) + replace_ill_formed(bytes.substr(safe)),
                replace_ill_formed(bytes));
    }
  }
}

TEST(Utf8, KnowsWhiteSpaceWordCharactersAndNumbers) {
  for (const char32_t c :
       {U'\t', U'\n', U'\v', U'\f', U'\r', U' ', U'\u0085', U'\u00A0', U'\u1680', U'\u2000',
        U'\u200A', U'\u2028', U'\u2029', U'\u202F', U'\u205F', U'\u3000'}) {
    EXPECT_TRUE(is_white_space(c)) << static_cast<unsigned>(c);
  }
  for (const char32_t c : {U'x', U'\u180E', U'\u200B', U'\uFEFF', U'\x1C'}) {
    EXPECT_FALSE(is_white_space(c)) << static_cast<unsigned>(c);
  }
  for (const char32_t c : {U'a', U'_', U'7', U'é', U'\u0301', U'日', U'\u200D'}) {
    EXPECT_TRUE(is_word_character(c)) << static_cast<unsigned>(c);
  }
  for (const char32_t c : {U' ', U'-', U'²', U'€', U'😀'}) {
    EXPECT_FALSE(is_word_character(c)) << static_cast<unsigned>(c);
  }
  for (const char32_t c : {U'0', U'٣', U'²', U'½', U'Ⅷ'}) EXPECT_TRUE(is_numeric(c));
  for (const char32_t c : {U'a', U'一', U'.'}) EXPECT_FALSE(is_numeric(c));
}

TEST(ByteLevel, IsTheAlphabetOfGpt2) {
  EXPECT_EQ(byte_to_character('!'), U'!');
  EXPECT_EQ(byte_to_character('~'), U'~');
  EXPECT_EQ(byte_to_character(0), U'Ā');
  EXPECT_EQ(byte_to_character(' '), U'Ġ');
  EXPECT_EQ(byte_to_character('\n'), U'Ċ');
  EXPECT_EQ(byte_to_character(0x7F), U'\u0121');
  EXPECT_EQ(byte_to_character(0xA0), U'\u0142');
  EXPECT_EQ(byte_to_character(0xAD), U'\u0143');
  EXPECT_EQ(byte_to_character(0xFF), U'ÿ');
}

TEST(ByteLevel, SpellsBytesAndReadsThemBack) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  std::string spelled;
  append_byte_level(spelled, all);
  EXPECT_TRUE(is_well_formed(spelled));
  std::string back;
  append_bytes_of(back, spelled);
  EXPECT_EQ(back, all);
}

TEST(ByteLevel, TokensOutsideTheAlphabetStandForTheirOwnBytes) {
  std::string out = "x";
  append_bytes_of(out, "Ġ日");
  EXPECT_EQ(out, "xĠ日");
}

}  // namespace
}  // namespace graft::text
