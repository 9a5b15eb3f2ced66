#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/config/value.h"

namespace graft {

enum class Layer : int;
class Config;

// Reads the TOML text into `config`. `name` is the file's name in messages and origins.
void read_toml(std::string_view text, const std::string& name, Layer layer, Config& config);

// One value as it would stand behind "key =" in a file, of its natural type; nothing when it is not
// one, or of a kind that no key takes (a date, a table, a list of several types).
std::optional<ConfigValue> parse_toml_value(const std::string& text);

}  // namespace graft
