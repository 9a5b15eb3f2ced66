#include "core/config/layer_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/testing.h"

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
                  "; it takes none, uniform:K (layers 0, K, 2K, ...), a list such as 0,4,8-11 or "
                  "the FILE.json of select-layers");
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

class LayerFileTest : public testing::Test {
 protected:
  std::string file(const std::string& content) {
    write_file_atomically(folder_ / "layers.json", content);
    return (folder_ / "layers.json").string();
  }
  TempFolder folder_;
};

TEST_F(LayerFileTest, ItsLayersAreTaken) {
  const std::string both = file(R"({"layers": [8, 0, 4, 4], "n_layers": 30, "policy": "ar"})");
  check_attention_layers(both);
  EXPECT_THAT(attention_layers(both, 30), ElementsAre(0, 4, 8));
  EXPECT_THAT(attention_layers(file(R"({"layers": [1]})"), 12), ElementsAre(1));
  EXPECT_THAT(attention_layers(file(R"({"layers": []})"), 12), IsEmpty());
}

TEST_F(LayerFileTest, MistakesNameTheFile) {
  const auto refused = [&](const std::string& content, const std::string& why) {
    const std::string name = file(content);
    EXPECT_GRAFT_ERROR(attention_layers(name, 30), ErrorKind::input,
                       testing::AllOf(testing::HasSubstr(name), testing::HasSubstr(why)));
  };
  refused("[1, 2]", "expected an object with \"layers\"");
  refused(R"({"layers": 3})", "expected an object with \"layers\"");
  refused(R"({"layers": [1, "two"]})", "\"two\", which is no layer");
  refused(R"({"layers": [-1]})", "-1, which is no layer");
  refused(R"({"layers": [1.5]})", "1.5, which is no layer");
  refused(R"({"layers": [30]})", "layers 0 to 29, not 30");
  refused(R"({"layers": [1], "n_layers": 12})", "for a model of 12 layers, this one has 30");
  refused(R"({"layers": [1], "n_layers": "x"})", "no number of layers");
  refused(R"({"layers": [1)", "layers.json");
  EXPECT_GRAFT_ERROR(attention_layers(file(R"({"layers": [0, 1]})"), 2), ErrorKind::input,
                     testing::HasSubstr("every layer keeps its attention"));
  EXPECT_GRAFT_ERROR(check_attention_layers("/no/such/layers.json"), ErrorKind::input,
                     testing::HasSubstr("/no/such/layers.json"));
}

}  // namespace
}  // namespace graft
