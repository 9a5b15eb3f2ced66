#include "core/config/schema.h"

#include <algorithm>

#include "core/base/suggest.h"

namespace graft {
namespace {

template <typename T>
const T* find_named(const std::vector<T>& list, std::string_view name) {
  const auto at =
      std::find_if(list.begin(), list.end(), [&](const T& item) { return item.name == name; });
  return at == list.end() ? nullptr : &*at;
}

bool lies_in(std::string_view name, std::string_view table) {
  return name.size() > table.size() && name.starts_with(table) && name[table.size()] == '.';
}

std::string_view parent_of(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

std::string_view last_part(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

}  // namespace

const Key* Schema::find_key(std::string_view name) const { return find_named(keys, name); }

const FreeTable* Schema::find_table(std::string_view name) const {
  return find_named(tables, name);
}

const RowTable* Schema::find_row(std::string_view name) const { return find_named(rows, name); }

const FreeTable* Schema::table_holding(std::string_view name) const {
  const auto at = std::find_if(tables.begin(), tables.end(),
                               [&](const FreeTable& table) { return lies_in(name, table.name); });
  return at == tables.end() ? nullptr : &*at;
}

bool Schema::is_section(std::string_view name) const {
  const auto below = [&](const auto& item) { return lies_in(item.name, name); };
  return std::any_of(keys.begin(), keys.end(), below) ||
         std::any_of(tables.begin(), tables.end(), below) ||
         std::any_of(rows.begin(), rows.end(), below);
}

std::vector<std::string> Schema::siblings_of(std::string_view name) const {
  const std::string_view parent = parent_of(name);
  std::vector<std::string> siblings;
  const auto collect = [&](const std::string& known) {
    if (!parent.empty() && !lies_in(known, parent)) return;
    const auto end = known.find('.', parent.empty() ? 0 : parent.size() + 1);
    const std::string sibling = known.substr(0, end);
    if (std::find(siblings.begin(), siblings.end(), sibling) == siblings.end()) {
      siblings.push_back(sibling);
    }
  };
  for (const Key& key : keys) collect(key.name);
  for (const FreeTable& table : tables) collect(table.name);
  for (const RowTable& row : rows) collect(row.name);
  return siblings;
}

std::optional<std::string> Schema::nearest_name(std::string_view name) const {
  if (const auto near = nearest(name, siblings_of(name))) return near;
  // The right name in the wrong table, or another word for it.
  const std::string_view parent = parent_of(name), last = last_part(name);
  for (const bool in_place : {true, false}) {
    for (const Key& key : keys) {
      if (in_place != (parent_of(key.name) == parent)) continue;
      if (last_part(key.name) == last || nearest(last, key.synonyms)) return key.name;
    }
  }
  return std::nullopt;
}

std::string Schema::suggestion(std::string_view name) const {
  if (const auto near = nearest_name(name)) return " (did you mean '" + *near + "'?)";
  const std::vector<std::string> siblings = siblings_of(name);
  return did_you_mean(name, siblings.empty() ? siblings_of("") : siblings);
}

}  // namespace graft
