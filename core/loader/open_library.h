#pragma once

#include <filesystem>

#include "graft/graft.h"

namespace graft {

// Opens a shared library for good (all symbols resolved now, its own kept to itself, never closed)
// and gives its negotiation function. Throws Error(plugin) naming file and cause: not there, a
// folder, no ELF file, what the dynamic linker says, no entry symbol.
graft_plugin_negotiate_fn open_library(const std::filesystem::path& file);

}  // namespace graft
