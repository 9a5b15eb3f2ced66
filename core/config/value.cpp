#include "core/config/value.h"

#include <charconv>
#include <cmath>

#include "core/base/suggest.h"

namespace graft {
namespace {

template <typename T>
std::string list_to_toml(const std::vector<T>& items) {
  std::string out = "[";
  for (const T& item : items) {
    if (out.size() > 1) out += ", ";
    out += to_toml(ConfigValue(item));
  }
  return out + "]";
}

std::string number_to_toml(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[40];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value);  // shortest that reads back the same
  std::string text(buffer, end.ptr);
  if (text.find_first_of(".e") == std::string::npos)
    text += ".0";  // or it would come back as an integer
  return text;
}

std::string string_to_toml(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      constexpr char hex[] = "0123456789abcdef";
      out += "\\u00";
      out += hex[byte >> 4];
      out += hex[byte & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Bytes of the UTF-8 sequence at `text`, 0 when it is not one (overlong, surrogate, beyond
// U+10FFFF).
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if (lead == 0xe0 && byte(1) < 0xa0) return 0;
  if (lead == 0xed && byte(1) > 0x9f) return 0;
  if (lead == 0xf0 && byte(1) < 0x90) return 0;
  if (lead == 0xf4 && byte(1) > 0x8f) return 0;
  return length;
}

}  // namespace

ValueType type_of(const ConfigValue& value) { return static_cast<ValueType>(value.index()); }

std::string_view describe_type(ValueType type) {
  switch (type) {
    case ValueType::boolean:
      return "true or false";
    case ValueType::integer:
      return "a whole number";
    case ValueType::number:
      return "a number";
    case ValueType::string:
      return "a string";
    case ValueType::integers:
      return "a list of whole numbers";
    case ValueType::numbers:
      return "a list of numbers";
    case ValueType::strings:
      return "a list of strings";
  }
  return "a value";
}

std::string describe(const ConfigValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    std::string shown = quoted(*text);
    shown.front() = shown.back() = '"';
    return "the string " + shown;
  }
  return to_toml(value);
}

std::string to_toml(const ConfigValue& value) {
  switch (type_of(value)) {
    case ValueType::boolean:
      return std::get<bool>(value) ? "true" : "false";
    case ValueType::integer:
      return std::to_string(std::get<std::int64_t>(value));
    case ValueType::number:
      return number_to_toml(std::get<double>(value));
    case ValueType::string:
      return string_to_toml(std::get<std::string>(value));
    case ValueType::integers:
      return list_to_toml(std::get<std::vector<std::int64_t>>(value));
    case ValueType::numbers:
      return list_to_toml(std::get<std::vector<double>>(value));
    case ValueType::strings:
      return list_to_toml(std::get<std::vector<std::string>>(value));
  }
  return "";
}

std::string toml_key(std::string_view key) {
  constexpr std::string_view bare =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
  const bool is_bare = !key.empty() && key.find_first_not_of(bare) == std::string_view::npos;
  return is_bare ? std::string(key) : string_to_toml(key);
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace graft
