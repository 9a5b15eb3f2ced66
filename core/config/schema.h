#pragma once

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/value.h"

namespace graft {

// One key of the configuration: what may stand there and what it means.
struct Key {
  std::string name;  // dotted: "calibrate.lr"
  ConfigValue default_value;
  std::string doc;  // one line, for --help
  // Inclusive; for numbers, and for each number of a list.
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  std::vector<std::string> one_of{};  // for strings, and for each string of a list; empty = free
  std::string flag{};                 // a shorter flag beside --<name>: "--mixer" for mixer.name
  std::vector<std::string>
      synonyms{};  // what people write for the last part of the name: suggested, never taken
  std::string
      placeholder{};  // what help calls the value, for one word more telling than its type: "DIR"
  bool required = false;  // must be given; the default means nothing

  // The type is that of the default. A list of strings also takes one string.
  ValueType type() const { return type_of(default_value); }
};

// A table whose keys are not known here: a plugin's options, learning rates by role. Nested tables
// in it become dotted keys.
struct FreeTable {
  std::string name;
  std::string doc;
  std::optional<ValueType>
      type{};  // what each value must be; none = whatever the owner of the keys says
};

struct RowTable;

// Everything a configuration may hold. Names are unique over the three lists.
struct Schema {
  std::vector<Key> keys;
  std::vector<FreeTable> tables;
  std::vector<RowTable> rows;

  const Key* find_key(std::string_view name) const;
  const FreeTable* find_table(std::string_view name) const;
  const RowTable* find_row(std::string_view name) const;
  // The free table a dotted name lies in ("mixer.options.silu_v" -> mixer.options), or null.
  const FreeTable* table_holding(std::string_view name) const;
  // Is `name` a table above known keys ("calibrate")?
  bool is_section(std::string_view name) const;
  // The key or table that an unknown name most likely means.
  std::optional<std::string> nearest_name(std::string_view name) const;
  // What to say behind the name of an unknown key: " (did you mean 'calibrate.lr'?)" or "; known:
  // ...".
  std::string suggestion(std::string_view name) const;

 private:
  // What may stand beside `name`: the keys of its table, and the tables in it.
  std::vector<std::string> siblings_of(std::string_view name) const;
};

// An array of tables, each of its rows a small configuration of its own: [[baseline]].
struct RowTable {
  std::string name;
  std::string doc;
  Schema row;
};

}  // namespace graft
