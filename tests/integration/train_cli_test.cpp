// `hostapp train` in processes of its own: killed, interrupted, resumed, and given bad input.
#include <chrono>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "core/base/file.h"
#include "core/base/testing.h"
#include "core/text/testing.h"
#include "tests/integration/subprocess.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Words = std::vector<std::string>;

const fs::path hostapp = fs::path(GRAFT_BUILD_DIR) / "bin/hostapp";

constexpr const char* kRecipe = R"(seed = 3
threads = 1
eval.context = 32
eval.windows = 2
checkpoint.every = 4
[[stage]]
name = "align"
mixer.name = "gdn"
init.name = "projection_copy"
steps = 24
batch = 2
accumulate = 2
context = 24
eval_every = 10
[[stage.objective]]
name = "layer_alignment"
[[stage]]
name = "more"
steps = 13
batch = 2
context = 16
schedule = "wsd"
train = ["mixers", "-role:output"]
[[stage.objective]]
name = "layer_alignment"
options.loss = "cosine"
[scales.tiny]
stage.align.steps = 3
stage.more.steps = 2
)";

std::string prose(std::uint32_t seed, std::size_t bytes) {
  const std::vector<std::string> words = {"the ", "river ", "old ",   "walked ", "stone ",
                                          "a ",   "light ", "lived ", "for ",    "years. "};
  std::mt19937 random(seed);
  std::string text;
  while (text.size() < bytes) text += words[random() % words.size()];
  return text;
}

class TrainCliTest : public testing::Test {
 protected:
  TrainCliTest() {
    fs::create_directory(folder_ / "teacher");
    for (const char* name : {"config.json", "generation_config.json", "model.safetensors"})
      fs::copy_file(fs::path(GRAFT_TEST_DATA) / "models/llama" / name, folder_ / "teacher" / name);
    write_file_atomically(folder_ / "teacher/tokenizer.json", text::byte_level_json().dump());
    fs::create_directory(folder_ / "texts");
    for (std::uint32_t i = 0; i < 8; ++i)
      write_file_atomically(folder_ / "texts" / (std::to_string(i) + ".txt"),
                            prose(i, 60 + 90 * i));
    write_file_atomically(folder_ / "recipe.toml", kRecipe);
  }

  Words train(const std::string& out, const Words& more = {}) const {
    Words words = {"train", "recipe.toml", "--teacher", "teacher", "--text", "texts", "--out", out};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  Subprocess::Settings settings(unsigned long most_file_bytes = 0) const {
    return {folder_.path(),
            {{"GRAFT_CACHE_DIR", (folder_ / "cache").string()}, {"GRAFT_PLUGIN_PATH", ""}},
            most_file_bytes};
  }
  Finished run(const Words& words) const { return Subprocess(hostapp, words, settings()).finish(); }

  // What must not depend on how often the run was interrupted.
  std::map<std::string, std::string> result_of(const std::string& out) const {
    std::map<std::string, std::string> result;
    std::ifstream file(folder_ / out / "metrics.jsonl");
    for (std::string row; std::getline(file, row);) {
      json line = json::parse(row);
      line.erase("seconds");
      line.erase("tok_per_s");
      result["metrics"] += line.dump() + "\n";
    }
    for (const char* name : {"student/model.safetensors", "checkpoints/step-37/weights.safetensors",
                             "checkpoints/step-37/optimizer.safetensors"})
      result[name] = read_text(folder_ / out / name);
    return result;
  }
  void expect_refused(const Words& words, ErrorKind kind,
                      const testing::Matcher<const std::string&>& message) const {
    const Finished done = run(words);
    EXPECT_EQ(done.exit_code, static_cast<int>(kind)) << done.err;
    EXPECT_THAT(done.err, AllOf(HasSubstr("hostapp: error: "), message));
  }

  TempFolder folder_;
};

TEST_F(TrainCliTest, KilledAtRandomPointsGivesTheSameBytes) {
  const auto start = std::chrono::steady_clock::now();
  const Finished whole = run(train("whole"));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto expected = result_of("whole");

  std::mt19937 random(20);
  std::uniform_real_distribution<double> point(0.05, 1.0);
  int kills = 0, finished = 0;
  bool under_way = false;
  while (kills < 20) {
    Subprocess process(hostapp, train("killed", {"--resume"}), settings());
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds * point(random)));
    process.send(SIGKILL);
    const Finished done = process.finish();
    under_way = true;
    if (done.exit_code != 0) {
      ASSERT_EQ(done.exit_code, 128 + SIGKILL) << done.err;
      ++kills;
      continue;
    }
    EXPECT_EQ(result_of("killed"), expected) << "after " << kills << " kills";
    fs::remove_all(folder_ / "killed");
    under_way = false;
    ++finished;
  }
  if (under_way) {
    const Finished done = run(train("killed", {"--resume"}));
    ASSERT_EQ(done.exit_code, 0) << done.err;
    EXPECT_EQ(result_of("killed"), expected);
    ++finished;
  }
  EXPECT_GE(finished, 1);
}

TEST_F(TrainCliTest, CtrlCFinishesTheStepAndSaves) {
  Subprocess process(hostapp, train("out", {"--set", "stage.align.steps=100000"}), settings());
  ASSERT_TRUE(process.waits_for("stage 1/2 align, step 10: perplexity", 120));
  process.send(SIGINT);
  const Finished done = process.finish();
  EXPECT_EQ(done.exit_code, 130) << done.err;
  EXPECT_THAT(done.err, AllOf(HasSubstr("interrupted behind step"), HasSubstr("--resume")));
  int checkpoints = 0;
  for (const auto& entry : fs::directory_iterator(folder_ / "out/checkpoints"))
    checkpoints += fs::exists(entry.path() / "manifest.json");
  EXPECT_GE(checkpoints, 1);
  // The steps of a stage are part of the recipe.
  expect_refused(train("out", {"--resume"}), ErrorKind::usage,
                 AllOf(HasSubstr("recipe stage.align.steps: was 100000, is now 24"),
                       HasSubstr("--allow-change")));
}

TEST_F(TrainCliTest, AScaleMakesItSmall) {
  const Finished done = run(train("out", {"--set", "scale=tiny"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("5 steps, "), HasSubstr("peak memory: "),
                              HasSubstr("estimated "), HasSubstr("perplexity: ")));
  EXPECT_THAT(read_text(folder_ / "out/config.toml"), HasSubstr("steps = 3  # recipe.toml:"));
  EXPECT_EQ(json::parse(read_text(folder_ / "out/run.json")).at("scale"), "tiny");
  expect_refused(train("out", {"--set", "scale=tiny"}), ErrorKind::usage,
                 HasSubstr("it holds a run; --resume goes on with it, --force replaces it"));
}

TEST_F(TrainCliTest, GoesOnFromAStudent) {
  ASSERT_EQ(run(train("first", {"--set", "scale=tiny"})).exit_code, 0);
  const Words more = {"train", "distil",     "--teacher", "teacher", "--text",    "texts",
                      "--set", "scale=tiny", "--out",     "second",  "--student", "first/student"};
  const Finished done = run(more);
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("8 steps, 512 tokens"), HasSubstr("perplexity: ")));
  EXPECT_TRUE(fs::exists(folder_ / "second/student/model.safetensors"));

  // The stored recipe spells out the default of keep_attention, which is no contradiction.
  fs::copy_file(folder_ / "second/config.toml", folder_ / "second.toml");
  const Finished again = run({"train", "second.toml", "--out", "again"});
  EXPECT_EQ(again.exit_code, 0) << again.err;

  const auto with = [&](const std::string& student, const Words& rest = {}) {
    Words words = more;
    words.back() = student;
    words.insert(words.end(), {"--out", "third"});
    words.insert(words.end(), rest.begin(), rest.end());
    return words;
  };
  expect_refused(with("teacher"), ErrorKind::input, HasSubstr("'teacher' is no student"));
  expect_refused(with("first/student", {"--keep-attention", "0"}), ErrorKind::usage,
                 HasSubstr("the student says which layers keep their attention"));
  expect_refused({"eval", "teacher", "--student", "first/student"}, ErrorKind::usage,
                 HasSubstr("--student is for hostapp train"));
  EXPECT_FALSE(fs::exists(folder_ / "third"));
}

TEST_F(TrainCliTest, TheResolvedRecipeIsARecipe) {
  ASSERT_EQ(run(train("out", {"--set", "scale=tiny"})).exit_code, 0);
  fs::copy_file(folder_ / "out/config.toml", folder_ / "again.toml");
  const Finished done = run({"train", "again.toml", "--out", "again"});
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(read_text(folder_ / "out/student/model.safetensors"),
            read_text(folder_ / "again/student/model.safetensors"));
}

// The corpora of a recipe yield to --text, and what is stored has those in use alone.
TEST_F(TrainCliTest, TheResolvedRecipeHasTheTextInUse) {
  write_file_atomically(folder_ / "recipe.toml",
                        kRecipe + std::string("[[corpus]]\npath = 'no such folder'\n"));
  ASSERT_EQ(run(train("out", {"--set", "scale=tiny"})).exit_code, 0);
  const std::string stored = read_text(folder_ / "out/config.toml");
  EXPECT_THAT(stored, Not(HasSubstr("corpus]]")));
  EXPECT_THAT(stored, HasSubstr("# default of "));
  fs::copy_file(folder_ / "out/config.toml", folder_ / "again.toml");
  const Finished again = run({"train", "again.toml", "--out", "again"});
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(read_text(folder_ / "out/student/model.safetensors"),
            read_text(folder_ / "again/student/model.safetensors"));
  // ... and it is the same recipe, so a run goes on with it.
  const Finished on = run({"train", "again.toml", "--out", "out", "--resume"});
  EXPECT_EQ(on.exit_code, 0) << on.err;
  const Finished shown = run(train("third", {"--print-config"}));
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_THAT(shown.out, HasSubstr("# default of "));
}

TEST_F(TrainCliTest, MistakesAreReportedWhereTheyStand) {
  const auto with = [&](const std::string& toml) {
    write_file_atomically(folder_ / "recipe.toml", toml);
    return train("out");
  };
  expect_refused(with("[[stage]]\nname = 'a'\nstesp = 3"), ErrorKind::usage,
                 HasSubstr("recipe.toml:3:1: unknown key 'stesp' (did you mean 'steps'?)"));
  expect_refused(
      with("[[stage]]\nname = 'a'\nmixer.name = 'gnd'\nsteps = 1"), ErrorKind::usage,
      AllOf(HasSubstr("recipe.toml:3:7: mixer.name: "), HasSubstr("'gnd'"), HasSubstr("gdn")));
  expect_refused(with("[[stage]]\nname = 'a'\nmixer.name = 'gdn'\ninit.name = 'projection_copy'\n"
                      "steps = 1\n[[stage.objective]]\nname = 'layer_alignmnt'"),
                 ErrorKind::usage,
                 AllOf(HasSubstr("recipe.toml:7:1: name: "), HasSubstr("'layer_alignmnt'"),
                       HasSubstr("layer_alignment")));
  expect_refused(
      with("eval.context = 32\nkeep_attention = '7'\n[[stage]]\nname = 'a'\n"
           "mixer.name = 'gdn'\ninit.name = 'projection_copy'\nsteps = 1"),
      ErrorKind::usage,
      AllOf(HasSubstr("recipe.toml:2:1: keep_attention '7'"), HasSubstr("layers 0 to 1")));
  expect_refused(with("keep_attention = 'uniform:x'"), ErrorKind::usage,
                 HasSubstr("recipe.toml:1:1: keep_attention 'uniform:x'"));
  expect_refused(with("budget = 9000\n[[stage]]\nname = 'a'\nshare = 0.5\n[[stage]]\nname = 'b'\n"
                      "share = 0.6"),
                 ErrorKind::usage,
                 AllOf(HasSubstr("recipe.toml:7:1: share: "), HasSubstr("sum to 1.1")));
  expect_refused(with("[[stage]]\nname = 'a'\nmixer.name = 'gdn'\nmixer.options.roep = true\n"
                      "init.name = 'projection_copy'\nsteps = 1"),
                 ErrorKind::usage, AllOf(HasSubstr("recipe.toml:4:"), HasSubstr("rope")));
  expect_refused(with("[[stage]]\nname = 'a'"), ErrorKind::usage,
                 HasSubstr("recipe.toml:1:1: stage 'a' needs steps, tokens or share"));
  expect_refused(with("[[stage]]\nname = 'a'\ntokens = 10"), ErrorKind::usage,
                 HasSubstr("recipe.toml:3:1: tokens: 10 tokens are not one step"));
  expect_refused(with(""), ErrorKind::usage, HasSubstr("no [[stage]]"));
  expect_refused({"train", "missing.toml"}, ErrorKind::usage, HasSubstr("missing.toml"));
  expect_refused({"train"}, ErrorKind::usage, HasSubstr("the RECIPE file is missing"));
  write_file_atomically(folder_ / "recipe.toml", kRecipe);
  expect_refused({"train", "recipe.toml"}, ErrorKind::usage,
                 AllOf(HasSubstr("--teacher DIR"), HasSubstr("--text FILE"), HasSubstr("--out")));
  expect_refused({"eval", "teacher", "--resume"}, ErrorKind::usage,
                 HasSubstr("--resume is for hostapp train"));
  expect_refused(train("out", {"--resume", "--force"}), ErrorKind::usage,
                 HasSubstr("give one of them"));
  expect_refused(train("out", {"--mixer", "gdn"}), ErrorKind::usage, HasSubstr("mixer.name"));
  expect_refused(train("out", {"--set", "stage.algin.lr=1"}), ErrorKind::usage,
                 HasSubstr("there is no row 'algin' in [[stage]] (did you mean 'align'?)"));
  EXPECT_FALSE(fs::exists(folder_ / "out"));
}

TEST_F(TrainCliTest, EachShippedRecipeRunsAtItsTinyScale) {
  for (std::uint32_t i = 0; i < 3; ++i)
    write_file_atomically(folder_ / "texts" / ("long" + std::to_string(i) + ".txt"),
                          prose(50 + i, 3000));
  for (const auto& [recipe, scale] :
       std::vector<std::pair<std::string, std::string>>{{"taylor-calibrate", "tiny"},
                                                        {"hedgemamba", "tiny"},
                                                        {"hedgemamba", "tiny,50-50"},
                                                        {"hedgemamba", "tiny,100-0"},
                                                        {"hedgemamba", "tiny,0-100"},
                                                        {"hedgemamba-direct", "tiny"}}) {
    const std::string out = recipe + "-" + scale;
    const Finished done = run({"train", recipe, "--teacher", "teacher", "--text", "texts", "--out",
                               out, "--set", "scale=" + scale, "--threads", "1"});
    ASSERT_EQ(done.exit_code, 0) << out << done.err;
    EXPECT_TRUE(fs::exists(folder_ / out / "student/model.safetensors")) << out;
    const Finished text =
        run({"generate", out + "/student", "--prompt", "the old", "--generate.tokens", "4"});
    EXPECT_EQ(text.exit_code, 0) << out << text.err;
  }
}

// A file that may not grow stands for a full disk: what was there stays, and the run goes on later.
TEST_F(TrainCliTest, AFullDiskIsNamedAndLeavesTheRunWhole) {
  ASSERT_EQ(run(train("whole")).exit_code, 0);
  const Finished done = Subprocess(hostapp, train("out"), settings(60000)).finish();
  EXPECT_EQ(done.exit_code, static_cast<int>(ErrorKind::internal)) << done.err;
  EXPECT_THAT(done.err, AllOf(HasSubstr("cannot write"), HasSubstr("checkpoints/step-4")));
  for (const auto& entry : fs::directory_iterator(folder_ / "out/checkpoints"))
    ADD_FAILURE() << entry.path();
  ASSERT_EQ(run(train("out", {"--resume"})).exit_code, 0);
  EXPECT_EQ(result_of("out"), result_of("whole"));
}

TEST_F(TrainCliTest, TwoProcessesDoNotTrainInOneFolder) {
  Subprocess first(hostapp, train("out", {"--set", "stage.align.steps=100000"}), settings());
  ASSERT_TRUE(first.waits_for("step 10: perplexity", 120));
  expect_refused(train("out", {"--resume", "--set", "stage.align.steps=100000"}), ErrorKind::usage,
                 HasSubstr("another process trains in it"));
  first.send(SIGINT);
  EXPECT_EQ(first.finish().exit_code, 130);
}

}  // namespace
}  // namespace graft
