#include "core/job/main_job.h"

#include <nlohmann/json.hpp>

#include "core/student/student_io.h"
#include "core/student/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
namespace fs = std::filesystem;

class MainJobTest : public testing::Test {
 protected:
  MainJobTest() {
    job_.teacher = make_tiny_teacher(folder_ / "teacher");
    write_file_atomically(folder_ / "a.txt", made_up_prose(1, 6000));
    write_file_atomically(folder_ / "b.txt", made_up_prose(2, 6000));
    write_file_atomically(folder_ / "held_out.txt",
                          "Once there was another text entirely. " + made_up_prose(77, 4000));
    job_.text = {folder_ / "a.txt", folder_ / "b.txt"};
    job_.eval_text = {folder_ / "held_out.txt"};
    job_.out = folder_ / "out";
    job_.keep = {"none", "uniform:2"};
    job_.eval = {64, 4, 0, false};
    job_.prompts = 3;
    job_.prompt_length = 8;
    job_.continuation = 5;
    job_.recipe.label = "taylor";
    job_.recipe.mixer = {
        "gdn",
        {{"silu_v", false}, {"rope", true}, {"write_gate_bias", true}, {"output_gate_bias", true}}};
    job_.recipe.init = {"taylor", {}};
    job_.recipe.init_tokens = 512;
    job_.recipe.window = 32;
    job_.recipe.stage.objective = "layer_alignment";
    job_.recipe.stage.tokens = 768;
    job_.recipe.stage.steps = 5;
    job_.baselines.push_back({.label = "naive",
                              .mixer = {"gdn", {}},
                              .init = {"projection_copy", {{"gates", std::string("random")}}},
                              .calibrate = false,
                              .stage = {}});
    job_.extra_files = {{"config.toml", "# resolved\n"}};
    ::setenv("GRAFT_CACHE_DIR", (folder_ / "cache").c_str(), 1);
  }
  MainJobResult run() { return run_main_job(job_, plugins_.registry(), hooks_); }
  void expect_nothing_written() {
    for (const std::string& entry : folder_.entries())
      EXPECT_FALSE(entry.starts_with("out") || entry.starts_with(".out")) << entry;
  }
  TempFolder folder_;
  BuiltPlugins plugins_;
  MainJob job_;
  JobHooks hooks_;
};

TEST_F(MainJobTest, WritesResultsAndAStudentThatGivesThem) {
  const MainJobResult result = run();
  std::vector<std::string> names;
  for (const ResultRow& row : result.rows)
    names.push_back(row.init + "/" + row.stage + "/" + row.keep);
  EXPECT_THAT(names, ElementsAre("naive/init/none", "naive/init/uniform:2", "taylor/init/none",
                                 "taylor/init/uniform:2", "taylor/calibrate/none",
                                 "taylor/calibrate/uniform:2"));
  EXPECT_EQ(result.rows[0].tokens, 0);
  EXPECT_EQ(result.rows[2].tokens, 512);
  EXPECT_EQ(result.rows[4].tokens, 768);
  EXPECT_GT(result.calibrate_tokens_per_second, 0);

  const auto json = nlohmann::json::parse(read_text(folder_ / "out/results.json"));
  EXPECT_EQ(json.at("rows").size(), 6u);
  EXPECT_EQ(json["rows"][4]["init"], "taylor");
  EXPECT_EQ(json["rows"][4]["stage"], "calibrate");
  EXPECT_EQ(json["rows"][4]["keep"], "none");
  EXPECT_DOUBLE_EQ(json["rows"][4]["ppl"].get<double>(), result.rows[4].perplexity);
  EXPECT_DOUBLE_EQ(json["teacher"]["ppl"].get<double>(), result.teacher.value());
  EXPECT_EQ(json["model"], "teacher");
  EXPECT_EQ(json["text"]["evaluation"], "held_out.txt");
  EXPECT_THAT(json["protocol"]["perplexity"].get<std::string>(),
              HasSubstr("4 consecutive windows of 64 tokens"));
  EXPECT_EQ(read_text(folder_ / "out/config.toml"), "# resolved\n");

  // The student on disk is the row it claims to be.
  const Model student = load_model(folder_ / "out/student", plugins_.registry());
  const Tokenizer tokenizer = Tokenizer::from_file(folder_ / "out/student/tokenizer.json");
  const auto tokens = tokenizer.encode(read_text(folder_ / "held_out.txt"));
  EXPECT_NEAR(perplexity(student, tokens, job_.eval, "held_out.txt").value(),
              result.rows[4].perplexity, 1e-4 * result.rows[4].perplexity);
}

// On the student's own stream each set of kept layers is a conversion of its own.
TEST_F(MainJobTest, ConvertsEachSetOfKeptLayersOnItsOwnStream) {
  job_.recipe.stream = {.student = true, .correction = 1, .lost = 0.5, .mlp_ridge = 0.3};
  job_.baselines.clear();
  const MainJobResult result = run();
  ASSERT_EQ(result.rows.size(), 2u) << "no rows before calibration: there is no such student";
  for (const ResultRow& row : result.rows) EXPECT_EQ(row.stage, "calibrate");
  // What was written is the student that was measured, corrected MLPs and all.
  const Model student = load_model(job_.out / "student", plugins_.registry());
  const Tokenizer tokenizer = Tokenizer::from_file(job_.teacher / "tokenizer.json");
  const Corpus corpus = Corpus::open(job_.eval_text, tokenizer, {});
  EXPECT_NEAR(perplexity(student, corpus.documents()[0].tokens, job_.eval, "held_out.txt").value(),
              result.rows[0].perplexity, 1e-4 * result.rows[0].perplexity);
}

TEST_F(MainJobTest, TwoRunsGiveTheSameResultsButForTheTimes) {
  const auto without_seconds = [](const fs::path& file) {
    auto json = nlohmann::json::parse(read_text(file));
    for (auto& row : json["rows"]) row.erase("seconds");
    return json.dump();
  };
  run();
  job_.out = folder_ / "again";
  run();
  EXPECT_EQ(without_seconds(folder_ / "out/results.json"),
            without_seconds(folder_ / "again/results.json"));
  EXPECT_EQ(read_text(folder_ / "out/student/model.safetensors"),
            read_text(folder_ / "again/student/model.safetensors"));
}

TEST_F(MainJobTest, WithoutEvaluationTextATailIsHeldOutAndSaid) {
  job_.eval_text.clear();
  std::vector<std::string> said;
  hooks_.say = [&](const std::string& message) { said.push_back(message); };
  // A grammar of nineteen words repeats itself; held-out tails of prose do not.
  std::string bytes;
  for (int i = 0; i < 12000; ++i)
    bytes += static_cast<char>('a' + (i * i / 7 + i / 13 * 5 + i % 11) % 26);
  write_file_atomically(folder_ / "a.txt", bytes);
  job_.text = {folder_ / "a.txt"};
  const MainJobResult result = run();
  EXPECT_EQ(result.held_out, "the last 10 % of each calibration document");
  EXPECT_THAT(said, testing::Contains(HasSubstr("held out")));
}

TEST_F(MainJobTest, EvaluatingOnTheCalibrationTextIsRefused) {
  job_.eval_text = {folder_ / "a.txt"};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("is calibration text too"), HasSubstr("a.txt")));
  expect_nothing_written();
  // Not the same file, but a part of what calibration reads.
  const std::string text = read_text(folder_ / "a.txt");
  write_file_atomically(folder_ / "part.txt", text.substr(500, 3000));
  job_.eval_text = {folder_ / "part.txt"};
  job_.eval.windows = 40;
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("share a run of 32 tokens"), HasSubstr("part.txt")));
  expect_nothing_written();
}

TEST_F(MainJobTest, AFolderThatIsNotEmptyNeedsForce) {
  fs::create_directory(folder_ / "out");
  write_file_atomically(folder_ / "out/mine.txt", "mine");
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage, HasSubstr("out"));
  EXPECT_EQ(read_text(folder_ / "out/mine.txt"), "mine");
  job_.force = true;
  run();
  EXPECT_TRUE(fs::exists(folder_ / "out/results.json"));
  EXPECT_FALSE(fs::exists(folder_ / "out/mine.txt"));
}

TEST_F(MainJobTest, TextShorterThanAWindowIsNamed) {
  write_file_atomically(folder_ / "short.txt", "too short");
  job_.eval_text = {folder_ / "short.txt"};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("short.txt"), HasSubstr("evaluation windows")));
  job_.eval_text = {folder_ / "held_out.txt"};
  job_.text = {folder_ / "short.txt"};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("short.txt"), HasSubstr("calibration window")));
  expect_nothing_written();
}

TEST_F(MainJobTest, AStudentIsNoTeacher) {
  run();
  job_.teacher = folder_ / "out/student";
  job_.out = folder_ / "second";
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input, HasSubstr("is a student already"));
}

TEST_F(MainJobTest, ATokenizerLargerThanTheModelIsRefused) {
  ModelFiles files = ModelFiles::golden("llama");
  files.config["vocab_size"] = 200;
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"})
    files.tensors[name] = files.tensors[name].narrow(0, 0, 200).contiguous();
  files.write(folder_ / "small");
  write_file_atomically(folder_ / "small/tokenizer.json", byte_tokenizer_json());
  job_.teacher = folder_ / "small";
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("tokenizer.json"), HasSubstr("256 tokens"), HasSubstr("200")));
}

TEST_F(MainJobTest, AnInterruptLeavesNothing) {
  std::atomic<int> asked = 0;
  hooks_.should_stop = [&] { return ++asked > 6; };
  EXPECT_GRAFT_ERROR(run(), ErrorKind::interrupted, HasSubstr("interrupted"));
  expect_nothing_written();
}

TEST(SharesSpan, FindsASharedRunOfThatLengthOnly) {
  std::vector<std::int32_t> held_out(100);
  for (std::size_t i = 0; i < held_out.size(); ++i)
    held_out[i] = static_cast<std::int32_t>(i * 7 % 101);
  at::Tensor windows = at::arange(1000, 1200, at::kLong).view({4, 50});
  EXPECT_FALSE(shares_span(windows, held_out, 32));
  for (std::int64_t i = 0; i < 31; ++i)
    windows[2][i + 10] = held_out[static_cast<std::size_t>(i + 40)];
  EXPECT_FALSE(shares_span(windows, held_out, 32));
  windows[2][41] = held_out[71];
  EXPECT_TRUE(shares_span(windows, held_out, 32));
  EXPECT_FALSE(shares_span(windows, std::span(held_out).first(20), 32));
}

}  // namespace
}  // namespace graft
