#include "core/text/decoder.h"

#include <string>
#include <vector>

#include "core/text/testing.h"

namespace graft::text {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

const std::string kFile = "test.json";

// What each token makes certain, then the rest.
std::vector<std::string> stream(const json& document, const std::vector<std::string>& tokens) {
  const Decoder decoder = document.is_null() ? Decoder() : Decoder(JsonNode(document, kFile));
  DecodeChain chain(decoder);
  std::vector<std::string> parts;
  for (const std::string& token : tokens) {
    parts.emplace_back();
    chain.token(token, parts.back());
  }
  parts.emplace_back();
  chain.finish(parts.back());
  return parts;
}

json sequence(const json& decoders) { return {{"type", "Sequence"}, {"decoders", decoders}}; }

const json kByteFallback = {{"type", "ByteFallback"}};
const json kFuse = {{"type", "Fuse"}};

json strip(int start, int stop) {
  return {{"type", "Strip"}, {"content", " "}, {"start", start}, {"stop", stop}};
}

TEST(Decoder, NoneJoinsTokensBySpaces) {
  EXPECT_THAT(stream(nullptr, {"a", "Ġb", ""}), ElementsAre("a", " Ġb", " ", ""));
}

TEST(Decoder, ByteLevelHoldsBackTheBytesOfACharacter) {
  const json document = {{"type", "ByteLevel"}};
  // 😀 is F0 9F 98 80.
  EXPECT_THAT(stream(document, {"aðŁ", "ĺ", "Ģb"}), ElementsAre("a", "", "😀b", ""));
  EXPECT_THAT(stream(document, {"ðŁ"}), ElementsAre("", "\uFFFD"));
  EXPECT_THAT(stream(document, {"ðŁ", "x"}), ElementsAre("", "\uFFFDx", ""));
  EXPECT_THAT(stream(document, {"Ģ"}), ElementsAre("\uFFFD", ""));
  EXPECT_THAT(stream(document, {"日"}), ElementsAre("日", ""));
}

TEST(Decoder, ByteFallbackTakesRunsOfBytesTogether) {
  EXPECT_THAT(stream(kByteFallback, {"a", "<0xE5>", "<0x8F>", "<0xab>", "b"}),
              ElementsAre("a", "", "", "", "叫b", ""));
  EXPECT_THAT(stream(kByteFallback, {"<0xE5>", "<0x8F>", "b"}),
              ElementsAre("", "", "\uFFFD\uFFFDb", ""));
  EXPECT_THAT(stream(kByteFallback, {"<0x61>"}), ElementsAre("", "a"));
  for (const char* token : {"<0x6>", "<0xGG>", "<0x61", "<0x611>", "<1x61>"}) {
    EXPECT_THAT(stream(kByteFallback, {token}), ElementsAre(token, ""));
  }
}

TEST(Decoder, StripTakesFromEachTokenOrFromTheWholeText) {
  EXPECT_THAT(stream(strip(1, 0), {"  a ", " b"}), ElementsAre(" a ", "b", ""));
  EXPECT_THAT(stream(strip(0, 2), {"a   ", " "}), ElementsAre("a ", "", ""));
  EXPECT_THAT(stream(sequence({kFuse, strip(1, 0)}), {" a", " b"}), ElementsAre("a", " b", ""));
  EXPECT_THAT(stream(sequence({kFuse, strip(2, 0)}), {" ", " ", " a"}),
              ElementsAre("", "", " a", ""));
  // A space may be the last one until something follows.
  EXPECT_THAT(stream(sequence({kFuse, strip(0, 1)}), {"a ", " ", "b", " "}),
              ElementsAre("a", " ", " b", "", ""));
}

TEST(Decoder, LlamaTwosSequence) {
  const json replace = {{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}};
  const json document = sequence({replace, kByteFallback, kFuse, strip(1, 0)});
  EXPECT_THAT(stream(document, {"▁Hi", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁x"}),
              ElementsAre("Hi", " ", "", "", "", "", "😀 x", ""));
}

TEST(Decoder, RefusesWhatItCannotStream) {
  EXPECT_GRAFT_ERROR(stream(sequence({kFuse, kByteFallback}), {}), ErrorKind::input,
                     AllOf(HasSubstr("test.json: decoders[1]: "),
                           HasSubstr("ByteFallback after Fuse or ByteLevel is not supported")));
  EXPECT_GRAFT_ERROR(stream({{"type", "WordPiece"}}, {}), ErrorKind::input,
                     AllOf(HasSubstr("type 'WordPiece' is not supported; supported: ByteLevel")));
  json wide = strip(1, 0);
  wide["content"] = "ab";
  EXPECT_GRAFT_ERROR(stream(wide, {}), ErrorKind::input,
                     testing::StrEq("test.json: content: expected one character"));
}

TEST(Decoder, StartsAnewAfterFinish) {
  const json document = sequence({kFuse, strip(1, 1)});
  const Decoder decoder(JsonNode(document, kFile));
  DecodeChain chain(decoder);
  for (int round = 0; round < 2; ++round) {
    std::string out;
    chain.token(" a ", out);
    chain.finish(out);
    EXPECT_EQ(out, "a");
  }
}

}  // namespace
}  // namespace graft::text
