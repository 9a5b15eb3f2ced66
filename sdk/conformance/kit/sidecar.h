// <name>.graftplugin.toml beside <name>.so: what a host reads before it opens the plugin.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace graft::conformance {

// Every key may be missing.
struct Sidecar {
  std::filesystem::path file;
  std::optional<std::string> id, license, abi_min, abi_max, build_tags, sha256;
  std::optional<std::vector<std::string>> aliases;
};

// Nothing when there is no such file; fails for one that cannot be read.
std::optional<Sidecar> sidecar_of(const std::filesystem::path& plugin);

}  // namespace graft::conformance
