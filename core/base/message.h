#pragma once

#include <string>

namespace graft {

// The log for translation units that include LibTorch: its headers bring a fmt of their own, which
// spdlog's cannot stand beside. Elsewhere use spdlog through log.h.
void log_debug(const std::string& message);
void log_info(const std::string& message);
void log_warning(const std::string& message);

}  // namespace graft
