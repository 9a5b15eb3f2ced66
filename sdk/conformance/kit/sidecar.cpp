#include "kit/sidecar.h"

#define TOML_ENABLE_FORMATTERS 1
#include <toml++/toml.h>

#include "kit/verdict.h"

namespace graft::conformance {
namespace {

std::optional<std::string> text(const toml::table& table, const char* key) {
  const toml::node* const node = table.get(key);
  if (node == nullptr) return std::nullopt;
  if (!node->is_string()) fail("the sidecar's '", key, "' is no text");
  return node->as_string()->get();
}

std::optional<std::vector<std::string>> texts(const toml::table& table, const char* key) {
  const toml::node* const node = table.get(key);
  if (node == nullptr) return std::nullopt;
  if (!node->is_array()) fail("the sidecar's '", key, "' is no list");
  std::vector<std::string> out;
  for (const toml::node& item : *node->as_array()) {
    if (!item.is_string()) fail("the sidecar's '", key, "' has an item that is no text");
    out.push_back(item.as_string()->get());
  }
  return out;
}

}  // namespace

std::optional<Sidecar> sidecar_of(const std::filesystem::path& plugin) {
  Sidecar out;
  out.file = plugin;
  out.file.replace_extension(".graftplugin.toml");
  if (!std::filesystem::exists(out.file)) return std::nullopt;
  toml::table table;
  try {
    table = toml::parse_file(out.file.string());
  } catch (const toml::parse_error& e) {
    fail("'", out.file.string(), "', line ", e.source().begin.line, ": ", e.description());
  }
  out.id = text(table, "id");
  out.license = text(table, "license");
  out.abi_min = text(table, "abi_min");
  out.abi_max = text(table, "abi_max");
  out.build_tags = text(table, "build_tags");
  out.sha256 = text(table, "sha256");
  out.aliases = texts(table, "aliases");
  return out;
}

}  // namespace graft::conformance
