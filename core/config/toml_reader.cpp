#include "core/config/toml_reader.h"

#include <toml++/toml.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/config/coerce.h"
#include "core/config/config.h"

namespace graft {
namespace {

std::string_view kind_of(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::date:
      return "a date";
    case toml::node_type::time:
      return "a time";
    case toml::node_type::date_time:
      return "a date and time";
    default:
      return "a value";
  }
}

std::optional<ConfigValue> scalar_value(const toml::node& node) {
  if (const auto* value = node.as_boolean()) return value->get();
  if (const auto* value = node.as_integer()) return value->get();
  if (const auto* value = node.as_floating_point()) return value->get();
  if (const auto* value = node.as_string()) return value->get();
  return std::nullopt;
}

// The list in the one type that holds every item; nothing when there is none.
std::optional<ConfigValue> list_value(const toml::array& array) {
  std::vector<std::int64_t> integers;
  std::vector<double> numbers;
  std::vector<std::string> strings;
  for (const toml::node& item : array) {
    if (const auto* integer = item.as_integer()) integers.push_back(integer->get());
    if (const auto number = item.value<double>()) numbers.push_back(*number);
    if (const auto* text = item.as_string()) strings.push_back(text->get());
  }
  if (integers.size() == array.size()) return integers;
  if (numbers.size() == array.size()) return numbers;
  if (strings.size() == array.size()) return strings;
  return std::nullopt;
}

std::optional<ConfigValue> natural_value(const toml::node& node) {
  return node.is_array() ? list_value(*node.as_array()) : scalar_value(node);
}

// toml++ destroys and we walk a document by recursion, and one line of dotted keys can nest as deep
// as it is long.
constexpr std::ptrdiff_t most_dots_in_a_line = 1000;
constexpr std::size_t most_bytes = std::size_t{4} << 20;

void refuse_abuse(std::string_view text, const std::string& name) {
  if (text.size() > most_bytes)
    fail(ErrorKind::usage, name + ": larger than 4 MiB, not a configuration file");
  for (std::size_t line = 1; !text.empty(); ++line) {
    const std::string_view row = text.substr(0, text.find('\n'));
    if (std::count(row.begin(), row.end(), '.') > most_dots_in_a_line) {
      fail(ErrorKind::usage, name + ":" + std::to_string(line) + ":1: more than " +
                                 std::to_string(most_dots_in_a_line) + " dots in one line");
    }
    text.remove_prefix(std::min(text.size(), row.size() + 1));
  }
}

std::string place(const std::string& name, const toml::source_position& at) {
  return name + ":" + std::to_string(at.line) + ":" + std::to_string(at.column);
}

toml::table parse(std::string_view text, const std::string& name) {
  refuse_abuse(text, name);
  try {
    return toml::parse(text, std::string_view(name));
  } catch (const toml::parse_error& error) {
    std::string what(error.description());
    constexpr std::string_view prefix = "Error while parsing ";
    if (what.starts_with(prefix)) what.erase(0, prefix.size());
    fail(ErrorKind::usage, place(name, error.source().begin) + ": invalid TOML: " + what);
  }
}

// A table's entries in the order of the file, so that the first mistake is the one reported.
std::vector<std::pair<const toml::key*, const toml::node*>> in_file_order(
    const toml::table& table) {
  std::vector<std::pair<const toml::key*, const toml::node*>> entries;
  for (auto&& [key, node] : table) entries.emplace_back(&key, &node);
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    const auto& left = a.first->source().begin;
    const auto& right = b.first->source().begin;
    return std::pair(left.line, left.column) < std::pair(right.line, right.column);
  });
  return entries;
}

}  // namespace

class TomlReader {
 public:
  TomlReader(const std::string& name, Layer layer) : name_(name), layer_(layer) {}

  void read(const toml::table& table, const std::string& prefix, Config& config) {
    for (const auto& [key, node] : in_file_order(table)) {
      read_entry(prefix + std::string(key->str()), *key, *node, config);
    }
  }

 private:
  Origin origin(const toml::source_region& at) const { return {layer_, place(name_, at.begin)}; }

  [[noreturn]] void reject(const toml::source_region& at, const std::string& message) const {
    fail(ErrorKind::usage, place(name_, at.begin) + ": " + message);
  }

  void read_entry(const std::string& full, const toml::key& key, const toml::node& node,
                  Config& config) {
    const Schema& schema = config.schema();
    if (const Key* known = schema.find_key(full)) return read_key(*known, key, node, config);
    if (const FreeTable* free = schema.find_table(full)) {
      return read_free(*free, want_table(full, key, node, schema), full + ".", config);
    }
    if (const RowTable* rows = schema.find_row(full)) return read_rows(*rows, key, node, config);
    if (schema.is_section(full))
      return read(want_table(full, key, node, schema), full + ".", config);
    // A quoted key can spell a whole path into a free table.
    if (const FreeTable* free = schema.table_holding(full); free && !node.is_table()) {
      return read_free_value(*free, full, key, node, config);
    }
    reject(key.source(), (node.is_table() ? "unknown table " : "unknown key ") + quoted(full) +
                             schema.suggestion(full));
  }

  const toml::table& want_table(const std::string& full, const toml::key& key,
                                const toml::node& node, const Schema& schema) const {
    if (const toml::table* table = node.as_table()) return *table;
    const bool has_name = schema.find_key(full + ".name") != nullptr;
    reject(key.source(), quoted(full) + " is a table, not a value; write " +
                             (has_name ? full + ".name = ..." : "[" + full + "]"));
  }

  void read_key(const Key& known, const toml::key& key, const toml::node& node, Config& config) {
    once(known.name, key, config);
    ConfigValue value = coerce(want_value(known.name, known.type(), node), known.type(), known.name,
                               place(name_, node.source().begin));
    check_allowed(value, known, place(name_, node.source().begin));
    config.put(known.name, {std::move(value), origin(key.source()), std::nullopt});
  }

  ConfigValue want_value(const std::string& full, std::optional<ValueType> type,
                         const toml::node& node) const {
    if (auto value = natural_value(node)) return *std::move(value);
    if (const toml::array* array = node.as_array()) reject_list(full, *array);
    const std::string expected(type ? describe_type(*type)
                                    : "a number, true or false, a string or a list of them");
    reject(node.source(), full + ": expected " + expected + ", got " + std::string(kind_of(node)));
  }

  [[noreturn]] void reject_list(const std::string& full, const toml::array& array) const {
    const auto first = scalar_value(array[0]);
    for (const toml::node& item : array) {
      const auto value = scalar_value(item);
      if (!value || std::holds_alternative<bool>(*value)) {
        reject(item.source(), full + ": a list holds numbers or strings, not " +
                                  (value ? describe(*value) : std::string(kind_of(item))));
      }
      if (std::holds_alternative<std::string>(*value) !=
          std::holds_alternative<std::string>(*first)) {
        reject(item.source(), full + ": a list holds items of one type, not " + describe(*first) +
                                  " and " + describe(*value));
      }
    }
    fail(ErrorKind::internal, full + ": a list that cannot be read");
  }

  void read_free(const FreeTable& free, const toml::table& table, const std::string& prefix,
                 Config& config) {
    for (const auto& [key, node] : in_file_order(table)) {
      const std::string full = prefix + std::string(key->str());
      if (const toml::table* inner = node->as_table()) {
        read_free(free, *inner, full + ".", config);
      } else {
        read_free_value(free, full, *key, *node, config);
      }
    }
  }

  void read_free_value(const FreeTable& free, const std::string& full, const toml::key& key,
                       const toml::node& node, Config& config) {
    once(full, key, config);
    ConfigValue value = want_value(full, free.type, node);
    if (free.type)
      value = coerce(std::move(value), *free.type, full, place(name_, node.source().begin));
    config.put(full, {std::move(value), origin(key.source()), std::nullopt});
  }

  void read_rows(const RowTable& rows, const toml::key& key, const toml::node& node,
                 Config& config) {
    const toml::array* array = node.as_array();
    const auto is_table = [](const toml::node& item) { return item.is_table(); };
    if (!array || !std::all_of(array->begin(), array->end(), is_table)) {
      reject(key.source(),
             quoted(rows.name) + " is a list of tables; start each row with [[" + rows.name + "]]");
    }
    std::vector<Config> list;
    for (const toml::node& item : *array) {
      Config& row = list.emplace_back(rows.row);
      row.origin_ = origin(item.source());
      seen_.clear();
      read(*item.as_table(), "", row);
      for (const Key& wanted : rows.row.keys) {
        if (wanted.required && !row.given(wanted.name)) {
          reject(item.source(),
                 "a row of [[" + rows.name + "]] lacks the key " + quoted(wanted.name));
        }
      }
    }
    config.put_rows(rows.name, origin(key.source()), std::move(list));
  }

  // Two spellings of one dotted key are one key to us and two to TOML.
  void once(const std::string& full, const toml::key& key, const Config& config) {
    if (!seen_.emplace(&config, full).second)
      reject(key.source(), quoted(full) + " is given twice");
  }

  const std::string& name_;
  Layer layer_;
  std::set<std::pair<const Config*, std::string>> seen_;
};

void read_toml(std::string_view text, const std::string& name, Layer layer, Config& config) {
  TomlReader(name, layer).read(parse(text, name), "", config);
}

std::optional<ConfigValue> parse_toml_value(const std::string& text) {
  // A second line could bring a second key, and a comment would hide what follows it.
  if (text.find_first_of("\n\r#") != std::string::npos || text.size() > most_bytes)
    return std::nullopt;
  try {
    const toml::table table = toml::parse("value = " + text);
    const toml::node* node = table.get("value");
    return node && table.size() == 1 ? natural_value(*node) : std::nullopt;
  } catch (const toml::parse_error&) {
    return std::nullopt;
  }
}

}  // namespace graft
