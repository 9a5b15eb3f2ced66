#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

namespace graft {

// Sends spdlog's default logger (spdlog::info and its like) to standard error, coloured on a
// terminal, and shows messages of `level` and above. Standard output stays for results.
void log_to_stderr(spdlog::level::level_enum level);

// "trace", "debug", "info", "warning", "error" or "off"; anything else is an Error(usage).
spdlog::level::level_enum parse_log_level(std::string_view name);

}  // namespace graft
