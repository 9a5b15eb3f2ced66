// The dynamic symbols of a shared library, read from the file.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace graft::conformance {

// All bytes of a file; fails naming it.
std::vector<char> read_bytes(const std::filesystem::path& file);

// Names that the library defines for others to link with. Skips for what is no 64-bit ELF file of
// this machine's byte order, fails for a broken one.
std::vector<std::string> exported_symbols(const std::filesystem::path& file);

}  // namespace graft::conformance
