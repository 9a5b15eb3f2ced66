#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/config/schema.h"
#include "core/config/value.h"

namespace graft {

// Where a value can come from, weakest first.
enum class Layer : int { builtin, recipe, file, flag };

struct Origin {
  Layer layer = Layer::builtin;
  std::string where = "default";  // "default" | "FILE:LINE:COLUMN" | "--flag"
};

struct ConfigEntry {
  ConfigValue value;
  Origin origin;
  // What was typed, for a value of a free table that came from a flag: the type there is a guess
  // ("3" may be meant as a string), and the owner of the key can settle it.
  std::optional<std::string> text;
};

// One resolved tree: every key of the schema has a value and an origin. Layers may be added in any
// order; the stronger one stays, and of two equally strong ones the later.
//
// Whatever is wrong in a file or flag is an Error(usage) whose message starts with FILE:LINE:COLUMN
// or the flag, and names the key, what was expected and got, and the nearest known key.
class Config {
 public:
  // The schema is kept by reference and must live as long.
  explicit Config(const Schema& schema);

  void read_file(const std::filesystem::path& path, Layer layer);
  // `name` stands in messages where a file's name would.
  void read_text(std::string_view toml, const std::string& name, Layer layer);
  // A flag that sets `key` from the words behind it: one word, but for lists any number, or one
  // TOML array. `flag` is the flag as it was typed. A key of a row that was read already is
  // TABLE.ROW.KEY, where ROW is the row's name, or its place counted from 0.
  void set_flag(const std::string& key, const std::vector<std::string>& words,
                const std::string& flag);
  // An entry that stands elsewhere in the configuration (a scale's), as if it had been written at
  // `key`; TABLE.ROW.KEY as for flags.
  void set_entry(const std::string& key, const ConfigEntry& entry);
  // Forgets what a free table holds.
  void clear_table(std::string_view name);
  // Forgets the rows of a table.
  void clear_rows(std::string_view name);
  // A key of a free table that nobody gave: a plugin's default. Does nothing where there is a
  // value.
  void set_default(const std::string& key, const ConfigValue& value, const std::string& where);

  // The value of a key of the schema; T is the alternative of its ConfigValue (a bug otherwise).
  template <typename T>
  const T& get(std::string_view key) const {
    const T* value = std::get_if<T>(&at(key).value);
    if (!value)
      fail(ErrorKind::internal,
           "configuration key '" + std::string(key) + "' read as another type");
    return *value;
  }
  const std::string& text(std::string_view key) const { return get<std::string>(key); }
  const ConfigEntry& at(std::string_view key) const;
  bool given(std::string_view key) const { return at(key).origin.layer != Layer::builtin; }
  // The entries of a free table by their (dotted) key below it.
  std::map<std::string, ConfigEntry> table(std::string_view name) const;
  const std::vector<Config>& rows(std::string_view name) const;
  std::vector<Config>& rows(std::string_view name);
  // Where a row started, for messages.
  const Origin& origin() const { return origin_; }
  const Schema& schema() const { return *schema_; }

  // Every value as TOML, each with a comment that says where it came from. Read back as a file, it
  // gives the same configuration.
  std::string to_toml() const;

 private:
  struct Rows {
    Origin origin;
    std::vector<Config> list;
  };
  friend class TomlReader;

  void put(const std::string& key, ConfigEntry entry);
  void put_rows(const std::string& name, Origin origin, std::vector<Config> list);
  // The row that TABLE.ROW.KEY lies in, and KEY; null when no row table is called TABLE.
  std::pair<Config*, std::string> row_of(const std::string& key, const std::string& where);
  [[noreturn]] void fail_unknown(const std::string& key, const std::string& where) const;
  // `path`: the names of the row tables above, dotted.
  std::string row_toml(const std::string& path) const;

  const Schema* schema_;
  Origin origin_;
  std::map<std::string, ConfigEntry, std::less<>> entries_;
  std::map<std::string, Rows, std::less<>> rows_;
};

}  // namespace graft
