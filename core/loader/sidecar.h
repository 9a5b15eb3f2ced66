#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace graft {

// <name>.graftplugin.toml beside <name>.so: what can be known of a plugin before a line of its code
// runs. Every key may be missing; unknown keys are for newer hosts and ignored.
struct Sidecar {
  std::filesystem::path file;
  std::optional<std::string> id, license, build_tags, sha256;
  std::optional<std::uint32_t> abi_min, abi_max;    // as GRAFT_ABI()
  std::optional<std::vector<std::string>> aliases;  // of every component in the library
};

inline constexpr std::string_view kSidecarSuffix = ".graftplugin.toml";

// Where the sidecar of a plugin file lies.
std::filesystem::path sidecar_path(const std::filesystem::path& plugin);

// Throws Error(plugin) with file, line and column when it is not TOML or a key has the wrong type.
Sidecar read_sidecar(const std::filesystem::path& file);

}  // namespace graft
