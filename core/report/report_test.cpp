#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>

#include "core/base/file.h"
#include "core/base/testing.h"
#include "core/report/chart.h"
#include "core/report/event_file.h"
#include "core/report/html_report.h"
#include "core/report/run_metrics.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr const char* kRun =
    R"({"kind":"step","stage":"align","stage_index":0,"step":1,"tokens":512,"loss":0.5,"parts":{"mse":0.5},"layer_loss":{"0":0.4,"10":0.6},"lr":0.001,"grad_norm":2.5,"tok_per_s":900}
{"kind":"step","stage":"align","stage_index":0,"step":2,"tokens":1024,"loss":0.25,"parts":{"mse":0.25},"layer_loss":{"0":0.2,"10":0.3},"lr":0.0005,"grad_norm":1.5,"tok_per_s":950}
{"kind":"eval","stage":"align","stage_index":0,"step":2,"tokens":1024,"perplexity":61.5,"agreement":0.05,"next_token":0.61}
{"kind":"gates","layers":{"0":{"half_life":[2,null],"write_gate":[0.1,0.2]},"10":{"half_life":[8,16],"write_gate":[0.3,0.4]}}}
{"kind":"step","stage":"distil","stage_index":1,"step":3,"tokens":2048,"loss":null,"parts":{"kl":1.5,"ce":null},"lr":0.0001,"grad_norm":null,"tok_per_s":100}
{"kind":"news of a later version","stage_index":1,"step":3}
)";

constexpr const char* kSamples =
    R"([{"prompt":"It is a <truth>","teacher":" universally & well","student":" \"known\""}])";

class Report : public testing::Test {
 protected:
  TempFolder folder_;

  fs::path write(const std::string& text) {
    write_file_atomically(folder_ / "metrics.jsonl", text);
    write_file_atomically(folder_ / "samples.json", std::string_view(kSamples));
    return folder_.path();
  }
};

TEST_F(Report, ReadsWhatARunWrote) {
  const RunMetrics metrics = read_metrics(write(kRun));
  ASSERT_EQ(metrics.stages.size(), 2u);
  EXPECT_EQ(metrics.stages[0].name, "align");
  ASSERT_EQ(metrics.stages[0].steps.size(), 2u);
  EXPECT_EQ(metrics.stages[0].steps[1].tokens, 1024);
  EXPECT_EQ(metrics.stages[0].steps[1].by_layer.at(10), 0.3);
  EXPECT_TRUE(std::isnan(metrics.stages[1].steps[0].loss));
  EXPECT_TRUE(std::isnan(metrics.stages[1].steps[0].parts.at("ce")));
  ASSERT_EQ(metrics.evaluations.size(), 1u);
  EXPECT_EQ(metrics.evaluations[0].next_token, 0.61);
  EXPECT_TRUE(std::isinf(metrics.gates.at(0).half_life[1]));
  EXPECT_EQ(metrics.gates.at(10).write_gate[1], 0.4);
  EXPECT_EQ(metrics.samples.at(0).prompt, "It is a <truth>");
}

TEST_F(Report, ALineStillBeingWrittenIsPassedOver) {
  const RunMetrics metrics = read_metrics(write(std::string(kRun) + R"({"kind":"step","sta)"));
  EXPECT_EQ(metrics.stages[1].steps.size(), 1u);
}

TEST_F(Report, ABrokenLineIsNamed) {
  EXPECT_GRAFT_ERROR(read_metrics(write("{\"kind\":\"other\"}\n{oops}\n")), ErrorKind::input,
                     AllOf(HasSubstr("metrics.jsonl"), HasSubstr("line 2")));
  EXPECT_GRAFT_ERROR(read_metrics(write("{\"kind\":\"step\",\"stage_index\":0}\n")),
                     ErrorKind::input, AllOf(HasSubstr("line 1"), HasSubstr("step")));
  write("");
  write_file_atomically(folder_ / "samples.json", std::string_view("[{\"prompt\":\"a\"}]"));
  EXPECT_GRAFT_ERROR(read_metrics(folder_.path()), ErrorKind::input,
                     AllOf(HasSubstr("samples.json"), HasSubstr("teacher")));
  EXPECT_GRAFT_ERROR(
      read_metrics(write("{\"kind\":\"step\",\"stage_index\":99999999,\"step\":1,\"tokens\":1}\n")),
      ErrorKind::input, HasSubstr("stage_index is 99999999"));
}

TEST_F(Report, OnePageWithoutScriptOrNetwork) {
  const std::string page = html_report("my <run>", read_metrics(write(kRun)),
                                       {{"seed", 7}, {"plugins", {{"mixer", "org.graft.gdn"}}}});
  EXPECT_THAT(page, StartsWith("<!doctype html>"));
  EXPECT_THAT(page, AllOf(HasSubstr("my &lt;run&gt;"), HasSubstr("align → distil"),
                          HasSubstr("Perplexity on held-out text"), HasSubstr("61.5"),
                          HasSubstr("Loss of each layer: align"), HasSubstr("layer 10: 0.6 → 0.3"),
                          HasSubstr("Half-life of each head")));
  EXPECT_THAT(page, AllOf(HasSubstr("It is a &lt;truth&gt;"), HasSubstr(" universally &amp; well"),
                          HasSubstr("<th>plugins.mixer</th><td class=\"wrap\">org.graft.gdn")));
  EXPECT_THAT(page, AllOf(Not(HasSubstr("<script")), Not(HasSubstr("http")), Not(HasSubstr("nan")),
                          Not(HasSubstr(" inf")), Not(HasSubstr("<truth>"))));
}

TEST_F(Report, ARunWithoutFiguresIsAPageToo) {
  const std::string page = html_report("empty", read_metrics(write("")), {});
  EXPECT_THAT(page, AllOf(HasSubstr("<h1>empty</h1>"), Not(HasSubstr("<svg"))));
}

TEST_F(Report, IsWrittenIntoTheRunsFolder) {
  write(kRun);
  write_file_atomically(folder_ / "run.json", std::string_view("{\"seed\": 3}"));
  write_report(folder_.path());
  EXPECT_THAT(read_text(folder_ / "report.html"), HasSubstr("<th>seed</th>"));
  EXPECT_EQ(read_text(folder_ / "events/events.out.tfevents.0.graft"),
            event_file(read_metrics(folder_.path())));
}

TEST_F(Report, AFolderThatIsNoRunIsRefused) {
  EXPECT_GRAFT_ERROR(write_report(folder_.path()), ErrorKind::input,
                     AllOf(HasSubstr("no run's folder"), HasSubstr("metrics.jsonl")));
}

// ---------------------------------------------------------------- charts

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(Chart, NothingToDrawIsNothing) {
  EXPECT_EQ(draw(LineChart{}), "");
  EXPECT_EQ(draw(LineChart{"t", "x", "y", {{"s", {{1, std::nan("")}}}}}), "");
  EXPECT_EQ(draw(LineChart{"t", "x", "y", {{"s", {{1, -1}, {2, 0}}}}, {}, /*log_y=*/true}), "");
  EXPECT_EQ(draw(Dumbbells{}), "");
  EXPECT_EQ(draw(HeatMap{}), "");
}

TEST(Chart, OnePointAndEqualPointsHaveAPlace) {
  for (const double value : {0.0, 1.0, -3.0, 1e-12, 1e12}) {
    const std::string svg = draw(LineChart{"t", "x", "y", {{"s", {{5, value}}}}});
    EXPECT_THAT(svg, AllOf(HasSubstr("<circle"), Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
  }
}

TEST(Chart, AThinnedSeriesKeepsItsSpike) {
  Series series{"s", {}};
  for (int i = 0; i < 20000; ++i) series.points.emplace_back(i, i == 12345 ? 100 : 1);
  const std::string svg = draw(LineChart{"t", "x", "y", {series}});
  EXPECT_LT(svg.size(), 30'000u);
  const std::string flat = draw(LineChart{"t", "x", "y", {{"s", {{0, 1}, {19999, 100}}}}});
  // The highest point's place is that of 100 in either chart.
  const auto top = [](const std::string& text, std::size_t from) {
    const auto points = text.find("points=\"", from);
    double least = 1e9;
    for (auto at = text.find(',', points); at < text.find('"', points + 8);
         at = text.find(',', at + 1))
      least = std::min(least, std::stod(text.substr(at + 1)));
    return least;
  };
  EXPECT_EQ(top(svg, 0), top(flat, 0));
}

TEST(Chart, AHeatMapLeavesOutWhatIsNoNumber) {
  const std::string svg = draw(HeatMap{
      "t", "layer", "head", "tokens", {"0", "1"}, {{1, 2, INFINITY}, {std::nan(""), 8}}, true});
  EXPECT_EQ(count(svg, "<rect"), 4u);
  EXPECT_THAT(svg, AllOf(HasSubstr("layer 0, head 2: ∞ tokens"), HasSubstr("faint: 1, full: 8")));
}

TEST(Chart, ShortNumbers) {
  for (const auto& [value, text] : {std::pair(0.0, "0"),
                                    {0.012345, "0.0123"},
                                    {0.001, "0.001"},
                                    {0.0003, "3e-4"},
                                    {0.00099995, "0.001"},
                                    {-0.00025, "-2.5e-4"},
                                    {1e-12, "1e-12"},
                                    {61.54, "61.5"},
                                    {1234.0, "1234"},
                                    {45350.0, "45.4k"},
                                    {999499.0, "999k"},
                                    {2.5e6, "2.5M"},
                                    {-4.0, "-4"}})
    EXPECT_EQ(short_number(value), text);
  EXPECT_EQ(short_number(std::nan("")), "-");
}

// ---------------------------------------------------------------- TensorBoard

TEST(EventFile, ChecksumOfTheStandardsExample) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(EventFile, ARecordIsLengthDataAndTwoChecksums) {
  const std::string record = tf_record("abc");
  ASSERT_EQ(record.size(), 8u + 4 + 3 + 4);
  EXPECT_EQ(record.substr(0, 8), std::string("\3\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(record.substr(12, 3), "abc");
}

TEST(EventFile, HoldsEachFigureUnderItsTag) {
  RunMetrics metrics;
  RunMetrics::Step step;
  step.step = 300;
  step.loss = 0.5;
  step.grad_norm = std::nan("");
  metrics.stages.push_back({"align", {step}});
  const std::string file = event_file(metrics);
  // Value {tag = "train/loss", simple_value = 0.5f} as protobuf writes it.
  EXPECT_THAT(file, HasSubstr(std::string("\x0a\x0atrain/loss\x15\0\0\0\x3f", 17)));
  // Event.step = 300 is the varint ac 02.
  EXPECT_THAT(file, HasSubstr("\x10\xac\x02"));
  EXPECT_THAT(file, AllOf(HasSubstr("brain.Event:2"), Not(HasSubstr("grad_norm"))));
}

std::string fixed64(double value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

TEST(EventFile, ItsTimesAreThoseOfTheClock) {
  RunMetrics metrics;
  metrics.written = 1.7e9;
  metrics.seconds = 100;
  RunMetrics::Step step;
  step.step = 300;
  step.loss = 0.5;
  step.seconds = 40;
  metrics.stages.push_back({"align", {step}});
  const std::string file = event_file(metrics);
  EXPECT_THAT(file, HasSubstr("\x09" + fixed64(1.7e9 - 100) + std::string("\x10\0", 2)));
  EXPECT_THAT(file, HasSubstr("\x09" + fixed64(1.7e9 - 60) + "\x10\xac\x02"));
}

TEST_F(Report, KnowsWhenItWasWritten) {
  write(R"({"kind":"step","stage_index":0,"step":1,"tokens":1,"seconds":2.5}
{"kind":"eval","step":1,"tokens":1,"seconds":3.5}
)");
  const RunMetrics metrics = read_metrics(folder_.path());
  EXPECT_GT(metrics.written, 1.6e9);
  EXPECT_EQ(metrics.seconds, 3.5);
  EXPECT_EQ(metrics.stages[0].steps[0].seconds, 2.5);
  EXPECT_EQ(metrics.evaluations[0].seconds, 3.5);
}

}  // namespace
}  // namespace graft
