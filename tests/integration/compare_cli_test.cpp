// `hostapp compare` in a process of its own.
#include <nlohmann/json.hpp>

#include "tests/integration/cli_testing.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class CompareTest : public CliTest {
 protected:
  // A student of the tiny teacher in `out`/student.
  void convert(const std::string& out, const std::string& init) {
    const Finished done = run(
        words("--mixer gdn --teacher teacher --text a.txt b.txt --eval-text held_out.txt --window "
              "32 --init.tokens 256 --calibrate.enabled false --eval.context 64 --eval.windows 2 "
              "--agreement.prompts 0 --threads 1 --compare none --init " +
              init + " --out " + out));
    ASSERT_EQ(done.exit_code, 0) << done.err;
  }
  static Words compare(const std::string& models, const Words& more = {}) {
    return words("compare " + models +
                     " --text held_out.txt --eval.context 64 --eval.windows 4 --agreement.prompts "
                     "3 --agreement.prompt_length 8 --agreement.tokens 5 --needle.lengths 220 "
                     "--needle.depths 0 1 --needle.trials 2 --speed.contexts 16 64 --speed.tokens "
                     "4 --threads 1",
                 more);
  }
};

TEST_F(CompareTest, OneTableAndOneFile) {
  convert("one", "taylor");
  convert("two", "projection_copy");
  const Finished done = run(compare("teacher one/student two/student", {"--out", "compare.json"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(
      done.out,
      AllOf(HasSubstr("figure"), HasSubstr("one/student"), HasSubstr("two/student"),
            HasSubstr("perplexity"), HasSubstr("KL to the teacher"),
            HasSubstr("same next token, text"), HasSubstr("same greedy token 1 "),
            HasSubstr("same greedy token 4-5"), HasSubstr("bits lost, position 32-63"),
            HasSubstr("needle found, 220 tokens, depth 100 %"),
            HasSubstr("decode tokens/s behind 64 tokens"), HasSubstr("state MiB behind 16 tokens"),
            HasSubstr("4 consecutive windows of 64 tokens"), HasSubstr("written: compare.json")));
  const json file = json::parse(read_text(folder_ / "compare.json"));
  EXPECT_EQ(file.at("format"), "graft.compare/1");
  ASSERT_EQ(file.at("models").size(), 3u);
  const json& teacher = file.at("models").at(0);
  EXPECT_NEAR(teacher.at("kl").get<double>(), 0, 1e-9);
  EXPECT_EQ(teacher.at("agreement"), 1);
  for (const json& same : teacher.at("greedy_by_position")) EXPECT_EQ(same, 1);
  for (const json& bucket : teacher.at("bits_lost_by_position")) EXPECT_EQ(bucket.at("bits"), 0);
  for (const std::size_t i : {1u, 2u}) {
    const json& student = file.at("models").at(i);
    EXPECT_GT(student.at("kl").get<double>(), 0);
    EXPECT_EQ(student.at("greedy_by_position").size(), 5u);
    EXPECT_EQ(student.at("bits_lost_by_position").size(), 6u);  // 1, 2-3, ..., 32-63
    EXPECT_EQ(student.at("needle").size(), 2u);
    ASSERT_EQ(student.at("speed").size(), 2u);
    for (const json& speed : student.at("speed"))
      EXPECT_GT(speed.at("decode_tokens_per_second").get<double>(), 0);
    // A linear student's state does not grow with the context.
    const auto bytes = [&](std::size_t k) { return student.at("speed").at(k).at("state_bytes"); };
    EXPECT_GT(bytes(0).get<double>(), 0);
    EXPECT_EQ(bytes(0), bytes(1));
  }
}

TEST_F(CompareTest, PerplexityIsThatOfEval) {
  convert("one", "taylor");
  ASSERT_EQ(run(compare("teacher one/student", {"--out", "compare.json"})).exit_code, 0);
  const json file = json::parse(read_text(folder_ / "compare.json"));
  for (const std::size_t i : {0u, 1u}) {
    const std::string model = i == 0 ? "teacher" : "one/student";
    const Finished eval = run(words("eval " + model +
                                    " --text held_out.txt --eval.context 64 --eval.windows 4 "
                                    "--threads 1"));
    ASSERT_EQ(eval.exit_code, 0) << eval.err;
    const double value = std::stod(eval.out.substr(std::string("perplexity ").size()));
    EXPECT_NEAR(file.at("models").at(i).at("perplexity").get<double>() / value, 1, 2e-3) << model;
  }
}

TEST_F(CompareTest, PartsCanBeLeftOut) {
  const Finished done =
      run(words("compare teacher teacher --text held_out.txt --eval.context 32 --eval.windows 2 "
                "--agreement.prompts 0 --needle.lengths [] --speed.contexts [] --threads 1"));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("perplexity"), Not(HasSubstr("needle found")),
                              Not(HasSubstr("decode tokens/s")), Not(HasSubstr("same greedy"))));
}

TEST_F(CompareTest, WhatIsMissingIsSaid) {
  expect_refused(words("compare"), ErrorKind::usage, HasSubstr("the TEACHER folder is missing"));
  expect_refused(words("compare teacher"), ErrorKind::usage, HasSubstr("which STUDENT folders?"));
  expect_refused(words("compare teacher teacher"), ErrorKind::usage,
                 HasSubstr("missing: --text FILE..."));
}

TEST_F(CompareTest, BadModelsAndTextsAreNamed) {
  expect_refused(compare("teacher nowhere"), ErrorKind::input, HasSubstr("nowhere"));
  expect_refused(compare("nowhere teacher"), ErrorKind::input, HasSubstr("nowhere"));
  expect_refused(compare("teacher teacher", {"--text", "none.txt"}), ErrorKind::input,
                 HasSubstr("none.txt"));
  write_file_atomically(folder_ / "short.txt", "Too short.");
  expect_refused(
      words("compare teacher teacher --text short.txt --eval.context 64 --needle.lengths [] "
            "--speed.contexts []"),
      ErrorKind::input,
      AllOf(HasSubstr("short.txt"), HasSubstr("has 10 tokens"), HasSubstr("eval.context")));
}

TEST_F(CompareTest, ContextsBeyondTheTeachersAreRefused) {
  expect_refused(compare("teacher teacher", {"--eval.context", "257"}), ErrorKind::usage,
                 HasSubstr("eval.context: 257 tokens are more than the teacher's context of 256"));
  expect_refused(compare("teacher teacher", {"--speed.contexts", "256"}), ErrorKind::usage,
                 HasSubstr("speed.contexts (with speed.tokens): 260 tokens"));
  expect_refused(compare("teacher teacher", {"--needle.lengths", "300"}), ErrorKind::usage,
                 HasSubstr("needle.lengths: 300 tokens are more than the teacher's context"));
  expect_refused(compare("teacher teacher", {"--needle.lengths", "20"}), ErrorKind::usage,
                 HasSubstr("needle.lengths: 20 tokens have no room for a haystack"));
  expect_refused(compare("teacher teacher", {"--needle.depths", "1.5"}), ErrorKind::usage,
                 HasSubstr("needle.depths"));
}

TEST_F(CompareTest, AFileInTheWayIsNamedBeforeTheWork) {
  write_file_atomically(folder_ / "compare.json", "precious");
  expect_refused(compare("teacher teacher", {"--out", "compare.json"}), ErrorKind::usage,
                 AllOf(HasSubstr("is there already"), HasSubstr("--force")));
  EXPECT_EQ(read_text(folder_ / "compare.json"), "precious");
}

}  // namespace
}  // namespace graft
