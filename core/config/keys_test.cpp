#include "core/config/keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <set>

#include "core/config/coerce.h"
#include "core/config/config.h"

namespace graft {
namespace {

// Every key of a schema and of the rows in it.
void visit(const Schema& schema, const std::string& label,
           const std::function<void(const Key&, const std::string&)>& f) {
  for (const Key& key : schema.keys) f(key, label + key.name);
  for (const RowTable& rows : schema.rows) visit(rows.row, label + rows.name + "[].", f);
}

TEST(Keys, EveryDefaultIsAllowedAndDocumented) {
  visit(graft_schema(), "", [](const Key& key, const std::string& label) {
    EXPECT_NO_THROW(check_allowed(key.default_value, key, "default")) << label;
    EXPECT_FALSE(key.doc.empty()) << label;
    EXPECT_EQ(key.doc.find('\n'), std::string::npos) << label;
    EXPECT_LE(key.min, key.max) << label;
  });
}

TEST(Keys, NamesAndFlagsAreUnique) {
  std::set<std::string> names, flags;
  for (const Key& key : graft_schema().keys) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    EXPECT_TRUE(flags.insert("--" + key.name).second) << key.name;
    EXPECT_TRUE(key.flag.empty() || flags.insert(key.flag).second) << key.flag;
  }
  for (const FreeTable& table : graft_schema().tables)
    EXPECT_TRUE(names.insert(table.name).second) << table.name;
}

// A synonym is only ever suggested; one that is a key itself would be a lie.
TEST(Keys, SynonymsAreNoKeysBesideTheirKey) {
  for (const Key& key : graft_schema().keys) {
    const auto dot = key.name.rfind('.');
    const std::string table = dot == std::string::npos ? "" : key.name.substr(0, dot + 1);
    for (const std::string& synonym : key.synonyms) {
      EXPECT_EQ(graft_schema().find_key(table + synonym), nullptr) << table + synonym;
    }
  }
}

TEST(Keys, TheDefaultsPrintAndReadBack) {
  const std::string printed = Config(graft_schema()).to_toml();
  Config again(graft_schema());
  EXPECT_NO_THROW(again.read_text(printed, "printed.toml", Layer::file));
  EXPECT_EQ(again.get<double>("calibrate.lr"), 1e-3);
}

struct Misspelt {
  const char* toml;
  const char* message;
};

class GraftMistake : public testing::TestWithParam<Misspelt> {};

TEST_P(GraftMistake, IsSuggestedTheRightKey) {
  Config config(graft_schema());
  try {
    config.read_text(GetParam().toml, "c.toml", Layer::file);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), GetParam().message);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GraftMistake,
    testing::Values(
        Misspelt{
            "calibrate.learning_rte = 1e-3",
            "c.toml:1:11: unknown key 'calibrate.learning_rte' (did you mean 'calibrate.lr'?)"},
        Misspelt{"learning_rate = 1e-3",
                 "c.toml:1:1: unknown key 'learning_rate' (did you mean 'calibrate.lr'?)"},
        Misspelt{"[calibrte]\nlr = 1",
                 "c.toml:1:2: unknown table 'calibrte' (did you mean 'calibrate'?)"},
        Misspelt{"[calibrate]\nbatch_size = 1",
                 "c.toml:2:1: unknown key 'calibrate.batch_size' (did you mean "
                 "'calibrate.batch'?)"},
        Misspelt{"keep-attention = 'none'",
                 "c.toml:1:1: unknown key 'keep-attention' (did you mean 'keep_attention'?)"},
        Misspelt{"mixer = 'gdn'",
                 "c.toml:1:1: 'mixer' is a table, not a value; write mixer.name = ..."},
        Misspelt{"[mixer.option]\na = 1",
                 "c.toml:1:8: unknown table 'mixer.option' (did you mean 'mixer.options'?)"},
        Misspelt{"[[baseline]]\nname = 'x'",
                 "c.toml:1:1: a row of [[baseline]] lacks the key 'init.name'"}));

// The recipes that come with graft.
TEST(Recipes, AllAreValid) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(GRAFT_SOURCE_DIR "/recipes")) {
    if (entry.path().extension() != ".toml") continue;
    ++count;
    Config config(graft_schema());
    EXPECT_NO_THROW(config.read_file(entry.path(), Layer::recipe)) << entry.path();
    // The name says the pair: MIXER-INIT.toml or MIXER-INIT-VARIANT.toml.
    const std::string pair = config.text("mixer.name") + "-" + config.text("init.name");
    EXPECT_THAT(entry.path().stem().string(), testing::StartsWith(pair));
    EXPECT_FALSE(config.get<bool>("calibrate.enabled") &&
                 config.text("calibrate.objective.name").empty())
        << entry.path();
  }
  EXPECT_GE(count, 3);
}

}  // namespace
}  // namespace graft
