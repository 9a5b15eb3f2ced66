#pragma once

#include <filesystem>
#include <string>

#include "core/config/config.h"

namespace graft {

// The file that `out` names, for the commands that write one; "" where none is asked for. Throws
// Error(usage) when it does not end in `extension`, is a folder, lies in none, or is there and
// `force` is not set: better before the work than behind it.
std::filesystem::path output_file(const Config& config, const std::string& extension);

}  // namespace graft
