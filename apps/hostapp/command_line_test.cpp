#include "apps/hostapp/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/config/keys.h"

namespace graft {
namespace {

using Words = std::vector<std::string>;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Words words_of(const CommandLine& line, const std::string& key) {
  for (const FlagValue& value : line.flags) {
    if (value.key == key) return value.words;
  }
  return {"not given"};
}

std::string error_of(const Words& arguments) {
  try {
    parse_command_line(arguments);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::usage);
    return error.what();
  }
  return "no error";
}

TEST(CommandLine, TheMainJobNeedsNoCommand) {
  const CommandLine line = parse_command_line(
      {"--mixer", "gdn", "--init=taylor", "--text", "a.txt", "b.txt", "--out", "o"});
  EXPECT_EQ(line.command, Command::convert);
  EXPECT_THAT(words_of(line, "mixer.name"), ElementsAre("gdn"));
  EXPECT_THAT(words_of(line, "init.name"), ElementsAre("taylor"));
  EXPECT_THAT(words_of(line, "text"), ElementsAre("a.txt", "b.txt"));
  EXPECT_THAT(words_of(line, "out"), ElementsAre("o"));
  EXPECT_THAT(words_of(line, "teacher"), ElementsAre("not given"));
}

TEST(CommandLine, EveryKeyIsAFlag) {
  for (const Key& key : graft_schema().keys) {
    for (const std::string& flag : {flag_of(key.name), "--" + key.name}) {
      const CommandLine line = parse_command_line({flag + "=true"});
      ASSERT_EQ(line.flags.size(), 1u) << flag;
      EXPECT_EQ(line.flags[0].key, key.name);
      EXPECT_EQ(line.flags[0].flag, flag_of(key.name));
      EXPECT_THAT(line.flags[0].words, ElementsAre("true")) << flag;
      EXPECT_THAT(line.help_text, HasSubstr(flag_of(key.name)));
    }
  }
}

TEST(CommandLine, DashAndUnderscoreAreOne) {
  for (const char* flag : {"--keep-attention", "--keep_attention"}) {
    EXPECT_THAT(words_of(parse_command_line({flag, "none", "uniform:4"}), "keep_attention"),
                ElementsAre("none", "uniform:4"));
  }
  EXPECT_THAT(
      words_of(parse_command_line({"--calibrate.min-lr-ratio", "0"}), "calibrate.min_lr_ratio"),
      ElementsAre("0"));
}

TEST(CommandLine, SwitchesTakeAValueOnlyWhenItIsOne) {
  EXPECT_THAT(words_of(parse_command_line({"--force"}), "force"), ElementsAre("true"));
  EXPECT_THAT(words_of(parse_command_line({"--force", "false"}), "force"), ElementsAre("false"));
  EXPECT_THAT(words_of(parse_command_line({"--force=false"}), "force"), ElementsAre("false"));
  const CommandLine line = parse_command_line({"inspect", "--force", "model"});
  EXPECT_THAT(words_of(line, "force"), ElementsAre("true"));
  EXPECT_EQ(line.subject, "model");
}

TEST(CommandLine, BehindAnEqualsSignAValueMayBeginWithDashes) {
  EXPECT_THAT(words_of(parse_command_line({"--prompt=--- she"}), "generate.prompt"),
              ElementsAre("--- she"));
}

TEST(CommandLine, TheLastOfTwoCountsAndListsGrow) {
  const CommandLine line =
      parse_command_line({"--out", "a", "--text", "1", "--out", "b", "--text", "2", "3"});
  EXPECT_THAT(words_of(line, "out"), ElementsAre("b"));
  EXPECT_THAT(words_of(line, "text"), ElementsAre("1", "2", "3"));
}

TEST(CommandLine, ListsAsTomlAndNegativeNumbersPassWhole) {
  const std::string list = "[\"none\", \"0,4,8\"]";
  EXPECT_THAT(words_of(parse_command_line({"--keep-attention", list}), "keep_attention"),
              ElementsAre(list));
  EXPECT_THAT(words_of(parse_command_line({"--keep-attention=" + list}), "keep_attention"),
              testing::Not(IsEmpty()));
  EXPECT_THAT(words_of(parse_command_line({"--calibrate.lr", "-1"}), "calibrate.lr"),
              ElementsAre("-1"));
  EXPECT_THAT(words_of(parse_command_line({"--prompt", "a [b, c] d"}), "generate.prompt"),
              ElementsAre("a [b, c] d"));
}

TEST(CommandLine, OptionsOfPluginsAreFlagsToo) {
  const CommandLine line =
      parse_command_line({"--mixer.options.silu_v", "false", "--init.options.gates=zero", "--set",
                          "calibrate.objective.options.loss=l2", "--set", "seed=3"});
  EXPECT_THAT(words_of(line, "mixer.options.silu_v"), ElementsAre("false"));
  EXPECT_THAT(words_of(line, "init.options.gates"), ElementsAre("zero"));
  EXPECT_THAT(words_of(line, "calibrate.objective.options.loss"), ElementsAre("l2"));
  EXPECT_THAT(words_of(line, "seed"), ElementsAre("3"));
  Words flags;
  for (const FlagValue& value : line.flags) flags.push_back(value.flag);
  EXPECT_THAT(
      flags, testing::UnorderedElementsAre("--mixer.options.silu_v", "--init.options.gates",
                                           "--set seed", "--set calibrate.objective.options.loss"));
}

TEST(CommandLine, CommandsTakeTheirSubject) {
  EXPECT_EQ(parse_command_line({"eval", "m", "--text", "t"}).command, Command::eval);
  EXPECT_EQ(parse_command_line({"eval", "m", "--text", "t"}).subject, "m");
  EXPECT_EQ(parse_command_line({"--seed", "3", "generate", "m"}).command, Command::generate);
  EXPECT_EQ(parse_command_line({"inspect", "m"}).command, Command::inspect);
  EXPECT_EQ(parse_command_line({"plugins", "list"}).command, Command::plugins_list);
  const CommandLine info = parse_command_line({"plugins", "info", "gdn", "--plugin-path", "p"});
  EXPECT_EQ(info.command, Command::plugins_info);
  EXPECT_EQ(info.subject, "gdn");
  EXPECT_THAT(words_of(info, "plugin_path"), ElementsAre("p"));
}

TEST(CommandLine, NewTakesThreeWordsAndAPrefix) {
  const CommandLine line = parse_command_line(
      {"plugins", "new", "mixer-c", "gate", "some/dir", "--id-prefix", "org.me"});
  EXPECT_EQ(line.command, Command::plugins_new);
  EXPECT_EQ(line.subject, "mixer-c");
  EXPECT_EQ(line.new_name, "gate");
  EXPECT_EQ(line.new_folder, "some/dir");
  EXPECT_EQ(line.id_prefix, "org.me");
}

TEST(CommandLine, WhatStandsBehindValidateIsPassedOnAsItIs) {
  const CommandLine line = parse_command_line(
      {"plugins", "validate", "a.so", "--include", "^forward", "--help", "--mixr", "-v"});
  EXPECT_EQ(line.command, Command::plugins_validate);
  EXPECT_THAT(line.passed_on,
              ElementsAre("a.so", "--include", "^forward", "--help", "--mixr", "-v"));
  EXPECT_FALSE(line.help);
  EXPECT_THAT(parse_command_line({"plugins", "validate"}).passed_on, IsEmpty());
}

TEST(CommandLine, OwnFlags) {
  const CommandLine line =
      parse_command_line({"--config", "a.toml", "--config", "b.toml", "--print-config", "-vv"});
  EXPECT_THAT(line.config_files, ElementsAre("a.toml", "b.toml"));
  EXPECT_TRUE(line.print_config);
  EXPECT_EQ(line.verbose, 2);
  EXPECT_TRUE(parse_command_line({"-h"}).help);
  EXPECT_TRUE(parse_command_line({"eval", "--help"}).help);
  EXPECT_TRUE(parse_command_line({"--version"}).version);
  EXPECT_TRUE(parse_command_line({"-q"}).quiet);
}

struct BadLine {
  const char* label;
  Words arguments;
  const char* message;
};

class CommandLineMistake : public testing::TestWithParam<BadLine> {};

TEST_P(CommandLineMistake, NamesTheFlagAndTheWayOut) {
  EXPECT_EQ(error_of(GetParam().arguments), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    All, CommandLineMistake,
    testing::Values(
        BadLine{"Typo", {"--mixr", "gdn"}, "unknown flag '--mixr' (did you mean '--mixer'?)"},
        BadLine{
            "OtherTable", {"--lr", "1"}, "unknown flag '--lr' (did you mean '--calibrate.lr'?)"},
        BadLine{"OtherWord",
                {"--learning-rate=1"},
                "unknown flag '--learning-rate' (did you mean '--calibrate.lr'?)"},
        BadLine{"OwnFlag",
                {"--print-confg"},
                "unknown flag '--print-confg' (did you mean '--print-config'?)"},
        BadLine{"Nothing",
                {"--zzzzzzzzzz"},
                "unknown flag '--zzzzzzzzzz'; hostapp --help lists them all"},
        BadLine{"NoValueForOption",
                {"--mixer.options.rope"},
                "--mixer.options.rope: a value is missing"},
        BadLine{"NoValueAtTheEnd", {"--seed", "3", "--out"}, "--out: a value is missing"},
        BadLine{"AFlagForAValue",
                {"--out", "--force"},
                "--out: a value is missing, '--force' is a flag (a value that begins with -- is "
                "given as --out=VALUE)"},
        BadLine{"AFlagForAList",
                {"--text", "--out", "o"},
                "--text: a value is missing, '--out' is a flag (a value that begins with -- is "
                "given as --text=VALUE)"},
        BadLine{"AFlagForAnOption",
                {"--mixer.options.rope", "--init", "taylor"},
                "--mixer.options.rope: a value is missing, '--init' is a flag (a value that begins "
                "with -- is given as --mixer.options.rope=VALUE)"},
        BadLine{"AFlagForAFile",
                {"--config", "--force"},
                "--config: a value is missing, '--force' is a flag (a value that begins with -- is "
                "given as --config=VALUE)"},
        BadLine{"SetWithoutEquals", {"--set", "seed"}, "--set seed: expected KEY=VALUE"},
        BadLine{"SetWithoutKey", {"--set", "=1"}, "--set =1: expected KEY=VALUE"},
        BadLine{"PluginsAlone",
                {"plugins"},
                "hostapp plugins: list, info NAME, new KIND NAME DIR or validate FILE?"},
        BadLine{"NewWithoutFolder",
                {"plugins", "new", "mixer", "gate"},
                "hostapp plugins new: expected KIND NAME DIR, as in: hostapp plugins new mixer "
                "my_mixer my_mixer (KIND: mixer, mixer-c, initializer or objective)"},
        BadLine{"PrefixOfNothing",
                {"plugins", "list", "--id-prefix", "org.me"},
                "--id-prefix is for hostapp plugins new KIND NAME DIR"},
        BadLine{"ValidateBehindAFlag",
                {"-q", "plugins", "validate"},
                "hostapp plugins validate FILE [ARGS...]: nothing may stand before it"},
        BadLine{"NoModel",
                {"eval", "--text", "t", "m"},
                "hostapp eval: the MODEL folder is missing; it stands before the flags: a flag "
                "that takes a list would "
                "swallow it"},
        BadLine{"NoName",
                {"plugins", "info"},
                "hostapp plugins info: the NAME is missing; it stands before the flags: a flag "
                "that takes a list would "
                "swallow it"}),
    [](const auto& instance) { return instance.param.label; });

TEST(CommandLine, AWordTooManyIsNamed) { EXPECT_THAT(error_of({"convert"}), HasSubstr("convert")); }

TEST(CommandLine, AFlagWithoutItsValueIsNamed) {
  EXPECT_THAT(error_of({"--mixer"}), HasSubstr("--mixer"));
}

}  // namespace
}  // namespace graft
