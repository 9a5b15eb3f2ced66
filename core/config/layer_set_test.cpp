#include "core/config/layer_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace graft {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(LayerSet, None) { EXPECT_THAT(attention_layers("none", 30), IsEmpty()); }

TEST(LayerSet, Uniform) {
  EXPECT_THAT(attention_layers("uniform:4", 30), ElementsAre(0, 4, 8, 12, 16, 20, 24, 28));
  EXPECT_THAT(attention_layers("uniform:4", 4), ElementsAre(0));
  EXPECT_THAT(attention_layers("uniform:4", 5), ElementsAre(0, 4));
  EXPECT_THAT(attention_layers("uniform:2147483647", 30), ElementsAre(0));
  EXPECT_THAT(attention_layers("uniform:2", 2), ElementsAre(0));
}

TEST(LayerSet, Lists) {
  EXPECT_THAT(attention_layers("0,4,8", 30), ElementsAre(0, 4, 8));
  EXPECT_THAT(attention_layers("8,0,4,0", 30), ElementsAre(0, 4, 8));
  EXPECT_THAT(attention_layers("1-3,3-5,29", 30), ElementsAre(1, 2, 3, 4, 5, 29));
  EXPECT_THAT(attention_layers("7", 30), ElementsAre(7));
}

struct BadSpec {
  const char* label;
  const char* spec;
  const char* why;
};

class LayerSetMistake : public testing::TestWithParam<BadSpec> {};

TEST_P(LayerSetMistake, SaysWhatItTakes) {
  const auto& [label, spec, why] = GetParam();
  try {
    attention_layers(spec, 30);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::usage);
    EXPECT_EQ(error.what(),
              std::string("keep_attention '") + spec + "': " + why +
                  "; it takes none, uniform:K (layers 0, K, 2K, ...) or a list such as 0,4,8-11");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, LayerSetMistake,
    testing::Values(
        BadSpec{"Empty", "", "cannot read ''"}, BadSpec{"Word", "some", "cannot read 'some'"},
        BadSpec{"EmptyItem", "1,,2", "cannot read ''"},
        BadSpec{"TrailingComma", "1,", "cannot read ''"},
        BadSpec{"Space", "1, 2", "cannot read ' 2'"}, BadSpec{"Negative", "-1", "cannot read '-1'"},
        BadSpec{"Backwards", "5-3", "the range '5-3' runs backwards"},
        BadSpec{"Overflow", "99999999999", "cannot read '99999999999'"},
        BadSpec{"NoSuchLayer", "30", "the model has layers 0 to 29, not 30"},
        BadSpec{"RangeBeyond", "0-2147483647", "the model has layers 0 to 29, not 2147483647"},
        BadSpec{"UniformNothing", "uniform:", "K must be a whole number of at least 1"},
        BadSpec{"UniformZero", "uniform:0", "K must be a whole number of at least 1"},
        BadSpec{"UniformWord", "uniform:x", "K must be a whole number of at least 1"},
        BadSpec{"UniformAll", "uniform:1", "every layer keeps its attention, none is converted"},
        BadSpec{"ListAll", "0-29", "every layer keeps its attention, none is converted"}),
    [](const auto& instance) { return instance.param.label; });

TEST(LayerSet, CheckKnowsWhatNoModelTakes) {
  EXPECT_NO_THROW(check_attention_layers("none"));
  EXPECT_NO_THROW(check_attention_layers("uniform:4"));
  EXPECT_NO_THROW(check_attention_layers("100-200"));
  EXPECT_THROW(check_attention_layers("uniform:0"), Error);
  EXPECT_THROW(check_attention_layers("all"), Error);
}

}  // namespace
}  // namespace graft
