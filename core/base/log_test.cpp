#include "core/base/log.h"

#include "core/base/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

TEST(Log, GoesToStderrFromItsLevelUp) {
  const auto before = spdlog::default_logger();
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  log_to_stderr(spdlog::level::warn);
  spdlog::info("hidden");
  spdlog::warn("shown {}", 42);
  spdlog::default_logger()->flush();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(ContainsRegex("[0-9:]+ warning: shown 42\n"), Not(HasSubstr("hidden"))));
  spdlog::set_default_logger(before);
}

TEST(Log, LevelsByName) {
  EXPECT_EQ(parse_log_level("trace"), spdlog::level::trace);
  EXPECT_EQ(parse_log_level("debug"), spdlog::level::debug);
  EXPECT_EQ(parse_log_level("info"), spdlog::level::info);
  EXPECT_EQ(parse_log_level("warning"), spdlog::level::warn);
  EXPECT_EQ(parse_log_level("error"), spdlog::level::err);
  EXPECT_EQ(parse_log_level("off"), spdlog::level::off);
  EXPECT_GRAFT_ERROR(parse_log_level("wraning"), ErrorKind::usage,
                     testing::Eq("unknown log level 'wraning' (did you mean 'warning'?)"));
  EXPECT_GRAFT_ERROR(parse_log_level("loud"), ErrorKind::usage,
                     HasSubstr("; known: trace, debug, info, warning, error, off"));
}

}  // namespace
}  // namespace graft
