#include "core/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <memory>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {

void log_to_stderr(spdlog::level::level_enum level) {
  auto sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  auto logger = std::make_shared<spdlog::logger>("graft", std::move(sink));
  logger->set_pattern("%T %^%l%$: %v");
  logger->set_level(level);
  spdlog::set_default_logger(std::move(logger));
}

spdlog::level::level_enum parse_log_level(std::string_view name) {
  using namespace spdlog::level;
  const std::vector<std::string> names = {"trace", "debug", "info", "warning", "error", "off"};
  const std::vector<level_enum> levels = {trace, debug, info, warn, err, off};
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return levels[i];
  }
  fail(ErrorKind::usage, "unknown log level " + quoted(name) + did_you_mean(name, names));
}

}  // namespace graft
