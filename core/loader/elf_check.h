#pragma once

#include <filesystem>
#include <string>

namespace graft {

// Why the dynamic linker should not be given this file, or "": no ELF file, one of another machine
// or no shared object, or one that is shorter than its own headers say. The linker's own words for
// the first are "file too short" or "invalid ELF header", and the last ends the process with
// SIGBUS.
std::string elf_fault(const std::filesystem::path& file);

}  // namespace graft
