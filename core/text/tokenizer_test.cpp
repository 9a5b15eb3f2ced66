#include "core/text/tokenizer.h"

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/base/hash.h"
#include "core/text/testing.h"

namespace graft::text {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

const Tokenizer& gpt2() {
  static const Tokenizer tokenizer = Tokenizer::from_file(golden("gpt2.tokenizer.json"));
  return tokenizer;
}

TEST(Tokenizer, EveryByteHasATokenAndComesBack) {
  const Tokenizer tokenizer = tokenizer_of(byte_level_json());
  EXPECT_EQ(tokenizer.vocab_size(), 256);
  EXPECT_TRUE(tokenizer.notes().empty());
  for (const std::string& text : {std::string(), std::string("a"), std::string("Hello, world!\n"),
                                  std::string("日本 😀"), std::string("\0x", 2)}) {
    const Ids ids = tokenizer.encode(text);
    EXPECT_EQ(ids.size(), text.size());
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
}

// U+0085 is white space to Oniguruma: it parts from the "!" before it.
TEST(Tokenizer, NextLineIsWhiteSpace) {
  json document = byte_level_json({"! Â"});
  EXPECT_THAT(tokenizer_of(document).encode("!\u0085"), ElementsAre('!', 0xC2, 0x85));
  // Without the cut the merge across it takes place.
  document["pre_tokenizer"]["use_regex"] = false;
  EXPECT_THAT(tokenizer_of(document).encode("!\u0085"), ElementsAre(256, 0x85));
}

TEST(Tokenizer, IllFormedTextCountsAsReplacementCharacters) {
  const Tokenizer tokenizer = tokenizer_of(byte_level_json());
  EXPECT_EQ(tokenizer.encode("a\xFF\xE2\x82z"), tokenizer.encode("a\uFFFD\uFFFDz"));
  EXPECT_EQ(tokenizer.encode("\xED\xA0\x80"), tokenizer.encode("\uFFFD\uFFFD\uFFFD"));
}

TEST(Tokenizer, DecodesIdsWithoutATokenToNothing) {
  const Tokenizer tokenizer = tokenizer_of(byte_level_json());
  EXPECT_EQ(tokenizer.decode(Ids{'a', 256, -1, 1 << 30, 'b'}), "ab");
  EXPECT_EQ(tokenizer.id_to_token(256), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(-1), std::nullopt);
  EXPECT_EQ(tokenizer.token_to_id("nothing"), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(' '), "Ġ");
  EXPECT_EQ(tokenizer.decode(Ids{}), "");
}

TEST(Tokenizer, SpecialTokensAreAddedAndLeftOutOnDemand) {
  json document = byte_level_json();
  document["added_tokens"] = {added_token("<s>", 256, {"special"}), added_token("<x>", 257)};
  const json piece = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}};
  const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  document["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", {piece, text, piece}},
      {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {256}}, {"tokens", {"<s>"}}}}}}};
  const Tokenizer tokenizer = tokenizer_of(document);
  EXPECT_THAT(tokenizer.encode("a<x>"), ElementsAre('a', 257));
  EXPECT_THAT(tokenizer.encode("a<x>", true), ElementsAre(256, 'a', 257, 256));
  EXPECT_THAT(tokenizer.encode("", true), ElementsAre(256, 256));
  EXPECT_EQ(tokenizer.decode(Ids{256, 'a', 257}), "<s>a<x>");
  EXPECT_EQ(tokenizer.decode(Ids{256, 'a', 257}, true), "a<x>");
}

TEST(Tokenizer, SaysWhatItIgnores) {
  json document = byte_level_json();
  document["truncation"] = {{"max_length", 8}};
  document["padding"] = {{"pad_id", 0}};
  document["model"]["vocab"].erase(spelling(0x1D));
  document["model"]["vocab"].erase(spelling(0xF2));
  document["model"]["vocab"].erase(spelling(0xFF));  // never in UTF-8
  const Tokenizer tokenizer = tokenizer_of(document);
  EXPECT_THAT(tokenizer.notes(),
              ElementsAre(HasSubstr("test.json: \"truncation\" is ignored"),
                          HasSubstr("test.json: \"padding\" is ignored"),
                          HasSubstr("no token for the bytes 0x1D 0xF2 and no unk_token")));
  EXPECT_EQ(tokenizer.encode(std::string(100, 'a')).size(), 100U);
  EXPECT_THAT(tokenizer.encode("a\x1D"
                               "b"),
              ElementsAre('a', 'b'));
}

TEST(Tokenizer, HashIsOfTheFile) {
  const std::string json = byte_level_json().dump();
  EXPECT_EQ(Tokenizer::from_json(json, "x").content_hash(), sha256_hex(json));
}

TEST(Tokenizer, CopiesAndManyThreadsAgree) {
  const Tokenizer copy = gpt2();
  std::string text;
  std::mt19937 random(5);
  const std::vector<std::string> words = {"the ", "truth", " 12", "日本",
                                          "\n\n", "don't", " 😀",  "x"};
  for (int i = 0; i < 20'000; ++i) text += words[random() % words.size()];
  const Ids expected = gpt2().encode(text);
  std::vector<Ids> got(4);
  {
    std::vector<std::jthread> threads;
    for (Ids& ids : got) {
      threads.emplace_back([&] {
        for (int round = 0; round < 3; ++round) ids = copy.encode(text);
      });
    }
  }
  for (const Ids& ids : got) EXPECT_EQ(ids, expected);
  EXPECT_EQ(copy.decode(expected), text);
}

// Every cut through the ids of a text: no character is emitted in parts, and no U+FFFD appears
// before the stream ends.
TEST(StreamDecoder, NeverEmitsPartOfACharacter) {
  const std::string text = "Hi 😊 삼겹살 👨‍👩‍👧 é";
  const Ids ids = gpt2().encode(text);
  ASSERT_GT(ids.size(), 15U);
  StreamDecoder decoder(gpt2());
  for (std::size_t cut = 0; cut <= ids.size(); ++cut) {
    std::string streamed;
    for (std::size_t i = 0; i < cut; ++i) {
      const std::string part = decoder.push(ids[i]);
      EXPECT_TRUE(is_well_formed(part));
      EXPECT_THAT(part, testing::Not(HasSubstr("\uFFFD")));
      streamed += part;
    }
    EXPECT_TRUE(text.starts_with(streamed));
    const std::string rest = decoder.finish();
    EXPECT_TRUE(rest.empty() || rest == "\uFFFD") << rest;
    EXPECT_EQ(streamed + rest, gpt2().decode(std::span(ids).first(cut)));
  }
}

TEST(StreamDecoder, AnyIdsStreamAsTheyDecode) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    Ids ids(random() % 30);
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % 1100);
    StreamDecoder decoder(gpt2(), true);
    std::string streamed;
    for (const std::int32_t id : ids) {
      streamed += decoder.push(id);
      EXPECT_TRUE(is_well_formed(streamed));
    }
    streamed += decoder.finish();
    EXPECT_EQ(streamed, gpt2().decode(ids, true));
  }
}

TEST(StreamDecoder, OutlivesItsTokenizerAndMoves) {
  std::unique_ptr<StreamDecoder> decoder;
  {
    const Tokenizer tokenizer = tokenizer_of(byte_level_json());
    decoder = std::make_unique<StreamDecoder>(tokenizer);
  }
  EXPECT_EQ(decoder->push(0xC3), "");
  StreamDecoder moved = std::move(*decoder);
  EXPECT_EQ(moved.push(0xA9), "é");
  EXPECT_EQ(moved.push(9999), "");
  EXPECT_EQ(moved.finish(), "");
}

// Long texts of every kind that has no short words. They end within the test's time limit only if
// the time is near linear in their length.
TEST(Tokenizer, LongTextsWithoutSpaces) {
  const std::size_t length = 200'000;
  std::mt19937 random(3);
  std::string letters;
  std::string noise;
  while (letters.size() < length) letters += static_cast<char>('a' + random() % 26);
  while (noise.size() < length) noise += static_cast<char>(random() % 256);
  for (const std::string& text :
       {std::string(length, 'a'), std::string(length, ' '), std::string(length, '\n'),
        std::string(length, '1'), std::string(length, '!'), letters}) {
    for (const std::string name : {"gpt2", "llama3", "smollm_style"}) {
      const Tokenizer tokenizer = Tokenizer::from_file(golden(name + ".tokenizer.json"));
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text) << name;
    }
  }
  EXPECT_EQ(gpt2().decode(gpt2().encode(noise)), replace_ill_formed(noise));
}

}  // namespace
}  // namespace graft::text
