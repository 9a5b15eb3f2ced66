#include "core/config/config.h"

#include <algorithm>
#include <utility>

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
  if (const auto [row, rest] = row_of(key, flag); row) return row->set_flag(rest, words, flag);
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
  fail_unknown(key, flag);
}

void Config::fail_unknown(const std::string& key, const std::string& where) const {
  if (schema_->find_table(key) || schema_->is_section(key)) {
    fail(ErrorKind::usage,
         where + ": " + quoted(key) + " is a table; set one of its keys: --" + key + ".KEY VALUE");
  }
  if (schema_->find_row(key)) {
    fail(ErrorKind::usage, where + ": " + quoted(key) +
                               " is a list of tables, which only a file can hold: [[" + key + "]]");
  }
  fail(ErrorKind::usage, where + ": unknown key " + quoted(key) + schema_->suggestion(key));
}

std::pair<Config*, std::string> Config::row_of(const std::string& key, const std::string& where) {
  for (auto& [name, rows] : rows_) {
    if (!key.starts_with(name + ".")) continue;
    const std::string below = key.substr(name.size() + 1), row = below.substr(0, below.find('.'));
    if (row.size() == below.size()) {
      fail(ErrorKind::usage, where + ": " + quoted(key) + " names a row of [[" + name +
                                 "]]; set one of its keys: " + key + ".KEY");
    }
    std::vector<std::string> known;
    for (std::size_t i = 0; i < rows.list.size(); ++i) {
      Config& candidate = rows.list[i];
      const bool named = candidate.schema_->find_key("name") != nullptr;
      known.push_back(named ? candidate.text("name") : std::to_string(i));
      if (known.back() == row || std::to_string(i) == row)
        return {&candidate, below.substr(row.size() + 1)};
    }
    fail(ErrorKind::usage, where + ": there is no row " + quoted(row) + " in [[" + name + "]]" +
                               did_you_mean(row, known));
  }
  return {nullptr, ""};
}

void Config::set_entry(const std::string& key, const ConfigEntry& entry) {
  const std::string& where = entry.origin.where;
  if (const auto [row, rest] = row_of(key, where); row) return row->set_entry(rest, entry);
  if (const Key* known = schema_->find_key(key)) {
    ConfigValue value = coerce(entry.value, known->type(), key, where);
    check_allowed(value, *known, where);
    return put(key, {std::move(value), entry.origin, std::nullopt});
  }
  const FreeTable* free = schema_->table_holding(key);
  if (!free) fail_unknown(key, where);
  if (!free->type) return put(key, entry);
  put(key, {coerce(entry.value, *free->type, key, where), entry.origin, std::nullopt});
}

void Config::clear_table(std::string_view name) {
  const std::string prefix = std::string(name) + ".";
  std::erase_if(entries_, [&](const auto& entry) { return entry.first.starts_with(prefix); });
}

void Config::clear_rows(std::string_view name) {
  if (const auto found = rows_.find(name); found != rows_.end()) found->second = {};
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

std::vector<Config>& Config::rows(std::string_view name) {
  return const_cast<std::vector<Config>&>(std::as_const(*this).rows(name));
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
      out += "\n[[" + name + "]]" + comment(row.origin_) + row.row_toml(name);
  }
  return out;
}

std::string Config::row_toml(const std::string& path) const {
  std::string out;
  for (const Key& key : schema_->keys) out += assignment(key.name, at(key.name));
  for (const FreeTable& free : schema_->tables) {
    for (const auto& [name, entry] : table(free.name))
      out += assignment(free.name + "." + toml_key(name), entry);
  }
  for (const auto& [name, rows] : rows_) {
    if (rows.list.empty() && rows.origin.layer != Layer::builtin)
      out += name + " = []" + comment(rows.origin);
    const std::string full = path + "." + name;
    for (const Config& row : rows.list)
      out += "[[" + full + "]]" + comment(row.origin_) + row.row_toml(full);
  }
  return out;
}

}  // namespace graft
