#include "core/text/regex.h"

#include <string>
#include <vector>

#include "core/base/testing.h"
#include "core/text/utf8.h"

namespace graft::text {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> matches(const std::string& pattern, const std::string& subject) {
  const Regex regex(pattern);
  Regex::Workspace workspace;
  Regex::Matches found(regex, subject, workspace);
  std::vector<std::string> texts;
  while (const auto match = found.next()) {
    texts.push_back(subject.substr(match->begin, match->end - match->begin));
  }
  return texts;
}

std::size_t count_of_characters(const std::string& pattern) {
  const Regex regex(pattern);
  Regex::Workspace workspace;
  std::size_t count = 0;
  std::string subject;
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    subject.clear();
    append_character(subject, c);
    if (Regex::Matches(regex, subject, workspace).next()) ++count;
  }
  return count;
}

TEST(Regex, WhiteSpaceIsUnicodesWhiteSpace) {
  EXPECT_EQ(count_of_characters(R"(\s)"), 25U);
  EXPECT_EQ(count_of_characters(R"([\s])"), 25U);
  EXPECT_EQ(count_of_characters(R"([[:space:]])"), 25U);
  EXPECT_THAT(matches(R"(\s)", "\u0085\u3000"), ElementsAre("\u0085", "\u3000"));
  // What PCRE2 takes for white space.
  EXPECT_THAT(matches(R"(\s)", "\u180E"), ElementsAre());
  EXPECT_THAT(matches(R"(\S)", "\u180E"), ElementsAre("\u180E"));
}

TEST(Regex, SetsMeanWhatTheyMeanToOniguruma) {
  EXPECT_EQ(count_of_characters(R"(\h)"), 22U);
  EXPECT_EQ(count_of_characters(R"(\H)"), 0x10FFFFU + 1 - 0x800 - 22);
  EXPECT_EQ(count_of_characters("."), 0x10FFFFU + 1 - 0x800 - 1);
  EXPECT_EQ(count_of_characters("(?i:s)"), 3U);
  EXPECT_THAT(matches(R"(\w+)", "a_1é\u0301²½ x-y"), ElementsAre("a_1é\u0301²½", "x", "y"));
  EXPECT_THAT(matches(R"(\W)", "a- b"), ElementsAre("-", " "));
  EXPECT_THAT(matches(R"(\d)", "1²٣"), ElementsAre("1", "٣"));
  EXPECT_THAT(matches(R"(\D)", "1²٣"), ElementsAre("²"));
  EXPECT_THAT(matches("[[:punct:]]", "a.$+€"), ElementsAre(".", "$", "+", "€"));
  EXPECT_THAT(matches("[^[:alpha:][:digit:]]", "aé1-"), ElementsAre("-"));
  EXPECT_THAT(matches(R"(\v)", "\n\x0B"), ElementsAre("\x0B"));
}

TEST(Regex, PropertiesAreFoundByAnyOfTheirSpellings) {
  for (const char* letter : {R"(\p{L})", R"(\p{l})", R"(\p{Letter})", R"([\p{L}])", R"(\P{^L})"}) {
    EXPECT_THAT(matches(letter, "1a-日"), ElementsAre("a", "日")) << letter;
  }
  for (const char* han : {R"(\p{Han})", R"(\p{han})", R"([\p{Han}])"}) {
    // U+3001 has Han among its script extensions, but its script is Common.
    EXPECT_THAT(matches(han, "a日\u3001"), ElementsAre("日")) << han;
  }
  EXPECT_THAT(matches(R"(\p{^Alpha})", "a1"), ElementsAre("1"));
  EXPECT_THAT(matches(R"(\p{White_Space})", "a b"), ElementsAre(" "));
}

TEST(Regex, LinesAndFlagsFollowRuby) {
  EXPECT_THAT(matches("^.", "ab\ncd"), ElementsAre("a", "c"));
  EXPECT_THAT(matches("a.", "a\nab"), ElementsAre("ab"));
  EXPECT_THAT(matches("(?m:a.)", "a\nab"), ElementsAre("a\n", "ab"));
  EXPECT_THAT(matches("x(?i)a|b", "xA xB xa B b"), ElementsAre("xA", "xB", "xa"));
  EXPECT_THAT(matches("(?:x(?i)a)b", "xAb xAB"), ElementsAre("xAb"));
  EXPECT_THAT(matches("(?i:a(?-i)b)", "AB Ab"), ElementsAre("Ab"));
  EXPECT_THAT(matches("a(?#comment)b", "ab"), ElementsAre("ab"));
}

TEST(Regex, BracesBracketsAndEscapes) {
  EXPECT_THAT(matches("a{,2}b", "aab b"), ElementsAre("aab", "b"));
  EXPECT_THAT(matches("a{2,}", "aaa a"), ElementsAre("aaa"));
  EXPECT_THAT(matches("{x}", "a{x}"), ElementsAre("{x}"));
  EXPECT_THAT(matches("[]a]", "]a"), ElementsAre("]", "a"));
  EXPECT_THAT(matches(R"([\]\[&])", "[]&"), ElementsAre("[", "]", "&"));
  EXPECT_THAT(matches(R"(\u65e5\x{672C}\x41)", "日本A"), ElementsAre("日本A"));
  EXPECT_THAT(matches(R"(\x{41}+)", "AA"), ElementsAre("AA"));
  EXPECT_THAT(matches(R"(\bin\b)", "in inn"), ElementsAre("in"));
  EXPECT_THAT(matches(R"(in\B)", "in inn"), ElementsAre("in"));
  EXPECT_THAT(matches(R"([\b])", "\b"), ElementsAre("\b"));
}

TEST(Regex, LookaroundSeesTheWholeSubject) {
  EXPECT_THAT(matches(R"(\s+(?!\S)|\s+)", "a  b "), ElementsAre(" ", " ", " "));
  EXPECT_THAT(matches(R"((?<=a)b)", "ab bb"), ElementsAre("b"));
}

TEST(Regex, EmptyMatchesBehindAnotherDoNotCount) {
  EXPECT_THAT(matches(R"(\d*)", "12éé3"), ElementsAre("12", "", "3"));
  EXPECT_THAT(matches("", "é"), ElementsAre("", ""));
  EXPECT_THAT(matches("x*", ""), ElementsAre(""));
}

TEST(Regex, RefusesWhatItCannotTranslate) {
  const std::vector<std::pair<std::string, std::string>> refused = {
      {"[a&&b]", "the intersection &&"},
      {"[a[bc]]", "a character class inside a character class"},
      {"[[:lower:]]", "[:lower:]"},
      {R"([\W])", "a negated set inside a character class"},
      {"a{2}+", "{...}+"},
      {"a{2}?", "{n}?"},
      {"(?x: a b )", "(?x...)"},
      {"(?~abc)", "(?~...)"},
      {"(*FAIL)", "(*...)"},
      {R"(\Qa\E)", R"(the escape \Q)"},
      {R"(\xE9)", R"(which is not \x{...})"},
      {R"(\u12)", R"(\u without four hex digits)"},
      {R"(\p)", R"(\p without {...})"},
      {R"(\p{L&})", R"(\p{L&})"},
      {"[abc", "a character class that is not closed"},
      {"a)", "a ) without its ("},
      {"a\\", "it ends in a backslash"},
      {"(?i", "a group that is not closed"},
  };
  for (const auto& [pattern, cause] : refused) {
    SCOPED_TRACE(pattern);
    EXPECT_GRAFT_ERROR(Regex{pattern}, ErrorKind::input,
                       AllOf(HasSubstr("the regular expression '"), HasSubstr("is not supported: "),
                             HasSubstr(cause)));
  }
}

TEST(Regex, RefusesWhatIsNotAnExpression) {
  EXPECT_GRAFT_ERROR(Regex("(a"), ErrorKind::input,
                     AllOf(HasSubstr("'(a' is not valid: "), HasSubstr("parenthesis")));
  EXPECT_GRAFT_ERROR(Regex("*a"), ErrorKind::input, HasSubstr("'*a' is not valid: "));
  EXPECT_GRAFT_ERROR(Regex(R"(\p{Klingon})"), ErrorKind::input, HasSubstr("is not valid: "));
  EXPECT_GRAFT_ERROR(Regex(std::string(2000, '(') + std::string(2000, ')')), ErrorKind::input,
                     HasSubstr("is not valid: "));
}

TEST(Regex, AnExponentialPatternIsStopped) {
  EXPECT_GRAFT_ERROR(matches("(?:a|a)*[bc]", std::string(100, 'a')), ErrorKind::input,
                     AllOf(HasSubstr("'(?:a|a)*[bc]' cannot be matched: "), HasSubstr("limit")));
}

// A pattern that looks ahead for a line end at every run of spaces must not give up on a long run.
TEST(Regex, LongRunsAreMatched) {
  const std::string spaces(2'000'000, ' ');
  const std::string llama3 = R"([^\r\n\p{L}\p{N}]?\p{L}+|\s*[\r\n]+|\s+(?!\S)|\s+)";
  EXPECT_EQ(matches(llama3, spaces + "x").size(), 2U);
  EXPECT_EQ(matches(llama3, spaces).size(), 1U);
  EXPECT_EQ(matches("(?:ab)+", std::string(1'000'000, 'a') + "b").size(), 1U);
}

}  // namespace
}  // namespace graft::text
