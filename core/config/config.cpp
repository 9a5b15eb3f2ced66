#include "core/config/config.h"

#include <algorithm>

#include "core/base/file.h"
#include "core/base/suggest.h"
#include "core/config/coerce.h"
#include "core/config/toml_reader.h"

namespace graft {
namespace {

std::string section_of(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot == std::string_view::npos ? "" : std::string(name.substr(0, dot));
}

// The tables of the printed file: those of one top-level table stay together, in the schema's
// order.
std::vector<std::string> sections(const Schema& schema) {
  std::vector<std::string> all, tops, ordered;
  const auto add = [](std::vector<std::string>& list, std::string name) {
    if (std::find(list.begin(), list.end(), name) == list.end()) list.push_back(std::move(name));
  };
  for (const Key& key : schema.keys) {
    if (const std::string section = section_of(key.name); !section.empty()) add(all, section);
  }
  for (const FreeTable& table : schema.tables) add(all, table.name);
  for (const std::string& section : all) add(tops, section.substr(0, section.find('.')));
  for (const std::string& top : tops) {
    for (const std::string& section : all) {
      if (section.substr(0, section.find('.')) == top) ordered.push_back(section);
    }
  }
  return ordered;
}

// A comment may hold neither control characters nor anything but UTF-8.
std::string comment(const Origin& origin) {
  std::string text = quoted(origin.where);
  return "  # " + text.substr(1, text.size() - 2) + "\n";
}

std::string assignment(const std::string& label, const ConfigEntry& entry) {
  return label + " = " + to_toml(entry.value) + comment(entry.origin);
}

}  // namespace

Config::Config(const Schema& schema) : schema_(&schema) {
  for (const Key& key : schema.keys) entries_[key.name] = {key.default_value, {}, std::nullopt};
  for (const RowTable& rows : schema.rows) rows_[rows.name] = {};
}

void Config::read_file(const std::filesystem::path& path, Layer layer) {
  std::string text;
  try {
    text = graft::read_text(path);
  } catch (const Error& error) {
    fail(ErrorKind::usage, std::string("configuration: ") + error.what());
  }
  read_toml(text, path.string(), layer, *this);
}

void Config::read_text(std::string_view toml, const std::string& name, Layer layer) {
  read_toml(toml, name, layer, *this);
}

void Config::set_flag(const std::string& key, const std::vector<std::string>& words,
                      const std::string& flag) {
  const Origin origin{Layer::flag, flag};
  if (const Key* known = schema_->find_key(key)) {
    ConfigValue value = parse_words(words, known->type(), key, flag);
    check_allowed(value, *known, flag);
    return put(key, {std::move(value), origin, std::nullopt});
  }
  if (const FreeTable* free = schema_->table_holding(key)) {
    if (free->type)
      return put(key, {parse_words(words, *free->type, key, flag), origin, std::nullopt});
    ConfigValue text = parse_words(words, ValueType::string, key, flag);
    const std::string& word = words.front();
    return put(key, {parse_toml_value(word).value_or(std::move(text)), origin, word});
  }
  if (schema_->find_table(key) || schema_->is_section(key)) {
    fail(ErrorKind::usage,
         flag + ": " + quoted(key) + " is a table; set one of its keys: --" + key + ".KEY VALUE");
  }
  if (schema_->find_row(key)) {
    fail(ErrorKind::usage, flag + ": " + quoted(key) +
                               " is a list of tables, which only a file can hold: [[" + key + "]]");
  }
  fail(ErrorKind::usage, flag + ": unknown key " + quoted(key) + schema_->suggestion(key));
}

void Config::set_default(const std::string& key, const ConfigValue& value,
                         const std::string& where) {
  entries_.try_emplace(key, ConfigEntry{value, {Layer::builtin, where}, std::nullopt});
}

const ConfigEntry& Config::at(std::string_view key) const {
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) fail(ErrorKind::internal, "no configuration key " + quoted(key));
  return entry->second;
}

std::map<std::string, ConfigEntry> Config::table(std::string_view name) const {
  const std::string prefix = std::string(name) + ".";
  std::map<std::string, ConfigEntry> found;
  for (auto at = entries_.lower_bound(prefix);
       at != entries_.end() && at->first.starts_with(prefix); ++at) {
    found.emplace(at->first.substr(prefix.size()), at->second);
  }
  return found;
}

const std::vector<Config>& Config::rows(std::string_view name) const {
  const auto found = rows_.find(name);
  if (found == rows_.end()) fail(ErrorKind::internal, "no configuration rows " + quoted(name));
  return found->second.list;
}

void Config::put(const std::string& key, ConfigEntry entry) {
  const auto [at, fresh] = entries_.try_emplace(key, entry);
  if (!fresh && entry.origin.layer >= at->second.origin.layer) at->second = std::move(entry);
}

void Config::put_rows(const std::string& name, Origin origin, std::vector<Config> list) {
  Rows& rows = rows_.at(name);
  if (origin.layer >= rows.origin.layer) rows = {std::move(origin), std::move(list)};
}

std::string Config::to_toml() const {
  std::string out;
  for (const Key& key : schema_->keys) {
    if (section_of(key.name).empty()) out += assignment(key.name, at(key.name));
  }
  for (const auto& [name, rows] : rows_) {
    if (rows.list.empty() && rows.origin.layer != Layer::builtin)
      out += name + " = []" + comment(rows.origin);
  }
  for (const std::string& section : sections(*schema_)) {
    std::string body;
    for (const Key& key : schema_->keys) {
      if (section_of(key.name) == section)
        body += assignment(key.name.substr(section.size() + 1), at(key.name));
    }
    if (schema_->find_table(section)) {
      for (const auto& [name, entry] : table(section)) body += assignment(toml_key(name), entry);
    }
    if (!body.empty()) out += "\n[" + section + "]\n" + body;
  }
  for (const auto& [name, rows] : rows_) {
    for (const Config& row : rows.list)
      out += "\n[[" + name + "]]" + comment(row.origin_) + row.row_toml();
  }
  return out;
}

std::string Config::row_toml() const {
  std::string out;
  for (const Key& key : schema_->keys) out += assignment(key.name, at(key.name));
  for (const FreeTable& free : schema_->tables) {
    for (const auto& [name, entry] : table(free.name))
      out += assignment(free.name + "." + toml_key(name), entry);
  }
  return out;
}

}  // namespace graft
