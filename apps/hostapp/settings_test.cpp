#include "apps/hostapp/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/base/error.h"
#include "core/config/keys.h"

namespace graft {
namespace {

using testing::ElementsAre;

// What a plugin would declare.
Component some_mixer() {
  const auto value = [](std::uint32_t type) {
    graft_value v{};
    v.type = type;
    v.count = 1;
    return v;
  };
  static std::vector<graft_option> options(4);
  for (graft_option& option : options) {
    option = {};
    option.struct_size = sizeof(graft_option);
    option.doc = "";
  }
  options[0].key = "rope";
  options[0].def = value(GRAFT_BOOL);
  options[1].key = "scale";
  options[1].def = value(GRAFT_FLOAT);
  options[2].key = "mode";
  options[2].def = value(GRAFT_STRING);
  options[2].def.u.s = "1";
  options[3].key = "rates";
  options[3].def = value(GRAFT_FLOAT_LIST);
  static const double rates[] = {0.5};
  options[3].def.u.fl = rates;
  static std::vector<const graft_option*> pointers;
  pointers.clear();
  for (const graft_option& option : options) pointers.push_back(&option);
  graft_desc desc{};
  desc.struct_size = sizeof desc;
  desc.n_options = static_cast<std::uint32_t>(pointers.size());
  desc.options = pointers.data();
  Component component;
  component.alias = "toy";
  component.schema = OptionSchema(desc, "mixer 'toy'");
  return component;
}

Config configured(const std::string& toml, const std::vector<FlagValue>& flags = {}) {
  Config config(graft_schema());
  config.read_text(toml, "c.toml", Layer::file);
  for (const FlagValue& flag : flags) config.set_flag(flag.key, flag.words, flag.flag);
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

TEST(PluginOptions, AreOnlyThoseThatWereGiven) {
  const Component toy = some_mixer();
  EXPECT_TRUE(plugin_options(configured(""), "mixer.options", toy).empty());
  const OptionValues values =
      plugin_options(configured("mixer.options = {rope = true, scale = 1}"), "mixer.options", toy);
  ASSERT_EQ(values.size(), 2u);
  EXPECT_EQ(values.at("rope"), OptionValue(true));
  EXPECT_EQ(values.at("scale"), OptionValue(1.0));
}

TEST(PluginOptions, AFlagTakesTheTypeTheOptionHas) {
  const Component toy = some_mixer();
  const Config config =
      configured("", {{"mixer.options.mode", {"3"}, "--mixer.options.mode"},
                      {"mixer.options.scale", {"2"}, "--mixer.options.scale"},
                      {"mixer.options.rates", {"1,2.5"}, "--mixer.options.rates"}});
  const OptionValues values = plugin_options(config, "mixer.options", toy);
  EXPECT_EQ(values.at("mode"), OptionValue("3"));
  EXPECT_EQ(values.at("scale"), OptionValue(2.0));
  EXPECT_EQ(values.at("rates"), OptionValue(std::vector<double>{1, 2.5}));
}

TEST(PluginOptions, AnEmptyListFits) {
  const OptionValues values =
      plugin_options(configured("mixer.options.rates = []"), "mixer.options", some_mixer());
  EXPECT_EQ(values.at("rates"), OptionValue(std::vector<double>{}));
}

TEST(PluginOptions, ARefusedOptionSaysWhereItWasWritten) {
  const Component toy = some_mixer();
  EXPECT_THAT(
      error_of([&] {
        plugin_options(configured("\n[mixer.options]\nrop = true"), "mixer.options", toy);
      }),
      testing::StartsWith("c.toml:3:1: mixer 'toy' has no option 'rop' (did you mean 'rope'?)"));
  EXPECT_THAT(error_of([&] {
                plugin_options(configured("[mixer.options]\nrope = 3"), "mixer.options", toy);
              }),
              testing::StartsWith("c.toml:2:1: mixer 'toy', option 'rope': expected "));
  EXPECT_EQ(error_of([&] {
              plugin_options(
                  configured("", {{"mixer.options.rope", {"x"}, "--mixer.options.rope"}}),
                  "mixer.options", toy);
            }),
            "--mixer.options.rope: expected true or false, got 'x'");
  EXPECT_THAT(error_of([&] {
                plugin_options(configured("[mixer.options]\nmode = ['a']"), "mixer.options", toy);
              }),
              testing::StartsWith("c.toml:2:1: mixer.options.mode: expected "));
}

TEST(PluginOptions, DefaultsAreAddedForPrintingAndNotTakenForGiven) {
  const Component toy = some_mixer();
  Config config = configured("mixer.options.scale = 3");
  add_plugin_defaults(config, "mixer.options", toy);
  EXPECT_EQ(config.table("mixer.options").at("rope").value, ConfigValue(false));
  EXPECT_EQ(config.table("mixer.options").at("rope").origin.where, "default of mixer 'toy'");
  EXPECT_EQ(config.table("mixer.options").at("scale").value, ConfigValue(std::int64_t{3}));
  EXPECT_EQ(plugin_options(config, "mixer.options", toy).size(), 1u);
}

// ---------------------------------------------------------------- baselines

constexpr const char* two_rows =
    "[[baseline]]\nname = 'naive'\ninit.name = 'copy'\n"
    "[[baseline]]\nname = 'zero'\ninit.name = 'copy'\n";

std::vector<std::string> names_compared(const std::string& compare) {
  const Config config = configured("compare = " + compare + "\n" + two_rows);
  std::vector<std::string> names;
  for (const Config* row : compared_baselines(config)) names.push_back(row->text("name"));
  return names;
}

TEST(Compare, ChoosesRows) {
  EXPECT_THAT(names_compared("'none'"), ElementsAre());
  EXPECT_THAT(names_compared("[]"), ElementsAre());
  EXPECT_THAT(names_compared("'all'"), ElementsAre("naive", "zero"));
  EXPECT_THAT(names_compared("['zero']"), ElementsAre("zero"));
  EXPECT_THAT(names_compared("['zero', 'naive', 'zero']"), ElementsAre("zero", "naive"));
}

TEST(Compare, RefusesWhatIsNotThere) {
  EXPECT_EQ(error_of([] { names_compared("'nave'"); }),
            "c.toml:1:1: compare: there is no baseline 'nave' (did you mean 'naive'?)");
  EXPECT_EQ(error_of([] { names_compared("['all', 'zero']"); }),
            "c.toml:1:1: compare: 'all' stands alone or not at all");
  EXPECT_EQ(error_of([] { compared_baselines(configured("compare = 'x'")); }),
            "c.toml:1:1: compare: there is no baseline 'x'; the recipe has none");
  EXPECT_EQ(error_of([] {
              compared_baselines(configured(std::string(two_rows) +
                                            "[[baseline]]\nname = 'zero'\ninit.name = 'x'"));
            }),
            "c.toml:7:1: two baselines are called 'zero'");
}

// ---------------------------------------------------------------- layers

TEST(ReadConfiguration, FlagsStandAboveFilesAndLaterFilesAboveEarlier) {
  const auto folder = std::filesystem::temp_directory_path() / "graft_settings_test";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "a.toml") << "seed = 1\nthreads = 1\nwindow = 1\n";
  std::ofstream(folder / "b.toml") << "threads = 2\nwindow = 2\n";
  const CommandLine line = parse_command_line({"--config", (folder / "a.toml").string(), "--window",
                                               "3", "--config", (folder / "b.toml").string()});
  const Config config = read_configuration(line);
  EXPECT_EQ(config.get<std::int64_t>("seed"), 1);
  EXPECT_EQ(config.get<std::int64_t>("threads"), 2);
  EXPECT_EQ(config.get<std::int64_t>("window"), 3);
  EXPECT_EQ(config.at("window").origin.where, "--window");
  std::filesystem::remove_all(folder);
}

TEST(ExecutableFolder, IsWhereThisTestLies) {
  EXPECT_TRUE(std::filesystem::exists(executable_folder() / "hostapp_shell_test"));
}

}  // namespace
}  // namespace graft
