#include "core/base/message.h"

#include "core/base/log.h"

namespace graft {

void log_debug(const std::string& message) { spdlog::debug("{}", message); }
void log_info(const std::string& message) { spdlog::info("{}", message); }
void log_warning(const std::string& message) { spdlog::warn("{}", message); }

}  // namespace graft
