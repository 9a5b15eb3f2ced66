#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/base/error.h"
#include "graft/graft.h"

namespace graft {

// The value of a plugin's option. The alternatives stand in the order of GRAFT_BOOL, GRAFT_INT, ...
using OptionValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>,
                                 std::vector<double>>;

// `true`, `1.5`, `"text"`, `[1, 2]`: a value as TOML writes it.
std::string to_text(const OptionValue& value);

// One option that a component declares.
struct Option {
  std::string key;  // dotted, below the component's table
  std::string doc;
  std::uint32_t type = GRAFT_BOOL;
  OptionValue default_value;  // means nothing when required()
  std::optional<OptionValue> min,
      max;                          // inclusive; bool-, int- or float-typed. Of a list: each item
  std::vector<std::string> one_of;  // legal strings; empty = free
  std::uint32_t flags = 0;          // GRAFT_OPT_*

  bool required() const { return (flags & GRAFT_OPT_REQUIRED) != 0; }
  bool deprecated() const { return (flags & GRAFT_OPT_DEPRECATED) != 0; }
  // Changes parameter shapes: a checkpoint's value may not differ.
  bool shapes() const { return (flags & GRAFT_OPT_SHAPES) != 0; }
  // "an integer from 1 to 4096", "'random', 'zero' or 'small'", "a number, at least 0".
  std::string describe() const;
};

// The options of a component, in its own order.
class OptionSchema {
 public:
  OptionSchema() = default;
  // Copies everything. Error(plugin) when the declaration itself is wrong: no key, a key twice, a
  // type we do not know, a default that its own range or list forbids.
  OptionSchema(const graft_desc& desc, const std::string& label);

  const std::vector<Option>& options() const { return options_; }
  const Option* find(std::string_view key) const;
  std::vector<std::string> keys() const;

 private:
  std::vector<Option> options_;
};

// A value that an option does not take. `key` lets the caller say where it was written.
class OptionError : public Error {
 public:
  OptionError(std::string key, const std::string& message)
      : Error(ErrorKind::usage, message), key_(std::move(key)) {}
  const std::string& key() const noexcept { return key_; }

 private:
  std::string key_;
};

// Values for every option of a schema: the given ones, checked, and defaults for the rest.
class ResolvedOptions {
 public:
  ResolvedOptions() = default;
  // An integer is taken where a float is wanted, and a list of them for a list of floats. Throws
  // OptionError naming `label` ("mixer 'gdn'"), key, what it takes and what it got, and the nearest
  // key for an unknown one.
  ResolvedOptions(const OptionSchema& schema, const std::map<std::string, OptionValue>& given,
                  const std::string& label);

  const std::map<std::string, OptionValue>& values() const { return values_; }
  // Throws Error(internal) for a key the schema does not have.
  const OptionValue& at(const std::string& key) const;

  // For the ABI; valid while this object lives and is not changed.
  const graft_config* c_config() const;

 private:
  std::map<std::string, OptionValue> values_;
  mutable std::vector<const char*> keys_;
  mutable std::vector<graft_value> c_values_;
  mutable graft_config config_{};
};

}  // namespace graft
