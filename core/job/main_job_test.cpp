#include "core/job/main_job.h"

#include <nlohmann/json.hpp>
#include <numeric>

#include "core/student/student_io.h"
#include "core/student/testing.h"
#include "core/text/shared_span.h"

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
                              .stream = {},
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
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage,
                     AllOf(HasSubstr("cannot replace the folder"),
                           HasSubstr("it holds something that is no result of hostapp")));
  EXPECT_EQ(read_text(folder_ / "out/mine.txt"), "mine");
  fs::remove(folder_ / "out/mine.txt");
  run();
  write_file_atomically(folder_ / "out/student/more.txt", "of the first run");
  run();
  EXPECT_TRUE(fs::exists(folder_ / "out/results.json"));
  EXPECT_FALSE(fs::exists(folder_ / "out/student/more.txt"));
}

TEST_F(MainJobTest, NothingThatIsReadIsEverReplaced) {
  job_.force = true;
  // Looks like an earlier result, which alone would do.
  write_file_atomically(folder_ / "results.json", R"({"teacher": {}, "rows": [], "protocol": {}})");
  const auto refused = [&](const fs::path& out, const std::string& what) {
    job_.out = out;
    EXPECT_GRAFT_ERROR(run(), ErrorKind::usage,
                       AllOf(HasSubstr("it is, or holds, " + what),
                             HasSubstr("which would be deleted; name another --out")));
    EXPECT_TRUE(fs::exists(folder_ / "teacher/model.safetensors"));
    EXPECT_TRUE(fs::exists(folder_ / "held_out.txt"));
  };
  refused(folder_.path(), "the teacher");
  refused(folder_ / "teacher", "the teacher");
  refused(folder_ / "teacher/", "the teacher");
  fs::create_directory(folder_ / "texts");
  fs::create_directory(folder_ / "settings");
  for (const char* name : {"a.txt", "held_out.txt"})
    fs::copy_file(folder_ / name, folder_ / "texts" / name);
  write_file_atomically(folder_ / "settings/own.toml", "");
  job_.eval_text = {folder_ / "texts/held_out.txt"};
  refused(folder_ / "texts", "the evaluation text");
  job_.text = {folder_ / "texts/a.txt"};
  refused(folder_ / "texts", "the text");
  job_.settings_files = {folder_ / "settings/own.toml"};
  refused(folder_ / "settings", "the file");
}

TEST_F(MainJobTest, TheConfigurationBesideTheResultsMayBeReplaced) {
  run();
  job_.force = true;
  job_.settings_files = {folder_ / "out/config.toml"};
  run();
  EXPECT_EQ(read_text(folder_ / "out/config.toml"), "# resolved\n");
}

TEST_F(MainJobTest, ARefusedJobLeavesNoFolderAboveOut) {
  job_.out = folder_ / "out/of/many";
  job_.text = {folder_ / "not_there.txt"};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input, HasSubstr("not_there.txt"));
  expect_nothing_written();
}

TEST_F(MainJobTest, TwoSetsOfTheSameLayersAreRefused) {
  job_.keep = {"none", "0", "0-0"};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage,
                     HasSubstr("keep_attention: '0' and '0-0' keep the same layers"));
}

TEST_F(MainJobTest, ResultsNameWhatWasReadAndNothingThatWasNot) {
  fs::create_directory(folder_ / "texts");
  for (const char* name : {"a.txt", "b.txt"}) fs::rename(folder_ / name, folder_ / "texts" / name);
  job_.text = {folder_ / "texts/"};
  job_.teacher = folder_ / "teacher/";
  job_.prompts = 0;
  run();
  const auto json = nlohmann::json::parse(read_text(folder_ / "out/results.json"));
  EXPECT_EQ(json["model"], "teacher");
  EXPECT_THAT(json["text"]["calibration"].get<std::vector<std::string>>(),
              ElementsAre("a.txt", "b.txt"));
  EXPECT_EQ(json["protocol"]["stride"], 64);
  for (const auto& row : json["rows"]) {
    EXPECT_TRUE(row.at("agreement").is_null());
    EXPECT_TRUE(row.at("agreement_forced").is_null());
  }
}

TEST_F(MainJobTest, TheSameTextInOtherBytesIsFound) {
  const std::string text = read_text(folder_ / "a.txt");
  job_.eval_text = {folder_ / "copy.txt"};
  for (const std::string& copy : {"\xEF\xBB\xBF" + text, text + "\n"}) {
    write_file_atomically(folder_ / "copy.txt", copy);
    for (const std::int64_t window : {32, 16}) {
      job_.recipe.window = window;
      EXPECT_GRAFT_ERROR(
          run(), ErrorKind::input,
          AllOf(HasSubstr("share a run of 32 tokens"), HasSubstr("a.txt'"), HasSubstr("copy.txt")));
    }
  }
  expect_nothing_written();
}

TEST_F(MainJobTest, PromptsFromTheCalibrationTextAreFound) {
  // The windows are of another text; the prompts lie behind them.
  write_file_atomically(folder_ / "mixed.txt", read_text(folder_ / "held_out.txt").substr(0, 256) +
                                                   read_text(folder_ / "a.txt").substr(0, 3000));
  job_.eval_text = {folder_ / "mixed.txt"};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("share a run of 32 tokens"), HasSubstr("mixed.txt")));
  job_.prompts = 0;
  run();
}

TEST_F(MainJobTest, ATailTooShortToBeHeldOutSaysTheWayOut) {
  job_.eval_text.clear();
  job_.eval.windows = 400;
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("the text has 1200 tokens, but 25600 are needed"),
                           HasSubstr("--eval-text"), HasSubstr("--eval.windows")));
}

TEST_F(MainJobTest, ShortDocumentsAreLeftOut) {
  const std::string text = read_text(folder_ / "a.txt");
  write_file_atomically(folder_ / "lines.jsonl", nlohmann::json{{"text", "brief"}}.dump() + "\n" +
                                                     nlohmann::json{{"text", text}}.dump() + "\n");
  job_.text = {folder_ / "lines.jsonl"};
  run();
  EXPECT_TRUE(fs::exists(folder_ / "out/results.json"));
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

TEST(SharingDocument, FindsASharedRunOfThatLengthOnly) {
  std::vector<std::int32_t> held_out(100), first(50), second(50);
  for (std::size_t i = 0; i < held_out.size(); ++i)
    held_out[i] = static_cast<std::int32_t>(i * 7 % 101);
  std::iota(first.begin(), first.end(), 1000);
  std::iota(second.begin(), second.end(), 2000);
  const std::span<const std::int32_t> evaluated = held_out;
  const auto found = [&](const std::vector<std::span<const std::int32_t>>& parts) -> std::string {
    const std::vector<Document> documents = {{"first", first}, {"second", second}};
    const Document* document = sharing_document(documents, parts);
    return document == nullptr ? "none" : document->name;
  };
  EXPECT_EQ(found({evaluated}), "none");
  std::copy_n(held_out.begin() + 40, 31, second.begin() + 10);
  EXPECT_EQ(found({evaluated}), "none");
  second[41] = held_out[71];
  EXPECT_EQ(found({evaluated}), "second");
  EXPECT_EQ(found({evaluated.first(20)}), "none");
  EXPECT_EQ(found({evaluated.first(50), evaluated.subspan(50)}), "none")
      << "no part holds it whole";
  EXPECT_EQ(found({evaluated.first(20), evaluated.subspan(40, 32)}), "second");
}

TEST(SharingDocument, DocumentsShorterThanTheRunCountTogether) {
  std::vector<std::int32_t> text(40);
  std::iota(text.begin(), text.end(), 0);
  const std::span<const std::int32_t> all = text;
  const std::vector<Document> lines = {{"1", all.first(20)}, {"2", all.subspan(20)}};
  const Document* document = sharing_document(lines, {all});
  ASSERT_NE(document, nullptr);
  EXPECT_EQ(document->name, "2");
}

}  // namespace
}  // namespace graft
