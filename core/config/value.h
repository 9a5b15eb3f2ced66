#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace graft {

// What a key of a configuration can hold. Lists are of one type; an empty list of the free tables
// is a list of integers, and every list type takes it.
using ConfigValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>,
                                 std::vector<double>, std::vector<std::string>>;

enum class ValueType { boolean, integer, number, string, integers, numbers, strings };

ValueType type_of(const ConfigValue& value);

// "true or false", "a whole number", "a list of strings", ...: for messages and help.
std::string_view describe_type(ValueType type);

// `the string "1e-3"`, "1.5", "[1, 2]": the value as a message quotes it.
std::string describe(const ConfigValue& value);

// The value as TOML. Numbers come back to the same bits, strings to the same bytes.
std::string to_toml(const ConfigValue& value);

// A TOML key: bare where TOML allows it, quoted otherwise.
std::string toml_key(std::string_view key);

// Can the text stand in a TOML file at all?
bool is_utf8(std::string_view text);

}  // namespace graft
