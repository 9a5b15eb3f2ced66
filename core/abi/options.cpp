#include "core/abi/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "core/abi/full_copy.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

// Wide enough for every int64_t and every double.
using Number = long double;

std::optional<Number> number_in(const OptionValue& value) {
  if (const auto* const i = std::get_if<std::int64_t>(&value)) return static_cast<Number>(*i);
  if (const auto* const f = std::get_if<double>(&value)) return static_cast<Number>(*f);
  return std::nullopt;
}

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  // The shortest text that reads back as the same number.
  char text[32];
  std::string out(text, std::to_chars(text, text + sizeof text, value).ptr);
  if (out.find_first_of(".e") == std::string::npos) out += ".0";
  return out;
}

template <class List, class ItemText>
std::string list_text(const List& list, ItemText&& item_text) {
  std::string out = "[";
  for (const auto& item : list) out += (out.size() > 1 ? ", " : "") + item_text(item);
  return out + "]";
}

const char* type_text(std::uint32_t type) {
  switch (type) {
    case GRAFT_BOOL:
      return "true or false";
    case GRAFT_INT:
      return "an integer";
    case GRAFT_FLOAT:
      return "a number";
    case GRAFT_STRING:
      return "a string";
    case GRAFT_INT_LIST:
      return "a list of integers";
    case GRAFT_FLOAT_LIST:
      return "a list of numbers";
    default:
      return "a value of unknown type";
  }
}

std::string one_of_text(const std::vector<std::string>& values) {
  std::string out;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += i + 1 == values.size() ? " or " : ", ";
    out += "'" + values[i] + "'";
  }
  return out;
}

std::string range_text(const Option& option) {
  const bool list = option.type == GRAFT_INT_LIST || option.type == GRAFT_FLOAT_LIST;
  const std::string of = list ? " of each item" : "";
  if (option.min && option.max) {
    return (list ? std::string(", each from ") : std::string(" from ")) + to_text(*option.min) +
           " to " + to_text(*option.max);
  }
  if (option.min) return ", at least " + to_text(*option.min) + of;
  if (option.max) return ", at most " + to_text(*option.max) + of;
  return "";
}

std::optional<double> exact_double(std::int64_t value) {
  const auto converted = static_cast<double>(value);
  if (static_cast<Number>(converted) != static_cast<Number>(value)) return std::nullopt;
  return converted;
}

// `value` as the option's type, or nothing when no lossless conversion is offered.
std::optional<OptionValue> converted(const OptionValue& value, std::uint32_t type) {
  if (value.index() + 1 == type) return value;
  if (type == GRAFT_FLOAT && std::holds_alternative<std::int64_t>(value)) {
    const auto number = exact_double(std::get<std::int64_t>(value));
    return number ? std::optional<OptionValue>(*number) : std::nullopt;
  }
  if (type == GRAFT_FLOAT_LIST && std::holds_alternative<std::vector<std::int64_t>>(value)) {
    std::vector<double> list;
    for (const std::int64_t item : std::get<std::vector<std::int64_t>>(value)) {
      const auto number = exact_double(item);
      if (!number) return std::nullopt;
      list.push_back(*number);
    }
    return list;
  }
  // A list without items has no type of its own.
  if (type == GRAFT_INT_LIST && std::holds_alternative<std::vector<double>>(value) &&
      std::get<std::vector<double>>(value).empty()) {
    return std::vector<std::int64_t>{};
  }
  return std::nullopt;
}

bool number_allowed(Number number, const Option& option) {
  if (std::isnan(number)) return false;
  if (option.min && !(number >= *number_in(*option.min))) return false;
  return !option.max || number <= *number_in(*option.max);
}

bool value_allowed(const OptionValue& value, const Option& option) {
  if (const auto number = number_in(value)) return number_allowed(*number, option);
  if (const auto* const text = std::get_if<std::string>(&value)) {
    return option.one_of.empty() ||
           std::find(option.one_of.begin(), option.one_of.end(), *text) != option.one_of.end();
  }
  const auto each = [&](const auto& list) {
    return std::all_of(list.begin(), list.end(), [&](auto item) {
      return number_allowed(static_cast<Number>(item), option);
    });
  };
  if (const auto* const ints = std::get_if<std::vector<std::int64_t>>(&value)) return each(*ints);
  if (const auto* const floats = std::get_if<std::vector<double>>(&value)) return each(*floats);
  return true;
}

// A plugin's graft_value copied out; nothing when its type is unknown or its pointer missing.
std::optional<OptionValue> owned(const graft_value& value) {
  switch (value.type) {
    case GRAFT_BOOL:
      return value.u.i != 0;
    case GRAFT_INT:
      return value.u.i;
    case GRAFT_FLOAT:
      return value.u.f;
    case GRAFT_STRING:
      if (value.u.s == nullptr) return std::nullopt;
      return std::string(value.u.s);
    case GRAFT_INT_LIST:
      if (value.u.il == nullptr && value.count > 0) return std::nullopt;
      return std::vector<std::int64_t>(value.u.il, value.u.il + value.count);
    case GRAFT_FLOAT_LIST:
      if (value.u.fl == nullptr && value.count > 0) return std::nullopt;
      return std::vector<double>(value.u.fl, value.u.fl + value.count);
    default:
      return std::nullopt;
  }
}

std::optional<OptionValue> owned_bound(const graft_value& bound, const std::string& what) {
  if (bound.type == 0) return std::nullopt;
  const auto value = owned(bound);
  if (!value || !number_in(*value)) {
    fail(ErrorKind::plugin, what + " has a bound that is no number");
  }
  return value;
}

Option owned_option(const graft_option& given, const std::string& what) {
  Option option;
  option.key = given.key;
  option.doc = text_or_empty(given.doc);
  option.type = given.def.type;
  option.flags = given.flags;
  option.min = owned_bound(given.min, what);
  option.max = owned_bound(given.max, what);
  if (given.def.type == GRAFT_STRING && given.one_of != nullptr) {
    for (const char* const* text = given.one_of; *text != nullptr; ++text) {
      option.one_of.emplace_back(*text);
    }
  }
  const auto value = owned(given.def);
  if (!value && !(given.def.type == GRAFT_STRING && option.required())) {
    fail(ErrorKind::plugin,
         what + " has no usable default (type " + std::to_string(given.def.type) + ")");
  }
  option.default_value = value.value_or(std::string());
  if (!option.required() && !value_allowed(option.default_value, option)) {
    fail(ErrorKind::plugin, what + " has the default " + to_text(option.default_value) +
                                ", but takes " + option.describe());
  }
  return option;
}

graft_value borrowed(const OptionValue& value) {
  graft_value out{};
  out.type = static_cast<std::uint32_t>(value.index()) + 1;
  out.count = 1;
  if (const auto* const b = std::get_if<bool>(&value)) out.u.i = *b ? 1 : 0;
  if (const auto* const i = std::get_if<std::int64_t>(&value)) out.u.i = *i;
  if (const auto* const f = std::get_if<double>(&value)) out.u.f = *f;
  if (const auto* const s = std::get_if<std::string>(&value)) out.u.s = s->c_str();
  if (const auto* const ints = std::get_if<std::vector<std::int64_t>>(&value)) {
    out.count = static_cast<std::uint32_t>(ints->size());
    out.u.il = ints->data();
  }
  if (const auto* const floats = std::get_if<std::vector<double>>(&value)) {
    out.count = static_cast<std::uint32_t>(floats->size());
    out.u.fl = floats->data();
  }
  return out;
}

}  // namespace

std::string to_text(const OptionValue& value) {
  if (const auto* const b = std::get_if<bool>(&value)) return *b ? "true" : "false";
  if (const auto* const i = std::get_if<std::int64_t>(&value)) return std::to_string(*i);
  if (const auto* const f = std::get_if<double>(&value)) return number_text(*f);
  if (const auto* const s = std::get_if<std::string>(&value)) return '"' + printable(*s) + '"';
  if (const auto* const ints = std::get_if<std::vector<std::int64_t>>(&value)) {
    return list_text(*ints, [](std::int64_t item) { return std::to_string(item); });
  }
  return list_text(std::get<std::vector<double>>(value), number_text);
}

std::string Option::describe() const {
  if (!one_of.empty()) return one_of_text(one_of);
  return type_text(type) + range_text(*this);
}

OptionSchema::OptionSchema(const graft_desc& desc, const std::string& label) {
  if (desc.n_options > 0 && desc.options == nullptr) {
    fail(ErrorKind::plugin, label + " declares " + std::to_string(desc.n_options) +
                                " options, but their list is NULL");
  }
  for (std::uint32_t i = 0; i < desc.n_options; ++i) {
    const std::string number = label + ", option " + std::to_string(i);
    if (desc.options[i] == nullptr) fail(ErrorKind::plugin, number + " is NULL");
    const graft_option given = full_copy(desc.options[i]);
    if (given.key == nullptr || *given.key == '\0') fail(ErrorKind::plugin, number + " has no key");
    const std::string what = label + ", option " + quoted(given.key);
    if (find(given.key) != nullptr) fail(ErrorKind::plugin, what + " is declared twice");
    options_.push_back(owned_option(given, what));
  }
}

const Option* OptionSchema::find(std::string_view key) const {
  const auto found = std::find_if(options_.begin(), options_.end(),
                                  [&](const Option& option) { return option.key == key; });
  return found == options_.end() ? nullptr : &*found;
}

std::vector<std::string> OptionSchema::keys() const {
  std::vector<std::string> keys;
  for (const Option& option : options_) keys.push_back(option.key);
  return keys;
}

ResolvedOptions::ResolvedOptions(const OptionSchema& schema,
                                 const std::map<std::string, OptionValue>& given,
                                 const std::string& label) {
  for (const auto& [key, value] : given) {
    const Option* const option = schema.find(key);
    if (option == nullptr) {
      const std::string known =
          schema.options().empty() ? "; it has no options" : did_you_mean(key, schema.keys());
      throw OptionError(key, label + " has no option " + quoted(key) + known);
    }
    const auto fitting = converted(value, option->type);
    if (!fitting || !value_allowed(*fitting, *option)) {
      std::string hint;
      if (const auto* const text = std::get_if<std::string>(&value)) {
        if (const auto near = nearest(*text, option->one_of)) {
          hint = " (did you mean " + quoted(*near) + "?)";
        }
      }
      throw OptionError(key, label + ", option " + quoted(key) + ": expected " +
                                 option->describe() + ", got " + to_text(value) + hint);
    }
    values_.emplace(key, *fitting);
  }
  for (const Option& option : schema.options()) {
    if (option.required() && !values_.contains(option.key)) {
      throw OptionError(option.key, label + " needs the option " + quoted(option.key) + ": " +
                                        option.describe() +
                                        (option.doc.empty() ? "" : " (" + option.doc + ")"));
    }
    values_.emplace(option.key, option.default_value);
  }
}

const OptionValue& ResolvedOptions::at(const std::string& key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    fail(ErrorKind::internal, "option " + quoted(key) + " was read, but is in no schema");
  }
  return found->second;
}

const graft_config* ResolvedOptions::c_config() const {
  keys_.clear();
  c_values_.clear();
  for (const auto& [key, value] : values_) {
    keys_.push_back(key.c_str());
    c_values_.push_back(borrowed(value));
  }
  config_ = {sizeof config_, static_cast<std::uint32_t>(keys_.size()), keys_.data(),
             c_values_.data()};
  return &config_;
}

}  // namespace graft
