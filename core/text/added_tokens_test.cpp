#include "core/text/added_tokens.h"

#include <string>
#include <vector>

#include "core/text/testing.h"

namespace graft::text {
namespace {

using nlohmann::json;
using testing::ElementsAre;

// Ids of the pieces of `text`; text between added tokens as its bytes' ids.
Ids encode(const json& added, const std::string& text, const json& normalizer = nullptr) {
  json document = byte_level_json();
  document["added_tokens"] = added;
  document["normalizer"] = normalizer;
  return tokenizer_of(document).encode(text);
}

TEST(Trie, FindsTheLeftmostThenTheLongest) {
  Trie trie;
  EXPECT_FALSE(trie.find("abc", 0));
  trie.insert("", 9);
  EXPECT_TRUE(trie.empty());
  trie.insert("b", 0);
  trie.insert("bcd", 1);
  trie.insert("abx", 2);
  trie.insert("b", 3);
  const auto first = trie.find("abcbcd", 0);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->begin, 1U);
  EXPECT_EQ(first->end, 2U);
  EXPECT_EQ(first->value, 0U);
  const auto second = trie.find("abcbcd", 2);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->begin, 3U);
  EXPECT_EQ(second->value, 1U);
  EXPECT_FALSE(trie.find("abcbcd", 4));
  EXPECT_FALSE(trie.find("", 0));
}

TEST(AddedTokens, AreFoundInsideOfText) {
  const json added = {added_token("<a>", 256), added_token("<a>b", 257), added_token("日", 258)};
  EXPECT_THAT(encode(added, "x<a>y"), ElementsAre('x', 256, 'y'));
  EXPECT_THAT(encode(added, "<a><a>b<a"), ElementsAre(256, 257, '<', 'a'));
  EXPECT_THAT(encode(added, "a日"), ElementsAre('a', 258));
}

// lstrip and rstrip take white space along; they are no conditions.
TEST(AddedTokens, StripWhiteSpaceBesideThem) {
  const json added = {added_token("<l>", 256, {"lstrip"}), added_token("<r>", 257, {"rstrip"}),
                      added_token("<b>", 258, {"lstrip", "rstrip"})};
  EXPECT_THAT(encode(added, "x \u3000\u0085<l> y"), ElementsAre('x', 256, ' ', 'y'));
  EXPECT_THAT(encode(added, "x <r>\n\t y"), ElementsAre('x', ' ', 257, 'y'));
  EXPECT_THAT(encode(added, "<r>y"), ElementsAre(257, 'y'));
  EXPECT_THAT(encode(added, " <b>  <b> "), ElementsAre(258, 258));
  EXPECT_THAT(encode(added, "  "), ElementsAre(' ', ' '));
}

TEST(AddedTokens, SingleWordsStandAlone) {
  const json added = json::array({added_token("word", 256, {"single_word"})});
  EXPECT_THAT(encode(added, "word word.word"), ElementsAre(256, ' ', 256, '.', 256));
  EXPECT_EQ(encode(added, "words").size(), 5U);
  EXPECT_EQ(encode(added, "éword").size(), 6U);
  EXPECT_EQ(encode(added, "word_").size(), 5U);
}

// "e" + U+0301 is "é" only after NFC.
TEST(AddedTokens, NormalizedOnesAreFoundInNormalizedText) {
  const json nfc = {{"type", "NFC"}};
  EXPECT_THAT(encode(json::array({added_token("é!", 256, {"normalized"})}), "e\u0301!", nfc),
              ElementsAre(256));
  EXPECT_THAT(encode(json::array({added_token("e\u0301!", 256, {"normalized"})}), "é!", nfc),
              ElementsAre(256));
  EXPECT_THAT(encode(json::array({added_token("é!", 256)}), "e\u0301!", nfc),
              ElementsAre(0xC3, 0xA9, '!'));
}

TEST(AddedTokens, TakeTheVocabularysIdOrTheNextFreeOne) {
  json document = byte_level_json({"a b"});
  document["added_tokens"] = {added_token("ab", 256, {"special"}), added_token("cd", 257)};
  const Tokenizer tokenizer = tokenizer_of(document);
  EXPECT_EQ(tokenizer.vocab_size(), 258);
  EXPECT_EQ(tokenizer.token_to_id("cd"), 257);
  EXPECT_EQ(tokenizer.token_to_id("ab"), 256);
  EXPECT_EQ(tokenizer.id_to_token(257), "cd");
  EXPECT_TRUE(tokenizer.is_special(256));
  EXPECT_FALSE(tokenizer.is_special(257));
  EXPECT_FALSE(tokenizer.is_special(5000));
}

}  // namespace
}  // namespace graft::text
