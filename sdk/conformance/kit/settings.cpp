// graft-validate.toml.
//
//   timeout = 120                                   # seconds, of one test
//   partners = ["../taylor.so"]                     # for the matrix; relative to this file
//   [options.gdn]                                   # a component's, over its defaults
//   rope = true
//   [skip]
//   "gdn:gradient.finite_differences" = "no float64 kernel yet"
//   [tolerance]
//   "dtype.bfloat16" = { factor = 2, reason = "sums in bfloat16" }
#define TOML_ENABLE_FORMATTERS 1
#include <toml++/toml.h>

#include <sstream>
#include <stdexcept>

#include "graft/conformance/conformance.hpp"
#include "graft/status.hpp"

namespace graft::conformance {
namespace {

class Reader {
 public:
  Reader(std::filesystem::path file, Settings& settings)
      : file_(std::move(file)), settings_(settings) {}

  void read() {
    toml::table table;
    try {
      table = toml::parse_file(file_.string());
    } catch (const toml::parse_error& e) {
      throw std::runtime_error(sdk::cat(at(e.source()), e.description()));
    }
    for (const auto& [key, node] : table) entry(key.str(), node);
  }

 private:
  void entry(std::string_view key, const toml::node& node) {
    if (key == "timeout") {
      settings_.timeout =
          std::chrono::milliseconds(static_cast<std::int64_t>(1000 * number(node, key)));
    } else if (key == "seed") {
      settings_.seed = static_cast<std::uint64_t>(number(node, key));
    } else if (key == "partners") {
      if (!node.is_array()) wrong(node, key, "a list of files");
      for (const toml::node& item : *node.as_array())
        settings_.partners.push_back(file_.parent_path() / text(item, key));
    } else if (key == "skip") {
      for (const auto& [test, reason] : section(node, key))
        settings_.skips[std::string(test.str())] = text(reason, test.str());
    } else if (key == "tolerance") {
      for (const auto& [test, value] : section(node, key)) tolerance(test.str(), value);
    } else if (key == "options") {
      for (const auto& [component, values] : section(node, key)) options(component.str(), values);
    } else {
      throw std::runtime_error(
          sdk::cat(at(node.source()), "there is no '", key,
                   "'; known: timeout, seed, partners, skip, tolerance, options"));
    }
  }

  void tolerance(std::string_view test, const toml::node& node) {
    const toml::table& table = section(node, test);
    const toml::node* const factor = table.get("factor");
    const toml::node* const reason = table.get("reason");
    if (factor == nullptr || reason == nullptr)
      wrong(node, test, "{ factor = ..., reason = \"...\" }");
    settings_.tolerances[std::string(test)] = {number(*factor, test), text(*reason, test)};
  }

  void options(std::string_view component, const toml::node& node) {
    for (const auto& [key, value] : section(node, component)) {
      std::ostringstream out;
      if (value.is_string()) {
        out << value.as_string()->get();
      } else {
        value.visit([&](const auto& v) { out << v; });
      }
      settings_.options[std::string(component)][std::string(key.str())] = out.str();
    }
  }

  std::string at(const toml::source_region& place) const {
    return sdk::cat(file_.string(), ":", place.begin.line, ":", place.begin.column, ": ");
  }
  [[noreturn]] void wrong(const toml::node& node, std::string_view key,
                          const char* expected) const {
    throw std::runtime_error(sdk::cat(at(node.source()), "'", key, "': expected ", expected));
  }
  const toml::table& section(const toml::node& node, std::string_view key) const {
    if (!node.is_table()) wrong(node, key, "a table");
    return *node.as_table();
  }
  std::string text(const toml::node& node, std::string_view key) const {
    const auto value = node.value<std::string>();
    if (!value || value->empty()) wrong(node, key, "text that is not empty");
    return *value;
  }
  double number(const toml::node& node, std::string_view key) const {
    const auto value = node.value<double>();
    if (!value || !(*value > 0)) wrong(node, key, "a number above 0");
    return *value;
  }

  std::filesystem::path file_;
  Settings& settings_;
};

}  // namespace

void Settings::read(const std::filesystem::path& file) { Reader(file, *this).read(); }

}  // namespace graft::conformance
