// `hostapp select-layers` in a process of its own: what it writes, and that converting takes it.
#include <nlohmann/json.hpp>

#include "tests/integration/cli_testing.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

class SelectLayersTest : public CliTest {
 protected:
  static Words select(const std::string& policy, const Words& more = {}) {
    return words(
        "select-layers --teacher teacher --text a.txt b.txt --eval-text held_out.txt "
        "--mixer gdn --init taylor --window 32 --init.tokens 256 --select.windows 3 "
        "--select.context 48 --threads 1 --keep 1 --out layers.json --policy " +
            policy,
        more);
  }
  json written(const std::string& name = "layers.json") const {
    return json::parse(read_text(folder_ / name));
  }
};

TEST_F(SelectLayersTest, EachPolicyWritesAListWithScores) {
  for (const std::string policy : {"ar", "ga-s2", "swap-kl"}) {
    const Finished done = run(select(policy, {"--force"}));
    ASSERT_EQ(done.exit_code, 0) << policy << ": " << done.err;
    EXPECT_THAT(done.out, AllOf(HasSubstr("layer  "), HasSubstr("kept: "),
                                HasSubstr("written: layers.json"), HasSubstr("3 windows of 48")));
    const json file = written();
    EXPECT_EQ(file.at("format"), "graft.layers/1");
    EXPECT_EQ(file.at("policy"), policy);
    EXPECT_EQ(file.at("n_layers"), 2);
    ASSERT_EQ(file.at("layers").size(), 1u);
    ASSERT_EQ(file.at("scores").size(), 2u);
    EXPECT_GT(file.at("teacher_perplexity").get<double>(), 1);
    int kept = 0;
    for (int layer : {0, 1}) {
      const json& score = file.at("scores").at(static_cast<std::size_t>(layer));
      EXPECT_EQ(score.at("layer"), layer);
      EXPECT_TRUE(score.at("score").is_number()) << policy;
      if (!score.at("kept").get<bool>()) continue;
      ++kept;
      EXPECT_EQ(score.at("rank"), 1);
      EXPECT_EQ(file.at("layers").at(0), layer);
    }
    EXPECT_EQ(kept, 1);
    EXPECT_EQ(file.at("provenance").contains("mixer"), policy != "ar");
  }
}

TEST_F(SelectLayersTest, GivesTheSameFileTwice) {
  ASSERT_EQ(run(select("swap-kl")).exit_code, 0);
  json first = written();
  ASSERT_EQ(run(select("swap-kl", {"--force"})).exit_code, 0);
  json second = written();
  first.erase("seconds");
  second.erase("seconds");
  EXPECT_EQ(first, second);
}

TEST_F(SelectLayersTest, UniformNeedsNoTextAndNoPlugin) {
  const Finished done =
      run(words("select-layers --policy uniform --keep 1 --teacher teacher --out layers.json"));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(written().at("layers"), json({0}));
  const Finished step =
      run(words("select-layers --policy uniform:2 --teacher teacher --out layers.json --force"));
  ASSERT_EQ(step.exit_code, 0) << step.err;
  EXPECT_EQ(written().at("layers"), json({0}));
}

TEST_F(SelectLayersTest, TheAttentionRemovedNeedsNoMixer) {
  const Finished done =
      run(words("select-layers --policy ar --keep 1 --teacher teacher --text a.txt "
                "--select.windows 2 --select.context 32 --threads 1 --out layers.json"));
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_FALSE(written().at("provenance").contains("mixer"));
}

TEST_F(SelectLayersTest, ConvertingTakesTheFile) {
  ASSERT_EQ(run(select("swap-kl")).exit_code, 0);
  const int kept = written().at("layers").at(0);
  const Finished done =
      run(words("--mixer gdn --init taylor --teacher teacher --text a.txt b.txt --eval-text "
                "held_out.txt --out out --window 32 --init.tokens 256 --calibrate.enabled false "
                "--eval.context 64 --eval.windows 2 --agreement.prompts 0 --threads 1 "
                "--keep-attention layers.json"));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const json config = json::parse(read_text(folder_ / "out/student/config.json"));
  EXPECT_EQ(config.at("graft").at("layers"), json({1 - kept}));
}

TEST_F(SelectLayersTest, WhatIsMissingIsSaid) {
  expect_refused(words("select-layers --keep 1"), ErrorKind::usage,
                 AllOf(HasSubstr("missing: --teacher DIR, --text FILE..., --mixer NAME, "
                                 "--init NAME, --out FILE.json"),
                       HasSubstr("policy 'swap-kl'")));
  expect_refused(words("select-layers --policy ar --keep 1"), ErrorKind::usage,
                 HasSubstr("missing: --teacher DIR, --text FILE..., --out FILE.json"));
  expect_refused(words("select-layers --policy uniform --keep 1 --teacher teacher"),
                 ErrorKind::usage, HasSubstr("missing: --out FILE.json"));
}

TEST_F(SelectLayersTest, WrongPoliciesAndNumbersAreNamed) {
  expect_refused(select("swap-lk"), ErrorKind::usage,
                 HasSubstr("unknown policy 'swap-lk' (did you mean 'swap-kl'?)"));
  expect_refused(select("uniform:0"), ErrorKind::usage,
                 HasSubstr("policy 'uniform:0': k must be a whole number of at least 1"));
  expect_refused(select("uniform:2"), ErrorKind::usage, HasSubstr("says how many layers are kept"));
  for (const std::string keep : {"0", "2", "9"})
    expect_refused(select("ar", {"--keep", keep}), ErrorKind::usage,
                   HasSubstr("--keep is " + keep +
                             "; of a model of 2 layers 1 to 1 can keep their attention"));
  expect_refused(select("ar", {"--keep", "-1"}), ErrorKind::usage, HasSubstr("--keep"));
  EXPECT_FALSE(exists("layers.json"));
}

TEST_F(SelectLayersTest, WrongPlacesToWriteToAreNamedBeforeTheWork) {
  expect_refused(select("ar", {"--out", "layers.txt"}), ErrorKind::usage,
                 HasSubstr("'layers.txt' must be a file that ends in .json"));
  expect_refused(select("ar", {"--out", "nowhere/layers.json"}), ErrorKind::usage,
                 HasSubstr("lies in a folder that is not there"));
  write_file_atomically(folder_ / "layers.json", "precious");
  expect_refused(select("ar"), ErrorKind::usage,
                 AllOf(HasSubstr("'layers.json' is there already"), HasSubstr("--force")));
  EXPECT_EQ(read_text(folder_ / "layers.json"), "precious");
}

TEST_F(SelectLayersTest, BadInputIsNamed) {
  expect_refused(select("ar", {"--teacher", "/no/such"}), ErrorKind::input, HasSubstr("/no/such"));
  expect_refused(select("ar", {"--text", "none.txt"}), ErrorKind::input, HasSubstr("none.txt"));
  expect_refused(select("ar", {"--select.context", "100000"}), ErrorKind::input,
                 HasSubstr("a.txt"));
  expect_refused(select("swap-kl", {"--mixer", "gnd"}), ErrorKind::usage,
                 HasSubstr("(did you mean 'gdn'?)"));
}

TEST_F(SelectLayersTest, ConvertingRefusesABadFileByName) {
  const auto convert = [&](const std::string& file) {
    return words(
        "--mixer gdn --init taylor --teacher teacher --text a.txt --out out --eval.context 64 "
        "--keep-attention " +
        file);
  };
  expect_refused(convert("none.json"), ErrorKind::input, HasSubstr("none.json"));
  write_file_atomically(folder_ / "list.json", "[0, 4]");
  expect_refused(convert("list.json"), ErrorKind::input,
                 AllOf(HasSubstr("list.json: expected an object with \"layers\""),
                       HasSubstr("hostapp select-layers writes")));
  write_file_atomically(folder_ / "deep.json", R"({"layers": [0], "n_layers": 30})");
  expect_refused(convert("deep.json"), ErrorKind::input,
                 HasSubstr("selected for a model of 30 layers, this one has 2"));
  write_file_atomically(folder_ / "all.json", R"({"layers": [0, 1], "n_layers": 2})");
  expect_refused(convert("all.json"), ErrorKind::input,
                 HasSubstr("every layer keeps its attention"));
  EXPECT_FALSE(exists("out"));
}

}  // namespace
}  // namespace graft
