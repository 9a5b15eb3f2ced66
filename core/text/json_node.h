#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace graft::text {

// A place in a JSON file, for reading it with errors that name file and key. Refers to the JSON
// value and the file name, which must outlive it.
class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, const std::string& file) : value_(&value), file_(&file) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& file() const { return *file_; }
  // "pre_tokenizer.pretokenizers[1].pattern"; empty for the whole file.
  const std::string& path() const { return path_; }

  // Throws Error(input): "FILE: PATH: message".
  [[noreturn]] void fail(const std::string& message) const;

  bool is_null() const;
  // The member `key`; an error when it is absent (null is not absent).
  JsonNode at(std::string_view key) const;
  // The member `key`, or nothing when it is absent or null.
  std::optional<JsonNode> find(std::string_view key) const;
  std::vector<JsonNode> elements() const;

  const std::string& string() const;
  bool boolean() const;
  std::int64_t integer(std::int64_t minimum, std::int64_t maximum) const;

  // The string under "type".
  const std::string& type() const { return at("type").string(); }
  // Fails with "type 'X' is not supported; supported: ...".
  [[noreturn]] void fail_unsupported_type(std::string_view supported) const;

  const nlohmann::json& object() const;
  const nlohmann::json& array() const;
  // A value inside of this one: a member, an element.
  JsonNode child(const nlohmann::json& value, std::string_view key) const;
  JsonNode child(const nlohmann::json& value, std::size_t index) const;

 private:
  [[noreturn]] void fail_expected(std::string_view what) const;

  const nlohmann::json* value_;
  const std::string* file_;
  std::string path_;
};

}  // namespace graft::text
