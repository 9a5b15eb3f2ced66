#include "core/text/bpe.h"

#include <string>
#include <vector>

#include "core/text/testing.h"

namespace graft::text {
namespace {

using nlohmann::json;
using testing::ElementsAre;

const std::string kFile = "test.json";

// Owns what JsonNode refers to.
struct Model {
  explicit Model(json given) : document(std::move(given)), bpe(JsonNode(document, kFile)) {}

  Ids encode(const std::string& word) {
    Ids ids;
    bpe.encode(word, workspace, ids);
    return ids;
  }

  json document;
  BpeModel bpe;
  BpeModel::Workspace workspace;
};

json letters(const std::vector<std::string>& tokens, const json& merges) {
  json vocab = json::object();
  for (const std::string& token : tokens) vocab[token] = vocab.size();
  return {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}};
}

TEST(Bpe, MergesTheLowestRankFirstAndTheLeftmostOfEquals) {
  Model model(letters({"a", "b", "c", "ab", "bc", "aa", "abc"}, {"b c", "a b", "a a", "ab c"}));
  EXPECT_THAT(model.encode(""), ElementsAre());
  EXPECT_THAT(model.encode("a"), ElementsAre(0));
  EXPECT_THAT(model.encode("abc"), ElementsAre(0, 4));
  EXPECT_THAT(model.encode("aaa"), ElementsAre(5, 0));
  EXPECT_THAT(model.encode("aabab"), ElementsAre(0, 3, 3));
}

TEST(Bpe, ReadsBothSpellingsOfMerges) {
  const std::vector<std::string> tokens = {"a", "b", "ab", "abb"};
  Model strings(letters(tokens, {"#version: 0.2", "a b", "ab b"}));
  Model pairs(letters(tokens, json::array({json::array({"a", "b"}), json::array({"ab", "b"})})));
  EXPECT_THAT(strings.encode("abb"), ElementsAre(3));
  EXPECT_EQ(strings.encode("abab"), pairs.encode("abab"));
  EXPECT_EQ(strings.encode("abb"), pairs.encode("abb"));
}

TEST(Bpe, IgnoreMergesTakesWholeWords) {
  json given = letters({"a", "b", "ab", "ba", "aba"}, json::array({"a b"}));
  EXPECT_THAT(Model(given).encode("aba"), ElementsAre(2, 0));
  given["ignore_merges"] = true;
  EXPECT_THAT(Model(given).encode("aba"), ElementsAre(4));
  EXPECT_THAT(Model(given).encode("abab"), ElementsAre(2, 2));
}

TEST(Bpe, UnknownCharactersVanishOrBecomeTheUnkToken) {
  json given = letters({"a", "<unk>"}, json::array());
  EXPECT_THAT(Model(given).encode("xaéx"), ElementsAre(0));
  EXPECT_TRUE(Model(given).bpe.drops_unknown());
  given["unk_token"] = "<unk>";
  EXPECT_THAT(Model(given).encode("xyaé"), ElementsAre(1, 1, 0, 1));
  EXPECT_FALSE(Model(given).bpe.drops_unknown());
  given["fuse_unk"] = true;
  EXPECT_THAT(Model(given).encode("xyaé"), ElementsAre(1, 0, 1));
}

TEST(Bpe, ByteFallbackSpellsUnknownCharacters) {
  json given = letters({"a", "<0xC3>", "<0xA9>", "<0x78>", "<unk>"}, json::array());
  given["byte_fallback"] = true;
  given["unk_token"] = "<unk>";
  EXPECT_THAT(Model(given).encode("aéx"), ElementsAre(0, 1, 2, 3));
  // Not all bytes of the character have a token: unknown as a whole.
  EXPECT_THAT(Model(given).encode("è"), ElementsAre(4));
}

TEST(Bpe, AnUnkTokenThatIsMissingIsAnErrorWhenNeeded) {
  json given = letters({"a"}, json::array());
  given["unk_token"] = "<unk>";
  Model model(given);
  EXPECT_THAT(model.encode("a"), ElementsAre(0));
  EXPECT_GRAFT_ERROR(
      model.encode("aé"), ErrorKind::input,
      testing::StrEq("test.json: model.unk_token: '<unk>' is not in model.vocab, but "
                     "the character 'é' needs it"));
}

TEST(Bpe, KnowsTokensByIdAndIdsByToken) {
  json given = letters({}, json::array());
  given["vocab"] = {{"a", 0}, {"", 3}, {"é", 7}};
  const Model model(given);
  EXPECT_EQ(model.bpe.token_to_id("é"), 7);
  EXPECT_EQ(model.bpe.token_to_id("b"), std::nullopt);
  EXPECT_EQ(*model.bpe.id_to_token(7), "é");
  EXPECT_EQ(*model.bpe.id_to_token(3), "");
  for (const int id : {-1, 1, 8, 1 << 30}) EXPECT_EQ(model.bpe.id_to_token(id), nullptr) << id;
  EXPECT_EQ(model.bpe.size(), 3U);
  EXPECT_EQ(model.bpe.largest_id(), 7);
}

// The queue sees each pair of neighbours once, and at most two new ones for each merge.
TEST(Bpe, WorkGrowsLinearlyWithTheWord) {
  std::vector<std::string> tokens = {"a", "b"};
  json merges = json::array();
  for (int level = 0; level < 12; ++level) {
    const std::string half(std::size_t{1} << level, 'a');
    tokens.push_back(half + half);
    merges.push_back(half + " " + half);
  }
  tokens.push_back("ab");
  merges.push_back("a b");
  for (const std::string& unit : {std::string("a"), std::string("ab"), std::string("aab")}) {
    std::uint64_t last = 0;
    for (std::size_t length : {1'000U, 10'000U, 100'000U, 1'000'000U}) {
      Model model(letters(tokens, merges));
      std::string word;
      while (word.size() < length) word += unit;
      model.encode(word);
      EXPECT_LE(model.workspace.steps, 3 * word.size()) << unit;
      if (last != 0) {
        EXPECT_LE(model.workspace.steps, 11 * last) << unit << " " << length;
      }
      last = model.workspace.steps;
    }
  }
}

TEST(Bpe, ALongWordIsMergedAsAShortOne) {
  std::vector<std::string> tokens = {"a"};
  json merges = json::array();
  for (int level = 0; level < 3; ++level) {
    const std::string half(std::size_t{1} << level, 'a');
    tokens.push_back(half + half);
    merges.push_back(half + " " + half);
  }
  Model model(letters(tokens, merges));
  Ids expected(500'000, 3);
  expected.insert(expected.end(), {2, 1, 0});
  EXPECT_EQ(model.encode(std::string(8 * 500'000 + 7, 'a')), expected);
}

TEST(MergeTable, FindsWhatWasInsertedAndNothingElse) {
  MergeTable table(1000);
  for (std::int32_t i = 0; i < 1000; ++i) {
    table.insert(i, i * 7, {static_cast<std::uint32_t>(i), i + 1});
  }
  table.insert(3, 21, {5000, 9});  // the last one counts
  for (std::int32_t i = 0; i < 1000; ++i) {
    const MergeTable::Merge* merge = table.find(i, i * 7);
    ASSERT_NE(merge, nullptr);
    EXPECT_EQ(merge->merged, i == 3 ? 9 : i + 1);
    EXPECT_EQ(table.find(i, i * 7 + 1), nullptr);
  }
  EXPECT_EQ(MergeTable().find(0, 0), nullptr);
}

}  // namespace
}  // namespace graft::text
