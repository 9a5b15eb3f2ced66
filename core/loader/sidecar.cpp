#include "core/loader/sidecar.h"

#include <limits>
#include <string_view>

#include <toml++/toml.h>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/suggest.h"
#include "graft/graft.h"

namespace graft {
namespace {

// More than any list of aliases needs; a wrong file is not read whole.
constexpr std::size_t kLargestSidecar = 1U << 20U;

[[noreturn]] void fail_at(const std::filesystem::path& file, const toml::source_region& region,
                          const std::string& message) {
  fail(ErrorKind::plugin, quoted_path(file) + ", line " + std::to_string(region.begin.line) +
                              ", column " + std::to_string(region.begin.column) + ": " + message);
}

std::optional<std::string> text(const toml::table& table, std::string_view key,
                                const std::filesystem::path& file) {
  const toml::node* const node = table.get(key);
  if (node == nullptr) return std::nullopt;
  const auto value = node->value_exact<std::string>();
  if (!value) fail_at(file, node->source(), "'" + std::string(key) + "' is not a string");
  return value;
}

std::optional<std::uint32_t> abi(const toml::table& table, std::string_view key,
                                 const std::filesystem::path& file) {
  const auto value = text(table, key, file);
  if (!value) return std::nullopt;
  unsigned long number[2] = {0, 0};
  std::size_t at = 0;
  bool good = true;
  for (int part = 0; part < 2 && good; ++part) {
    const std::size_t begin = at;
    while (at < value->size() && (*value)[at] >= '0' && (*value)[at] <= '9' && at - begin < 5) {
      number[part] = number[part] * 10 + static_cast<unsigned long>((*value)[at++] - '0');
    }
    good = at > begin && number[part] <= 0xFFFF &&
           (part == 0 ? at < value->size() && (*value)[at++] == '.' : at == value->size());
  }
  if (!good) {
    fail_at(file, table.get(key)->source(),
            "'" + std::string(key) + "' is " + quoted(*value) + "; an ABI is written like \"1.0\"");
  }
  return GRAFT_ABI(number[0], number[1]);
}

std::optional<std::vector<std::string>> texts(const toml::table& table, std::string_view key,
                                              const std::filesystem::path& file) {
  const toml::node* const node = table.get(key);
  if (node == nullptr) return std::nullopt;
  if (!node->is_array()) fail_at(file, node->source(), "'" + std::string(key) + "' is not a list");
  std::vector<std::string> values;
  for (const toml::node& item : *node->as_array()) {
    const auto value = item.value_exact<std::string>();
    if (!value) fail_at(file, item.source(), "'" + std::string(key) + "' holds more than strings");
    values.push_back(*value);
  }
  return values;
}

}  // namespace

std::filesystem::path sidecar_path(const std::filesystem::path& plugin) {
  std::filesystem::path path = plugin;
  return path.replace_extension(kSidecarSuffix);
}

Sidecar read_sidecar(const std::filesystem::path& file) {
  toml::table table;
  try {
    table = toml::parse(read_text(file, kLargestSidecar));
  } catch (const toml::parse_error& error) {
    fail_at(file, error.source(), std::string(error.description()));
  }
  Sidecar sidecar;
  sidecar.file = file;
  sidecar.id = text(table, "id", file);
  sidecar.license = text(table, "license", file);
  sidecar.build_tags = text(table, "build_tags", file);
  sidecar.sha256 = text(table, "sha256", file);
  sidecar.abi_min = abi(table, "abi_min", file);
  sidecar.abi_max = abi(table, "abi_max", file);
  sidecar.aliases = texts(table, "aliases", file);
  return sidecar;
}

}  // namespace graft
