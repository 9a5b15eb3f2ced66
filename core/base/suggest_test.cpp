#include "core/base/suggest.h"

#include <gtest/gtest.h>

#include <iomanip>
#include <string>
#include <vector>

namespace graft {
namespace {

struct NearestCase {
  std::string name;
  std::vector<std::string> candidates;
  std::string expected;  // "" for none
};

class Nearest : public testing::TestWithParam<NearestCase> {};

TEST_P(Nearest, FindsWhatWasMeant) {
  const NearestCase& c = GetParam();
  EXPECT_EQ(nearest(c.name, c.candidates).value_or(""), c.expected) << c.name;
}

INSTANTIATE_TEST_SUITE_P(
    Typos, Nearest,
    testing::Values(NearestCase{"gnd", {"hedgehog", "gdn"}, "gdn"},  // swapped
                    NearestCase{"gd", {"hedgehog", "gdn"}, "gdn"},   // dropped
                    NearestCase{"talyor", {"taylor", "projection"}, "taylor"},
                    NearestCase{"learning_rte", {"steps", "learning_rate"}, "learning_rate"},
                    NearestCase{"Learning-Rate", {"learning_rate"}, "learning_rate"},
                    NearestCase{"gdn", {"gdn"}, "gdn"},
                    NearestCase{"ab", {"ac", "ad"}, "ac"},  // first of a tie
                    NearestCase{"x", {"y", "xy"}, ""},      // nothing of the name would be left
                    NearestCase{"mamba", {"hedgehog", "gdn"}, ""}, NearestCase{"", {"a", ""}, ""},
                    NearestCase{"gdn", {}, ""},
                    NearestCase{"café", {"cafe"}, ""},  // é is two bytes, two edits of five
                    NearestCase{"model.layers.3.mlp.up_proj.weights",
                                {"model.layers.3.mlp.down_proj.weight",
                                 "model.layers.3.mlp.up_proj.weight"},
                                "model.layers.3.mlp.up_proj.weight"}));

TEST(NearestCost, LongNamesAreNotCompared) {
  const std::vector<std::string> candidates(10, std::string(1'000'000, 'a'));
  EXPECT_FALSE(nearest(std::string(1'000'000, 'b'), candidates));
  EXPECT_FALSE(nearest("weight", candidates));
}

TEST(DidYouMean, SuggestsOrLists) {
  EXPECT_EQ(did_you_mean("gnd", {"gdn", "hedgehog"}), " (did you mean 'gdn'?)");
  EXPECT_EQ(did_you_mean("transformer", {"gdn", "hedgehog"}), "; known: gdn, hedgehog");
  EXPECT_EQ(did_you_mean("gdn", {}), "");
}

TEST(DidYouMean, ListsADozenAndCountsTheRest) {
  std::vector<std::string> candidates;
  for (int i = 0; i < 15; ++i) candidates.push_back("name" + std::to_string(i));
  EXPECT_EQ(
      did_you_mean("zebra crossing", candidates),
      "; known: name0, name1, name2, name3, name4, name5, name6, name7, name8, name9, name10, "
      "name11 and 3 more");
}

struct QuotedCase {
  std::string name, expected;
};

class Quoted : public testing::TestWithParam<QuotedCase> {};

TEST_P(Quoted, IsSafeToShow) { EXPECT_EQ(quoted(GetParam().name), GetParam().expected); }

TEST(QuotedOverloads, IsOursForEveryKindOfText) {
  std::string changeable = "a";
  const std::string constant = "a";
  for (const std::string& text : {quoted(changeable), quoted(constant), quoted(std::string("a")),
                                  quoted("a"), quoted(std::string_view("a"))}) {
    EXPECT_EQ(text, "'a'");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Bytes, Quoted,
    testing::Values(QuotedCase{"", "''"}, QuotedCase{"model.norm", "'model.norm'"},
                    QuotedCase{"Việt 😊", "'Việt 😊'"}, QuotedCase{"\x1b[31m\n", "'\\x1b[31m\\x0a'"},
                    QuotedCase{std::string("a\0b", 3), "'a\\x00b'"},
                    QuotedCase{"\xc2\x9b", "'\\xc2\\x9b'"},                    // C1 control
                    QuotedCase{"\xc2\xa0", "'\xc2\xa0'"},                      // no-break space
                    QuotedCase{"\xff\xfe", "'\\xff\\xfe'"},                    // never in UTF-8
                    QuotedCase{"\xc0\x80", "'\\xc0\\x80'"},                    // overlong
                    QuotedCase{"\xed\xa0\x80", "'\\xed\\xa0\\x80'"},           // surrogate
                    QuotedCase{"\xf4\x90\x80\x80", "'\\xf4\\x90\\x80\\x80'"},  // past U+10FFFF
                    QuotedCase{"\xe2\x82", "'\\xe2\\x82'"},                    // cut short
                    QuotedCase{std::string(200, 'x'), "'" + std::string(200, 'x') + "'"},
                    QuotedCase{std::string(201, 'x'), "'" + std::string(200, 'x') + "...'"},
                    QuotedCase{std::string(199, 'x') + "é", "'" + std::string(199, 'x') + "...'"}));

}  // namespace
}  // namespace graft
