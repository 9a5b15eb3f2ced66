#include "core/base/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace graft {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

// A clock that the test turns, and a stream that it reads.
class ProgressTest : public testing::Test {
 protected:
  ~ProgressTest() override { std::fclose(stream_); }

  ProgressOptions options(bool terminal, int width = 200) {
    ProgressOptions options;
    options.stream = stream_;
    options.terminal = terminal;
    options.width = width;
    options.now = [this] { return now_; };
    return options;
  }

  // What was written since the last call.
  std::string written() {
    std::fflush(stream_);
    const auto end = static_cast<std::size_t>(std::ftell(stream_));
    std::string text(end - read_, '\0');
    std::fseek(stream_, static_cast<long>(read_), SEEK_SET);
    EXPECT_EQ(std::fread(text.data(), 1, text.size(), stream_), text.size());
    std::fseek(stream_, static_cast<long>(end), SEEK_SET);
    read_ = end;
    return text;
  }

  std::chrono::steady_clock::time_point now_{seconds(1000)};
  std::FILE* stream_ = std::tmpfile();
  std::size_t read_ = 0;
};

TEST_F(ProgressTest, PlainLinesAreRareAndWhole) {
  Progress progress("calibrate", 30, "layers", 0, options(false));
  EXPECT_EQ(written(), "calibrate  0/30 layers\n");
  for (int i = 0; i < 4; ++i) {
    now_ += seconds(1);
    progress.advance();
  }
  EXPECT_EQ(written(), "");
  now_ += seconds(1);
  progress.advance(1, "loss 0.5");
  EXPECT_EQ(written(), "calibrate  5/30 layers  1.00 layers/s  0:25 left  loss 0.5\n");
}

TEST_F(ProgressTest, ATerminalSeesOneLineRewritten) {
  auto progress = std::make_unique<Progress>("text", 4, "files", 0, options(true));
  EXPECT_EQ(written(), "\rtext  [----------------------]  0/4 files\x1b[K");
  now_ += milliseconds(50);
  progress->advance();
  EXPECT_EQ(written(), "");
  now_ += milliseconds(50);
  progress->advance();
  EXPECT_EQ(written(),
            "\rtext  [###########-----------]  2/4 files  20.0 files/s  0:00 left\x1b[K");
  now_ += milliseconds(300);
  progress->advance(2);
  progress->finish("ok");
  EXPECT_THAT(
      written(),
      testing::EndsWith(
          "\rtext  [######################]  4/4 files  10.0 files/s  in 0:00  ok\x1b[K\n"));
  progress.reset();
  EXPECT_EQ(written(), "");
}

TEST_F(ProgressTest, TheLineFitsTheTerminal) {
  Progress progress("é", 10, "x", 0, options(true, 10));
  EXPECT_EQ(written(), "\ré  [-----\x1b[K");
}

TEST_F(ProgressTest, AnUnfinishedLineIsEnded) {
  { Progress progress("work", 2, "x", 0, options(true)); }
  EXPECT_THAT(written(), testing::EndsWith("\x1b[K\n"));
}

TEST_F(ProgressTest, ClearMakesRoomAndComesBack) {
  Progress progress("work", 2, "x", 0, options(true));
  written();
  progress.clear();
  EXPECT_EQ(written(), "\r\x1b[K");
  progress.clear();
  EXPECT_EQ(written(), "");
  now_ += milliseconds(10);
  progress.advance();
  EXPECT_THAT(written(), HasSubstr("1/2 x"));
}

// What was done before the process started must not count as done by it: neither rate nor time
// left.
TEST_F(ProgressTest, AResumedRunCountsItsOwnWorkOnly) {
  Progress progress("train", 100, "steps", 80, options(false));
  EXPECT_EQ(written(), "train  80/100 steps\n");
  EXPECT_EQ(progress.rate(), 0);
  EXPECT_LT(progress.seconds_left(), 0);
  now_ += seconds(5);
  progress.advance(10);
  EXPECT_DOUBLE_EQ(progress.rate(), 2);
  EXPECT_DOUBLE_EQ(progress.seconds_left(), 5);
  EXPECT_EQ(written(), "train  90/100 steps  2.00 steps/s  0:05 left\n");
}

TEST_F(ProgressTest, WithoutATotalThereIsNoTimeLeft) {
  Progress progress("read", 0, "tokens", 0, options(false));
  EXPECT_EQ(written(), "read\n");
  now_ += seconds(10);
  progress.advance(5000);
  EXPECT_EQ(written(), "read  5000 tokens  500 tokens/s\n");
  progress.finish();
  EXPECT_EQ(written(), "read  5000 tokens  500 tokens/s  in 0:10\n");
}

TEST_F(ProgressTest, MoreThanTheTotalIsNoHarm) {
  Progress progress("x", 2, "", 0, options(true));
  now_ += seconds(1);
  progress.advance(5);
  EXPECT_EQ(progress.seconds_left(), 0);
  EXPECT_THAT(written(), HasSubstr("[######################]  5/2  5.00/s  0:00 left"));
}

TEST_F(ProgressTest, FinishingTwiceSaysItOnce) {
  Progress progress("x", 1, "y", 0, options(false));
  written();
  progress.finish();
  EXPECT_EQ(written(), "x  0/1 y  in 0:00\n");
  progress.finish();
  EXPECT_EQ(written(), "");
}

TEST_F(ProgressTest, SilentWritesNothing) {
  auto quiet = options(true);
  quiet.silent = true;
  {
    Progress progress("x", 1, "y", 0, quiet);
    now_ += seconds(10);
    progress.advance();
    progress.finish();
  }
  EXPECT_EQ(written(), "");
}

TEST(FormatDuration, ReadsAsAClock) {
  EXPECT_EQ(format_duration(-1), "0:00");
  EXPECT_EQ(format_duration(0.4), "0:00");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(754), "12:34");
  EXPECT_EQ(format_duration(3725), "1:02:05");
  EXPECT_EQ(format_duration(90000), "25:00:00");
  EXPECT_EQ(format_duration(1e300), format_duration(1e9));
}

}  // namespace
}  // namespace graft
