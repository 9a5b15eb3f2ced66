#include "core/config/train_keys.h"

#include <filesystem>
#include <set>

#include "core/base/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kRecipe = R"(keep_attention = "uniform:4"

[[stage]]
name = "align"
mixer.name = "hedgehog"
mixer.options.chunk = 64
init.name = "projection_copy"
train = ["role:feature-map-*"]
steps = 100
[[stage.objective]]
name = "layer_alignment"
options.loss = "cosine"
[[stage.group]]
match = "role:query"
lr = 1e-4

[[stage]]
name = "tune"
scope = "model"
tokens = 1000000
[[stage.objective]]
name = "kl"
[[stage.objective]]
name = "cross_entropy"
weight = 0.5

[scales.tiny]
keep_attention = "none"
stage.align.steps = 4
stage.align.objective.0.options.loss = "mse"
stage.1.tokens = 512
)";

Config parsed(const std::string& toml) {
  Config config(train_schema());
  config.read_text(toml, "r.toml", Layer::file);
  return config;
}

TEST(TrainKeys, RowsInRows) {
  const Config config = parsed(kRecipe);
  const auto& stages = config.rows("stage");
  ASSERT_EQ(stages.size(), 2u);
  EXPECT_EQ(stages[0].text("mixer.name"), "hedgehog");
  EXPECT_EQ(stages[0].table("mixer.options").at("chunk").value, ConfigValue(std::int64_t{64}));
  ASSERT_EQ(stages[0].rows("objective").size(), 1u);
  EXPECT_EQ(stages[0].rows("objective")[0].table("options").at("loss").value,
            ConfigValue("cosine"));
  EXPECT_EQ(stages[0].rows("group")[0].get<double>("lr"), 1e-4);
  ASSERT_EQ(stages[1].rows("objective").size(), 2u);
  EXPECT_EQ(stages[1].rows("objective")[1].get<double>("weight"), 0.5);
  EXPECT_EQ(stages[1].rows("objective")[1].origin().where, "r.toml:23:1");
}

TEST(TrainKeys, AScaleStandsOverTheRecipeAndUnderFlags) {
  Config config = parsed(std::string("scale = \"tiny\"\n") + kRecipe);
  apply_scale(config);
  config.set_flag("stage.align.lr", {"0.5"}, "--set stage.align.lr");
  config.set_flag("stage.1.tokens", {"256"}, "--set stage.1.tokens");
  EXPECT_EQ(config.text("keep_attention"), "none");
  const auto& stages = config.rows("stage");
  EXPECT_EQ(stages[0].get<std::int64_t>("steps"), 4);
  EXPECT_EQ(stages[0].rows("objective")[0].table("options").at("loss").value, ConfigValue("mse"));
  EXPECT_EQ(stages[0].get<double>("lr"), 0.5);
  EXPECT_EQ(stages[1].get<std::int64_t>("tokens"), 256);
  EXPECT_TRUE(config.table("scales").empty());
  EXPECT_EQ(config.text("scale"), "");
}

TEST(TrainKeys, WhatIsPrintedReadsBackAsTheSame) {
  Config config = parsed(std::string("scale = \"tiny\"\n") + kRecipe);
  apply_scale(config);
  const std::string printed = config.to_toml();
  Config again(train_schema());
  again.read_text(printed, "r.toml", Layer::file);
  ASSERT_EQ(again.rows("stage").size(), 2u);
  const auto without_comments = [](const std::string& text) {
    std::string out;
    for (std::size_t at = 0; at < text.size();) {
      const auto end = text.find('\n', at);
      const std::string row = text.substr(at, end - at);
      out += row.substr(0, row.find("  #")) + "\n";
      at = end + 1;
    }
    return out;
  };
  EXPECT_EQ(without_comments(again.to_toml()), without_comments(printed));
  EXPECT_THAT(printed, AllOf(HasSubstr("[[stage.objective]]  # r.toml:11:1"),
                             HasSubstr("keep_attention = \"none\"  # r.toml:29:1")));
}

struct Mistake {
  const char* toml;
  const char* message;
};

class TrainKeysMistake : public testing::TestWithParam<Mistake> {};

TEST_P(TrainKeysMistake, IsReportedWhereItStands) {
  EXPECT_GRAFT_ERROR(
      [] {
        Config config = parsed(GetParam().toml);
        apply_scale(config);
      }(),
      ErrorKind::usage, StartsWith(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    All, TrainKeysMistake,
    testing::Values(
        Mistake{"[[stage]]\nname = 'a'\nleraning_rate = 1",
                "r.toml:3:1: unknown key 'leraning_rate' (did you mean 'lr'?)"},
        Mistake{"[[stage]]\nname = 'a'\ngrad_accum = 2",
                "r.toml:3:1: unknown key 'grad_accum' (did you mean 'accumulate'?)"},
        Mistake{"[[stage]]\nname = 'a'\nsteps = 1.5",
                "r.toml:3:9: steps: expected a whole number, got 1.5"},
        Mistake{"[[stage]]\nsteps = 1", "r.toml:1:1: a row of [[stage]] lacks the key 'name'"},
        Mistake{"[[stage]]\nname = 'a'\nscope = 'layers'",
                "r.toml:3:9: scope: 'layers' is not one of layer, model (did you mean 'layer'?)"},
        Mistake{"[[stage]]\nname = 'a'\n[[stage.objective]]\nweight = 1",
                "r.toml:3:1: a row of [[objective]] lacks the key 'name'"},
        Mistake{"[[stage]]\nname = 'a'\n[[stage.objective]]\nname = 'kl'\nwieght = 1",
                "r.toml:5:1: unknown key 'wieght' (did you mean 'weight'?)"},
        Mistake{"[[stage]]\nname = 'a'\nobjective = 'kl'",
                "r.toml:3:1: 'objective' is a list of tables"},
        Mistake{"[[stgae]]\nname = 'a'", "r.toml:1:3: unknown key 'stgae' (did you mean 'stage'?)"},
        Mistake{"scale = 'tinny'\n[scales.tiny]\nseed = 2",
                "r.toml:1:1: there is no scale 'tinny' (did you mean 'tiny'?)"},
        Mistake{"scale = 'tiny'", "r.toml:1:1: there is no scale 'tiny'; the recipe has none"},
        // Also in a scale that is not in use.
        Mistake{"[scales.tiny]\nsede = 2", "r.toml:2:1: unknown key 'sede' (did you mean 'seed'?)"},
        Mistake{"[scales.tiny]\nseed = 'x'",
                "r.toml:2:1: seed: expected a whole number, got the string \"x\""},
        Mistake{"[[stage]]\nname = 'align'\n[scales.tiny]\nstage.algin.steps = 2",
                "r.toml:4:13: there is no row 'algin' in [[stage]] (did you mean 'align'?)"},
        Mistake{"[[stage]]\nname = 'align'\n[scales.tiny]\nstage.align.stepps = 2",
                "r.toml:4:13: unknown key 'stepps' (did you mean 'steps'?)"},
        Mistake{"[scales]\ntiny = 2", "r.toml:2:1: 'scales.tiny' is no table of keys"}));

TEST(TrainKeys, FlagsIntoRowsAreChecked) {
  Config config = parsed(kRecipe);
  EXPECT_GRAFT_ERROR(config.set_flag("stage.tun.lr", {"1"}, "--set stage.tun.lr"), ErrorKind::usage,
                     AllOf(HasSubstr("--set stage.tun.lr"), HasSubstr("did you mean 'tune'")));
  EXPECT_GRAFT_ERROR(config.set_flag("stage.tune", {"1"}, "--set stage.tune"), ErrorKind::usage,
                     HasSubstr("names a row of [[stage]]"));
  EXPECT_GRAFT_ERROR(config.set_flag("stage.tune.lr", {"fast"}, "--set stage.tune.lr"),
                     ErrorKind::usage, HasSubstr("expected a number, got 'fast'"));
  EXPECT_GRAFT_ERROR(config.set_flag("stage.7.lr", {"1"}, "--set stage.7.lr"), ErrorKind::usage,
                     HasSubstr("there is no row '7'"));
}

// The recipes that come with graft, as they stand and at each of their scales.
TEST(TrainKeys, ShippedRecipesAreValid) {
  int recipes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(GRAFT_SOURCE_DIR "/recipes/train")) {
    ++recipes;
    std::set<std::string> scales{""};
    for (const bool all : {false, true}) {
      for (const std::string& scale : std::set<std::string>(scales)) {
        Config config(train_schema());
        config.read_file(entry.path(), Layer::file);
        if (!all)
          for (const auto& [key, value] : config.table("scales"))
            scales.insert(key.substr(0, key.find('.')));
        config.set_flag("scale", {scale}, "--set scale");
        EXPECT_NO_THROW(apply_scale(config)) << entry.path() << " " << scale;
        EXPECT_FALSE(config.rows("stage").empty()) << entry.path();
      }
    }
    EXPECT_TRUE(scales.contains("tiny")) << entry.path();
    EXPECT_TRUE(scales.contains("paper")) << entry.path();
  }
  EXPECT_EQ(recipes, 4);
}

TEST(TrainKeys, OfSeveralScalesTheLaterCounts) {
  Config config = parsed("scale = 'a,b'\n[scales.a]\nseed = 2\nbudget = 5\n[scales.b]\nseed = 3");
  apply_scale(config);
  EXPECT_EQ(config.get<std::int64_t>("seed"), 3);
  EXPECT_EQ(config.get<std::int64_t>("budget"), 5);
}

}  // namespace
}  // namespace graft
