#include "core/config/coerce.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/config/toml_reader.h"

namespace graft {
namespace {

[[noreturn]] void bad_value(const std::string& where, const std::string& name,
                            const std::string& what) {
  // A flag says the name itself.
  const bool is_flag = where.starts_with("--");
  fail(ErrorKind::usage, where + ": " + (is_flag ? "" : name + ": ") + what);
}

template <typename T>
std::optional<T> parse_scalar(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<bool> parse_boolean(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  return std::nullopt;
}

bool would_parse(const std::string& text, ValueType type) {
  switch (type) {
    case ValueType::boolean:
      return parse_boolean(text).has_value();
    case ValueType::integer:
      return parse_scalar<std::int64_t>(text).has_value();
    case ValueType::number:
      return parse_scalar<double>(text).has_value();
    default:
      return false;
  }
}

bool is_empty_list(const ConfigValue& value) {
  const auto* items = std::get_if<std::vector<std::int64_t>>(&value);
  return items && items->empty();
}

std::string number_text(double value) {
  return value == std::floor(value) && std::abs(value) < 1e15
             ? std::to_string(static_cast<std::int64_t>(value))
             : to_toml(value);
}

void check_range(double value, const Key& key, const std::string& where) {
  if (!std::isfinite(value))
    bad_value(where, key.name, "expected a finite number, got " + to_toml(value));
  if (value >= key.min && value <= key.max) return;
  const std::string limits =
      std::isinf(key.max)   ? "at least " + number_text(key.min)
      : std::isinf(key.min) ? "at most " + number_text(key.max)
                            : "between " + number_text(key.min) + " and " + number_text(key.max);
  bad_value(where, key.name, "must be " + limits + ", got " + number_text(value));
}

void check_choice(const std::string& value, const Key& key, const std::string& where) {
  if (key.one_of.empty() ||
      std::find(key.one_of.begin(), key.one_of.end(), value) != key.one_of.end())
    return;
  std::string choices;
  for (const std::string& choice : key.one_of) choices += (choices.empty() ? "" : ", ") + choice;
  const auto near = nearest(value, key.one_of);
  bad_value(where, key.name,
            quoted(value) + " is not one of " + choices +
                (near ? " (did you mean '" + *near + "'?)" : ""));
}

template <typename T>
ConfigValue parse_list(const std::vector<std::string>& words, ValueType item_type,
                       const std::string& name, const std::string& where) {
  std::vector<T> items;
  for (const std::string& word : words) {
    std::string_view rest = word;
    while (true) {
      const std::string_view item = rest.substr(0, rest.find(','));
      const auto value = parse_scalar<T>(item);
      if (!value) {
        bad_value(where, name,
                  "expected " + std::string(describe_type(item_type)) +
                      " between the commas, got " + quoted(item));
      }
      items.push_back(*value);
      if (item.size() == rest.size()) break;
      rest.remove_prefix(item.size() + 1);
    }
  }
  return items;
}

}  // namespace

ConfigValue coerce(ConfigValue value, ValueType type, const std::string& name,
                   const std::string& where) {
  if (type_of(value) == type) return value;
  if (const auto* whole = std::get_if<std::int64_t>(&value); whole && type == ValueType::number) {
    return static_cast<double>(*whole);
  }
  if (is_empty_list(value)) {
    if (type == ValueType::numbers) return std::vector<double>();
    if (type == ValueType::strings) return std::vector<std::string>();
  }
  if (const auto* whole = std::get_if<std::vector<std::int64_t>>(&value);
      whole && type == ValueType::numbers) {
    return std::vector<double>(whole->begin(), whole->end());
  }
  const auto* text = std::get_if<std::string>(&value);
  if (text && type == ValueType::strings) return std::vector<std::string>{*text};
  bad_value(where, name,
            "expected " + std::string(describe_type(type)) + ", got " + describe(value) +
                (text && would_parse(*text, type) ? " (write it without quotes)" : ""));
}

void check_allowed(const ConfigValue& value, const Key& key, const std::string& where) {
  switch (type_of(value)) {
    case ValueType::boolean:
      return;
    case ValueType::integer:
      return check_range(static_cast<double>(std::get<std::int64_t>(value)), key, where);
    case ValueType::number:
      return check_range(std::get<double>(value), key, where);
    case ValueType::string:
      return check_choice(std::get<std::string>(value), key, where);
    case ValueType::integers:
      for (const auto item : std::get<std::vector<std::int64_t>>(value)) {
        check_range(static_cast<double>(item), key, where);
      }
      return;
    case ValueType::numbers:
      for (const double item : std::get<std::vector<double>>(value)) check_range(item, key, where);
      return;
    case ValueType::strings:
      for (const auto& item : std::get<std::vector<std::string>>(value))
        check_choice(item, key, where);
      return;
  }
}

ConfigValue parse_words(const std::vector<std::string>& words, ValueType type,
                        const std::string& name, const std::string& where) {
  for (const std::string& word : words) {
    if (!is_utf8(word)) bad_value(where, name, "the text " + quoted(word) + " is not UTF-8");
  }
  const bool is_list =
      type == ValueType::integers || type == ValueType::numbers || type == ValueType::strings;
  if (is_list && words.size() == 1 && words.front().starts_with('[')) {
    if (auto list = parse_toml_value(words.front()))
      return coerce(std::move(*list), type, name, where);
    bad_value(where, name, quoted(words.front()) + " is not a list as TOML writes it");
  }
  if (type == ValueType::strings) return words;
  if (type == ValueType::integers)
    return parse_list<std::int64_t>(words, ValueType::integer, name, where);
  if (type == ValueType::numbers) return parse_list<double>(words, ValueType::number, name, where);

  if (words.size() != 1)
    bad_value(where, name, "expected one value, got " + std::to_string(words.size()));
  const std::string& word = words.front();
  if (type == ValueType::string) return word;
  if (type == ValueType::boolean) {
    if (const auto value = parse_boolean(word)) return *value;
  } else if (type == ValueType::integer) {
    if (const auto value = parse_scalar<std::int64_t>(word)) return *value;
  } else if (const auto value = parse_scalar<double>(word)) {
    return *value;
  }
  bad_value(where, name, "expected " + std::string(describe_type(type)) + ", got " + quoted(word));
}

}  // namespace graft
