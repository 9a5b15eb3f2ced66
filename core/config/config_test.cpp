#include "core/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "core/config/keys.h"

namespace graft {
namespace {

using Strings = std::vector<std::string>;
using testing::ElementsAre;

// A small schema, so that these tests do not move when graft's keys do.
const Schema& small_schema() {
  static const Schema schema = {
      .keys =
          {{.name = "out", .default_value = "", .doc = "a folder"},
           {.name = "text", .default_value = Strings{}, .doc = "files"},
           {.name = "force", .default_value = false, .doc = "a switch"},
           {.name = "mixer.name", .default_value = "", .doc = "a plugin", .flag = "--mixer"},
           {.name = "train.lr",
            .default_value = 1e-3,
            .doc = "a rate",
            .min = 0,
            .synonyms = {"learning_rate"}},
           {.name = "train.steps", .default_value = 100, .doc = "a count", .min = 0, .max = 1000},
           {.name = "train.betas",
            .default_value = std::vector<double>{0.9, 0.999},
            .doc = "two",
            .min = 0,
            .max = 1},
           {.name = "train.layers", .default_value = std::vector<std::int64_t>{}, .doc = "some"},
           {.name = "train.schedule",
            .default_value = "cosine",
            .doc = "a choice",
            .one_of = {"constant", "cosine"}}},
      .tables = {{.name = "mixer.options", .doc = "the plugin's", .type = {}},
                 {.name = "train.lr_roles", .doc = "rates", .type = ValueType::number}},
      .rows = {{.name = "row",
                .doc = "rows",
                .row = {.keys = {{.name = "name",
                                  .default_value = "",
                                  .doc = "its name",
                                  .required = true},
                                 {.name = "weight", .default_value = 1.0, .doc = "its weight"}},
                        .tables = {{.name = "init.options", .doc = "its options", .type = {}}},
                        .rows = {}}}},
  };
  return schema;
}

Config parsed(std::string_view toml, Layer layer = Layer::file) {
  Config config(small_schema());
  config.read_text(toml, "c.toml", layer);
  return config;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::usage);
    return error.what();
  }
  return "no error";
}

// ---------------------------------------------------------------- reading

TEST(Config, StartsAtTheDefaults) {
  const Config config(small_schema());
  EXPECT_EQ(config.get<double>("train.lr"), 1e-3);
  EXPECT_EQ(config.get<std::int64_t>("train.steps"), 100);
  EXPECT_FALSE(config.given("train.lr"));
  EXPECT_EQ(config.at("train.lr").origin.where, "default");
  EXPECT_TRUE(config.table("mixer.options").empty());
  EXPECT_TRUE(config.rows("row").empty());
}

TEST(Config, ReadsEveryType) {
  const Config config = parsed(R"(out = "a b"
text = ["x", "y"]
force = true
[train]
lr = 2.5e-4
steps = 7
betas = [0.8, 0.9]
layers = [1, 2]
schedule = "constant"
)");
  EXPECT_EQ(config.text("out"), "a b");
  EXPECT_THAT(config.get<Strings>("text"), ElementsAre("x", "y"));
  EXPECT_TRUE(config.get<bool>("force"));
  EXPECT_EQ(config.get<double>("train.lr"), 2.5e-4);
  EXPECT_EQ(config.get<std::int64_t>("train.steps"), 7);
  EXPECT_THAT(config.get<std::vector<double>>("train.betas"), ElementsAre(0.8, 0.9));
  EXPECT_THAT(config.get<std::vector<std::int64_t>>("train.layers"), ElementsAre(1, 2));
  EXPECT_EQ(config.text("train.schedule"), "constant");
}

// A reader that falls back to the default where the type is another one would train with lr 0.001
// here.
TEST(Config, AWholeNumberIsANumber) {
  EXPECT_EQ(parsed("train.lr = 1").get<double>("train.lr"), 1.0);
  EXPECT_THAT(parsed("train.betas = [0, 1]").get<std::vector<double>>("train.betas"),
              ElementsAre(0.0, 1.0));
  EXPECT_THAT(parsed("train.betas = [0, 0.5]").get<std::vector<double>>("train.betas"),
              ElementsAre(0.0, 0.5));
  EXPECT_EQ(parsed("train.lr_roles.query = 1").table("train.lr_roles").at("query").value,
            ConfigValue(1.0));
}

TEST(Config, OneStringIsAListOfOne) {
  EXPECT_THAT(parsed("text = 'x'").get<Strings>("text"), ElementsAre("x"));
}

TEST(Config, EmptyListsFitEveryListType) {
  const Config config = parsed("text = []\ntrain.betas = []\ntrain.layers = []");
  EXPECT_TRUE(config.get<Strings>("text").empty());
  EXPECT_TRUE(config.get<std::vector<double>>("train.betas").empty());
  EXPECT_TRUE(config.get<std::vector<std::int64_t>>("train.layers").empty());
}

TEST(Config, FreeTablesKeepWhatTheyAreGivenWithItsPlace) {
  const Config config =
      parsed("[mixer.options]\nsilu_v = false\n[mixer.options.map]\ndim = 3\n'a.b' = [1, 2.5]\n");
  const auto options = config.table("mixer.options");
  ASSERT_EQ(options.size(), 3u);
  EXPECT_EQ(options.at("silu_v").value, ConfigValue(false));
  EXPECT_EQ(options.at("silu_v").origin.where, "c.toml:2:1");
  EXPECT_EQ(options.at("map.dim").value, ConfigValue(std::int64_t{3}));
  EXPECT_EQ(options.at("map.a.b").value, ConfigValue(std::vector<double>{1, 2.5}));
}

TEST(Config, RowsAreSmallConfigurations) {
  const Config config =
      parsed("[[row]]\nname = 'a'\ninit.options.gates = 'zero'\n[[row]]\nname = 'b'\nweight = 2\n");
  const auto& rows = config.rows("row");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].text("name"), "a");
  EXPECT_EQ(rows[0].table("init.options").at("gates").value, ConfigValue("zero"));
  EXPECT_EQ(rows[0].get<double>("weight"), 1.0);
  EXPECT_EQ(rows[1].get<double>("weight"), 2.0);
  EXPECT_EQ(rows[1].origin().where, "c.toml:4:1");
}

TEST(Config, ReadsByteOrderMarkAndCarriageReturns) {
  const Config config = parsed("\xEF\xBB\xBFout = 'x'\r\n[train]\r\nlr = 1\r\n");
  EXPECT_EQ(config.text("out"), "x");
  EXPECT_EQ(config.get<double>("train.lr"), 1.0);
  EXPECT_EQ(config.at("out").origin.where, "c.toml:1:1");
  EXPECT_EQ(config.at("train.lr").origin.where, "c.toml:3:1");
}

TEST(Config, AnEmptyFileChangesNothing) {
  EXPECT_EQ(parsed("").to_toml(), Config(small_schema()).to_toml());
  EXPECT_EQ(parsed("# only a comment").to_toml(), Config(small_schema()).to_toml());
}

// ---------------------------------------------------------------- mistakes in files

struct BadFile {
  const char* label;
  std::string toml;
  std::string message;
};

class ConfigMistake : public testing::TestWithParam<BadFile> {};

TEST_P(ConfigMistake, NamesPlaceKeyAndWayOut) {
  EXPECT_EQ(error_of([] { parsed(GetParam().toml); }), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Types, ConfigMistake,
    testing::Values(
        BadFile{"StringForNumber", "[train]\nlr = \"1e-3\"",
                "c.toml:2:6: train.lr: expected a number, got the string \"1e-3\" (write it "
                "without quotes)"},
        BadFile{"WordForNumber", "train.lr = 'fast'",
                "c.toml:1:12: train.lr: expected a number, got the string \"fast\""},
        BadFile{"FractionForCount", "[train]\nsteps = 1.5",
                "c.toml:2:9: train.steps: expected a whole number, got 1.5"},
        BadFile{"WholeFloatForCount", "train.steps = 2.0",
                "c.toml:1:15: train.steps: expected a whole number, got 2.0"},
        BadFile{"NumberForBool", "force = 1", "c.toml:1:9: force: expected true or false, got 1"},
        BadFile{"StringForBool", "force = 'true'",
                "c.toml:1:9: force: expected true or false, got the string \"true\" (write it "
                "without quotes)"},
        BadFile{"NumberForString", "out = 3", "c.toml:1:7: out: expected a string, got 3"},
        BadFile{"BoolForNumber", "train.lr = true",
                "c.toml:1:12: train.lr: expected a number, got true"},
        BadFile{"ScalarForList", "train.betas = 0.9",
                "c.toml:1:15: train.betas: expected a list of numbers, got 0.9"},
        BadFile{"ListForScalar", "train.lr = [1]",
                "c.toml:1:12: train.lr: expected a number, got [1]"},
        BadFile{"NumbersForStrings", "text = [1, 2]",
                "c.toml:1:8: text: expected a list of strings, got [1, 2]"},
        BadFile{"MixedList", "text = ['a', 2]",
                "c.toml:1:14: text: a list holds items of one type, not the string \"a\" and 2"},
        BadFile{"BoolsInList", "text = [true]",
                "c.toml:1:9: text: a list holds numbers or strings, not true"},
        BadFile{"ListInList", "train.betas = [[1]]",
                "c.toml:1:16: train.betas: a list holds numbers or strings, not a list"},
        BadFile{"Date", "out = 1979-05-27", "c.toml:1:7: out: expected a string, got a date"},
        BadFile{"DateInFreeTable", "mixer.options.day = 07:32:00",
                "c.toml:1:21: mixer.options.day: expected a number, true or false, a string or a "
                "list of them, got a time"},
        BadFile{"TableForValue", "[out]\nx = 1", "c.toml:1:1: out: expected a string, got a table"},
        BadFile{"ValueForTable", "train = 3",
                "c.toml:1:1: 'train' is a table, not a value; write [train]"},
        BadFile{"NameForTable", "mixer = 'gdn'",
                "c.toml:1:1: 'mixer' is a table, not a value; write mixer.name = ..."},
        BadFile{"ValueForFreeTable", "mixer.options = 3",
                "c.toml:1:7: 'mixer.options' is a table, not a value; write [mixer.options]"},
        BadFile{"WordInTypedTable", "[train.lr_roles]\nquery = 'x'",
                "c.toml:2:9: train.lr_roles.query: expected a number, got the string \"x\""},
        BadFile{"TableForRows", "[row]\nname = 'a'",
                "c.toml:1:2: 'row' is a list of tables; start each row with [[row]]"},
        BadFile{"ValueInRows", "row = [{name = 'a'}, 3]",
                "c.toml:1:1: 'row' is a list of tables; start each row with [[row]]"}),
    [](const auto& instance) { return instance.param.label; });

INSTANTIATE_TEST_SUITE_P(
    Values, ConfigMistake,
    testing::Values(BadFile{"BelowMinimum", "train.lr = -1",
                            "c.toml:1:12: train.lr: must be at least 0, got -1"},
                    BadFile{"OutsideRange", "train.steps = 1001",
                            "c.toml:1:15: train.steps: must be between 0 and 1000, got 1001"},
                    BadFile{"OutsideRangeInList", "train.betas = [0.9, 1.5]",
                            "c.toml:1:15: train.betas: must be between 0 and 1, got 1.5"},
                    BadFile{"NotANumber", "train.lr = nan",
                            "c.toml:1:12: train.lr: expected a finite number, got nan"},
                    BadFile{"Infinite", "train.lr = inf",
                            "c.toml:1:12: train.lr: expected a finite number, got inf"},
                    BadFile{"WrongChoice", "train.schedule = 'cosin'",
                            "c.toml:1:18: train.schedule: 'cosin' is not one of constant, cosine "
                            "(did you mean 'cosine'?)"},
                    BadFile{"NoSuchChoice", "train.schedule = 'xyz'",
                            "c.toml:1:18: train.schedule: 'xyz' is not one of constant, cosine"},
                    BadFile{"RowWithoutName", "[[row]]\nweight = 1",
                            "c.toml:1:1: a row of [[row]] lacks the key 'name'"}),
    [](const auto& instance) { return instance.param.label; });

INSTANTIATE_TEST_SUITE_P(
    UnknownKeys, ConfigMistake,
    testing::Values(
        BadFile{"Typo", "[train]\nstps = 3",
                "c.toml:2:1: unknown key 'train.stps' (did you mean 'train.steps'?)"},
        BadFile{"TypoOfTable", "out = 'x'\n[trian]\nlr = 1",
                "c.toml:2:2: unknown table 'trian' (did you mean 'train'?)"},
        BadFile{"OtherWord", "[train]\nlearning_rate = 1e-3",
                "c.toml:2:1: unknown key 'train.learning_rate' (did you mean 'train.lr'?)"},
        BadFile{"OtherWordWithTypo", "learning_rte = 1e-3",
                "c.toml:1:1: unknown key 'learning_rte' (did you mean 'train.lr'?)"},
        BadFile{"WrongTable", "steps = 3",
                "c.toml:1:1: unknown key 'steps' (did you mean 'train.steps'?)"},
        BadFile{"NothingNear", "[train]\nzzzzzzzz = 1",
                "c.toml:2:1: unknown key 'train.zzzzzzzz'; known: train.lr, train.steps, "
                "train.betas, train.layers, "
                "train.schedule, train.lr_roles"},
        BadFile{"InRow", "[[row]]\nname = 'a'\nwieght = 2",
                "c.toml:3:1: unknown key 'wieght' (did you mean 'weight'?)"},
        BadFile{"FirstInTheFileFirst", "zout = 1\naut = 2",
                "c.toml:1:1: unknown key 'zout' (did you mean 'out'?)"},
        BadFile{"ControlCharacters", "\"a\\u0007b\" = 2",
                "c.toml:1:1: unknown key 'a\\x07b'; known: out, text, force, mixer, train, row"}),
    [](const auto& instance) { return instance.param.label; });

INSTANTIATE_TEST_SUITE_P(
    InvalidToml, ConfigMistake,
    testing::Values(
        BadFile{"DuplicateKey", "[train]\nlr = 1\nlr = 2",
                "c.toml:3:6: invalid TOML: key-value pair: cannot redefine existing integer 'lr'"},
        BadFile{"DuplicateTable", "[train]\nlr = 1\n[train]\nsteps = 1",
                "c.toml:3:1: invalid TOML: table header: cannot redefine existing table 'train'"},
        BadFile{"DuplicateThroughQuotes", "train.lr = 1\n'train.lr' = 2",
                "c.toml:2:1: 'train.lr' is given twice"},
        BadFile{"NoValue", "out = \n",
                "c.toml:1:7: invalid TOML: key-value pair: expected value, saw '\\n'"},
        BadFile{"NoEquals", "out 'x'",
                "c.toml:1:5: invalid TOML: key-value pair: expected '=', saw '''"},
        BadFile{"OpenString", "out = 'x",
                "c.toml:1:9: invalid TOML: string: encountered end-of-file"},
        BadFile{"OpenHeader", "[train\nlr = 1",
                "c.toml:1:7: invalid TOML: table header: expected ']', saw '\\n'"},
        BadFile{"NotUtf8", "out = '\xff'",
                "c.toml:1:7: invalid TOML: Encountered invalid utf-8 sequence"},
        BadFile{"TooLong", "train.steps = 99999999999999999999",
                "c.toml:1:35: invalid TOML: decimal integer: '99999999999999999999' is not "
                "representable in 64 bits"},
        BadFile{"TooDeep",
                "out = 1\na" +
                    [] {
                      std::string dots;
                      for (int i = 0; i < 100000; ++i) dots += ".a";
                      return dots;
                    }() +
                    " = 1",
                "c.toml:2:1: more than 1000 dots in one line"},
        BadFile{"TooLarge", std::string((4u << 20) + 1, '\n'),
                "c.toml: larger than 4 MiB, not a configuration file"}),
    [](const auto& instance) { return instance.param.label; });

TEST(Config, NestsAsDeepAsIsAllowed) {
  std::string key = "a";
  for (int i = 0; i < 990; ++i) key += ".a";
  const Config config = parsed("[mixer.options." + key + "]\n" + key + " = 1");
  EXPECT_EQ(config.table("mixer.options").size(), 1u);
}

TEST(Config, AFileThatCannotBeReadIsNamed) {
  Config config(small_schema());
  EXPECT_THAT(error_of([&] { config.read_file("/nonexistent/c.toml", Layer::file); }),
              testing::AllOf(testing::StartsWith("configuration: "),
                             testing::HasSubstr("/nonexistent/c.toml")));
  EXPECT_THAT(
      error_of([&] { config.read_file(std::filesystem::temp_directory_path(), Layer::file); }),
      testing::HasSubstr("folder"));
}

TEST(Config, AMistakeInAFileOnDiskNamesItsPath) {
  const auto path = std::filesystem::temp_directory_path() / "graft config test é.toml";
  std::ofstream(path) << "\n\n  ot = 1\n";
  Config config(small_schema());
  EXPECT_EQ(error_of([&] { config.read_file(path, Layer::file); }),
            path.string() + ":3:3: unknown key 'ot' (did you mean 'out'?)");
  std::filesystem::remove(path);
}

// ---------------------------------------------------------------- flags

Config flagged(const std::string& key, const Strings& words) {
  Config config(small_schema());
  config.set_flag(key, words, "--" + key);
  return config;
}

TEST(ConfigFlag, TakesEveryType) {
  EXPECT_EQ(flagged("out", {"a,b [c]"}).text("out"), "a,b [c]");
  EXPECT_TRUE(flagged("force", {"true"}).get<bool>("force"));
  EXPECT_EQ(flagged("train.steps", {"12"}).get<std::int64_t>("train.steps"), 12);
  EXPECT_EQ(flagged("train.lr", {"1"}).get<double>("train.lr"), 1.0);
  EXPECT_EQ(flagged("train.lr", {"1e-3"}).get<double>("train.lr"), 1e-3);
  EXPECT_EQ(flagged("train.lr", {".5"}).get<double>("train.lr"), 0.5);
  EXPECT_THAT(flagged("train.betas", {"0.5,0.75"}).get<std::vector<double>>("train.betas"),
              ElementsAre(0.5, 0.75));
  EXPECT_THAT(flagged("train.betas", {"[0.5, 1]"}).get<std::vector<double>>("train.betas"),
              ElementsAre(0.5, 1.0));
  EXPECT_THAT(flagged("train.layers", {"1", "2,3"}).get<std::vector<std::int64_t>>("train.layers"),
              ElementsAre(1, 2, 3));
  EXPECT_THAT(flagged("text", {"a", "b,c"}).get<Strings>("text"), ElementsAre("a", "b,c"));
  EXPECT_THAT(flagged("text", {"['a', \"b,c\"]"}).get<Strings>("text"), ElementsAre("a", "b,c"));
  EXPECT_EQ(flagged("train.lr_roles.query", {"1"}).table("train.lr_roles").at("query").value,
            ConfigValue(1.0));
}

TEST(ConfigFlag, GuessesTheTypeOfAFreeKeyAndKeepsTheText) {
  const auto guess = [](const std::string& word) {
    const auto entry = flagged("mixer.options.x", {word}).table("mixer.options").at("x");
    EXPECT_EQ(entry.text, word);
    EXPECT_EQ(entry.origin.where, "--mixer.options.x");
    return entry.value;
  };
  EXPECT_EQ(guess("false"), ConfigValue(false));
  EXPECT_EQ(guess("3"), ConfigValue(std::int64_t{3}));
  EXPECT_EQ(guess("3.5"), ConfigValue(3.5));
  EXPECT_EQ(guess("[1, 2]"), ConfigValue(std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(guess("'3'"), ConfigValue("3"));
  EXPECT_EQ(guess("zero"), ConfigValue("zero"));
  EXPECT_EQ(guess(""), ConfigValue(""));
  EXPECT_EQ(guess("1\ny = 2"), ConfigValue("1\ny = 2"));
  EXPECT_EQ(guess("{a = 1}"), ConfigValue("{a = 1}"));
  EXPECT_EQ(guess("1979-05-27"), ConfigValue("1979-05-27"));
  EXPECT_EQ(guess("3 # x"), ConfigValue("3 # x"));
}

struct BadFlag {
  const char* label;
  std::string key;
  Strings words;
  std::string message;
};

class ConfigFlagMistake : public testing::TestWithParam<BadFlag> {};

TEST_P(ConfigFlagMistake, NamesFlagAndWayOut) {
  EXPECT_EQ(error_of([] { flagged(GetParam().key, GetParam().words); }), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    All, ConfigFlagMistake,
    testing::Values(
        BadFlag{"WordForNumber", "train.lr", {"fast"}, "--train.lr: expected a number, got 'fast'"},
        BadFlag{"Infinite", "train.lr", {"inf"}, "--train.lr: expected a finite number, got inf"},
        BadFlag{"Fraction",
                "train.steps",
                {"1.5"},
                "--train.steps: expected a whole number, got '1.5'"},
        BadFlag{"Overflow",
                "train.steps",
                {"99999999999999999999"},
                "--train.steps: expected a whole number, got '99999999999999999999'"},
        BadFlag{"Empty", "train.steps", {""}, "--train.steps: expected a whole number, got ''"},
        BadFlag{"BadBool", "force", {"yes"}, "--force: expected true or false, got 'yes'"},
        BadFlag{
            "Range", "train.steps", {"-1"}, "--train.steps: must be between 0 and 1000, got -1"},
        BadFlag{"BadList",
                "train.betas",
                {"0.5,,1"},
                "--train.betas: expected a number between the commas, got ''"},
        BadFlag{"BadTomlList", "text", {"['a'"}, "--text: '['a'' is not a list as TOML writes it"},
        BadFlag{"WrongTomlList", "text", {"[1]"}, "--text: expected a list of strings, got [1]"},
        BadFlag{"NotUtf8", "out", {"a\xff"}, "--out: the text 'a\\xff' is not UTF-8"},
        BadFlag{"Typo",
                "train.stps",
                {"1"},
                "--train.stps: unknown key 'train.stps' (did you mean 'train.steps'?)"},
        BadFlag{"Table",
                "train",
                {"1"},
                "--train: 'train' is a table; set one of its keys: --train.KEY VALUE"},
        BadFlag{"FreeTable",
                "mixer.options",
                {"1"},
                "--mixer.options: 'mixer.options' is a table; set one of its keys: "
                "--mixer.options.KEY VALUE"},
        BadFlag{"Rows",
                "row",
                {"1"},
                "--row: 'row' is a list of tables, which only a file can hold: [[row]]"}),
    [](const auto& instance) { return instance.param.label; });

// ---------------------------------------------------------------- layers

TEST(ConfigLayers, TheStrongerWinsInWhateverOrder) {
  const auto read = [](const std::vector<Layer>& order) {
    Config config(small_schema());
    for (const Layer layer : order) {
      if (layer == Layer::recipe)
        config.read_text("train.steps = 1\ntrain.lr = 1\nout = 'r'", "r.toml", layer);
      if (layer == Layer::file) config.read_text("train.steps = 2\ntrain.lr = 2", "c.toml", layer);
      if (layer == Layer::flag) config.set_flag("train.steps", {"3"}, "--train.steps");
    }
    return config;
  };
  for (const auto& order : {std::vector{Layer::recipe, Layer::file, Layer::flag},
                            std::vector{Layer::flag, Layer::file, Layer::recipe},
                            std::vector{Layer::file, Layer::flag, Layer::recipe}}) {
    const Config config = read(order);
    EXPECT_EQ(config.get<std::int64_t>("train.steps"), 3);
    EXPECT_EQ(config.at("train.steps").origin.where, "--train.steps");
    EXPECT_EQ(config.get<double>("train.lr"), 2.0);
    EXPECT_EQ(config.at("train.lr").origin.where, "c.toml:2:7");
    EXPECT_EQ(config.text("out"), "r");
    EXPECT_EQ(config.at("out").origin.where, "r.toml:3:1");
  }
}

TEST(ConfigLayers, OfTwoFilesTheLaterWins) {
  Config config = parsed("train.steps = 1\ntrain.lr = 1");
  config.read_text("train.steps = 2", "d.toml", Layer::file);
  EXPECT_EQ(config.get<std::int64_t>("train.steps"), 2);
  EXPECT_EQ(config.get<double>("train.lr"), 1.0);
}

TEST(ConfigLayers, FreeTablesMergeAndRowsReplace) {
  Config config = parsed("mixer.options = {a = 1, b = 1}\n[[row]]\nname = 'x'", Layer::recipe);
  config.read_text("mixer.options.b = 2\n[[row]]\nname = 'y'\n[[row]]\nname = 'z'", "c.toml",
                   Layer::file);
  EXPECT_EQ(config.table("mixer.options").at("a").value, ConfigValue(std::int64_t{1}));
  EXPECT_EQ(config.table("mixer.options").at("b").value, ConfigValue(std::int64_t{2}));
  ASSERT_EQ(config.rows("row").size(), 2u);
  EXPECT_EQ(config.rows("row")[0].text("name"), "y");
  config.read_text("row = []", "d.toml", Layer::file);
  EXPECT_TRUE(config.rows("row").empty());
}

TEST(ConfigLayers, RowsCanBeChangedAndForgotten) {
  Config config = parsed("[[row]]\nname = 'x'");
  config.rows("row")[0].set_default("init.options.a", true, "default of x");
  EXPECT_THAT(config.to_toml(), testing::HasSubstr("init.options.a = true  # default of x"));
  config.clear_rows("row");
  EXPECT_TRUE(config.rows("row").empty());
  EXPECT_THAT(config.to_toml(), testing::Not(testing::HasSubstr("[[row]]")));
}

TEST(ConfigLayers, ADefaultOfAFreeKeyYieldsToAnyGivenValue) {
  Config config = parsed("mixer.options.a = 1");
  config.set_default("mixer.options.a", true, "default of mixer gdn");
  config.set_default("mixer.options.b", true, "default of mixer gdn");
  EXPECT_EQ(config.table("mixer.options").at("a").value, ConfigValue(std::int64_t{1}));
  EXPECT_EQ(config.table("mixer.options").at("b").origin.where, "default of mixer gdn");
  config.read_text("mixer.options.b = false", "d.toml", Layer::recipe);
  EXPECT_EQ(config.table("mixer.options").at("b").value, ConfigValue(false));
}

// ---------------------------------------------------------------- printing

TEST(ConfigPrint, SaysEveryValueAndWhereItCameFrom) {
  Config config = parsed("[train]\nlr = 1\n[[row]]\nname = 'a'\ninit.options.gates = 'zero'\n");
  config.set_flag("mixer.name", {"gdn"}, "--mixer");
  config.set_flag("mixer.options.a.b", {"[1, 2]"}, "--mixer.options.a.b");
  EXPECT_EQ(config.to_toml(), R"(out = ""  # default
text = []  # default
force = false  # default

[mixer]
name = "gdn"  # --mixer

[mixer.options]
"a.b" = [1, 2]  # --mixer.options.a.b

[train]
lr = 1.0  # c.toml:2:1
steps = 100  # default
betas = [0.9, 0.999]  # default
layers = []  # default
schedule = "cosine"  # default

[[row]]  # c.toml:3:1
name = "a"  # c.toml:4:1
weight = 1.0  # default
init.options.gates = "zero"  # c.toml:5:14
)");
}

std::string without_comments(const std::string& toml) {
  std::string out;
  for (std::size_t at = 0; at < toml.size();) {
    const std::size_t end = toml.find('\n', at);
    const std::string line = toml.substr(at, end - at);
    out += line.substr(0, line.rfind("  # ")) + "\n";
    at = end + 1;
  }
  return out;
}

TEST(ConfigPrint, ReadsBackAsTheSameConfiguration) {
  Config config(small_schema());
  config.read_text(R"(
out = "a\"b\\c\nd\te\u0001é # x"
text = ["x", 'y z']
[train]
lr = 0.1
betas = [1, 1e-300]
layers = [-1, 9223372036854775807]
lr_roles."graft.role.query" = 1e-4
[mixer.options]
s = "it's"
f = 1e22
n = nan
i = -inf
b = true
l = ["a", "b"]
"odd key" = 0
[[row]]
name = "r"
[[row]]
name = "s"
init.options.deep.er = 0.30000000000000004
)",
                   "recipe\n# é.toml", Layer::recipe);
  config.set_flag("train.steps", {"7"}, "--train.steps");
  const std::string printed = config.to_toml();
  Config again(small_schema());
  again.read_text(printed, "printed.toml", Layer::file);
  EXPECT_EQ(without_comments(again.to_toml()), without_comments(printed));
  EXPECT_EQ(again.get<std::vector<double>>("train.betas"),
            config.get<std::vector<double>>("train.betas"));
  EXPECT_EQ(again.text("out"), config.text("out"));
  EXPECT_EQ(again.rows("row").size(), 2u);
  EXPECT_EQ(again.table("train.lr_roles").at("graft.role.query").value, ConfigValue(1e-4));
}

TEST(ConfigPrint, AnEmptiedListOfRowsStaysEmpty) {
  Config config = parsed("[[row]]\nname = 'x'", Layer::recipe);
  config.read_text("row = []", "c.toml", Layer::file);
  Config again(small_schema());
  again.read_text("[[row]]\nname = 'x'", "r.toml", Layer::recipe);
  again.read_text(config.to_toml(), "p.toml", Layer::file);
  EXPECT_TRUE(again.rows("row").empty());
}

}  // namespace
}  // namespace graft
