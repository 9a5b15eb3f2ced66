#include "apps/hostapp/table.h"

#include <gtest/gtest.h>

#include <cmath>

namespace graft {
namespace {

TEST(Table, AlignsWordsLeftAndNumbersRight) {
  EXPECT_EQ(format_table({{"start", "ppl", "x"}, {"naïve", "37124", "-"}, {"taylor", "63.80", ""}}),
            "start     ppl  x\n"
            "naïve   37124  -\n"
            "taylor  63.80\n");
}

TEST(Table, TakesShortAndEmptyRows) {
  EXPECT_EQ(format_table({}), "");
  EXPECT_EQ(format_table({{"a", "b"}}), "a  b\n");
  EXPECT_EQ(format_table({{"a"}, {}, {"b", "cc"}}), "a\n\nb  cc\n");
}

TEST(Table, FiguresHaveFourDigitsOrSo) {
  EXPECT_EQ(format_figure(0), "0.00");
  EXPECT_EQ(format_figure(36.578), "36.58");
  EXPECT_EQ(format_figure(125.44), "125.4");
  EXPECT_EQ(format_figure(37124.4), "37124");
  EXPECT_EQ(format_figure(1.234e9), "1.2e+09");
  EXPECT_EQ(format_figure(-0.5), "-0.50");
  EXPECT_EQ(format_figure(INFINITY), "inf");
  EXPECT_EQ(format_figure(std::nan("")), "nan");
}

}  // namespace
}  // namespace graft
