#include "core/config/value.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "core/config/toml_reader.h"

namespace graft {
namespace {

TEST(Value, PrintsAsToml) {
  EXPECT_EQ(to_toml(true), "true");
  EXPECT_EQ(to_toml(std::int64_t{-3}), "-3");
  EXPECT_EQ(to_toml(1.0), "1.0");
  EXPECT_EQ(to_toml(1e-3), "0.001");
  EXPECT_EQ(to_toml(1e22), "1e+22");
  EXPECT_EQ(to_toml(-0.0), "-0.0");
  EXPECT_EQ(to_toml("a\"b\\\n\x7f"), R"("a\"b\\\n\u007f")");
  EXPECT_EQ(to_toml(std::vector<double>{1, 0.5}), "[1.0, 0.5]");
  EXPECT_EQ(to_toml(std::vector<std::string>{}), "[]");
}

TEST(Value, NumbersComeBackToTheSameBits) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {
    const double value = std::bit_cast<double>(random());
    if (std::isnan(value)) continue;
    const auto back = parse_toml_value(to_toml(value));
    ASSERT_TRUE(back) << to_toml(value);
    ASSERT_EQ(*back, ConfigValue(value)) << to_toml(value);
  }
  for (const double value :
       {0.0, 5e-324, std::numeric_limits<double>::max(), std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(parse_toml_value(to_toml(value)), ConfigValue(value));
  }
}

TEST(Value, StringsComeBackToTheSameBytes) {
  std::string every;
  for (int byte = 0; byte < 0x80; ++byte) every += static_cast<char>(byte);
  every += "é€😀";
  const auto back =
      parse_toml_value(to_toml(every.substr(0, 35)));  // up to the '#', which a flag may not hold
  ASSERT_TRUE(back);
  EXPECT_EQ(*back, ConfigValue(every.substr(0, 35)));
}

TEST(Value, ParsesOneValueOnly) {
  EXPECT_EQ(parse_toml_value("1"), ConfigValue(std::int64_t{1}));
  EXPECT_EQ(parse_toml_value("[1, 2.5]"), ConfigValue(std::vector<double>{1, 2.5}));
  for (const char* text : {"", " ", "x", "1 2", "1\nb = 2", "1 # note", "{a = 1}", "1979-05-27",
                           "[1, 'x']", "[true]", "'"}) {
    EXPECT_FALSE(parse_toml_value(text)) << text;
  }
}

TEST(Value, QuotesKeysThatNeedIt) {
  EXPECT_EQ(toml_key("silu_v"), "silu_v");
  EXPECT_EQ(toml_key("a-1"), "a-1");
  EXPECT_EQ(toml_key(""), "\"\"");
  EXPECT_EQ(toml_key("a.b"), "\"a.b\"");
  EXPECT_EQ(toml_key("é"), "\"é\"");
}

TEST(Value, KnowsUtf8) {
  for (const char* good : {"", "a", "é", "€", "😀", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(is_utf8(good)) << good;
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\xf5", "\xe2\x82", "a\xff"}) {
    EXPECT_FALSE(is_utf8(bad)) << bad;
  }
}

}  // namespace
}  // namespace graft
