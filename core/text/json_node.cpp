#include "core/text/json_node.h"

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft::text {

namespace {

std::string describe(const nlohmann::json& value) {
  if (value.is_string()) return "the string " + quoted(value.get_ref<const std::string&>());
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  return value.dump();
}

}  // namespace

void JsonNode::fail(const std::string& message) const {
  graft::fail(ErrorKind::input,
              *file_ + ": " + (path_.empty() ? std::string() : path_ + ": ") + message);
}

void JsonNode::fail_expected(std::string_view what) const {
  fail("expected " + std::string(what) + ", got " + describe(*value_));
}

void JsonNode::fail_unsupported_type(std::string_view supported) const {
  fail("type " + quoted(type()) + " is not supported; supported: " + std::string(supported));
}

bool JsonNode::is_null() const { return value_->is_null(); }

JsonNode JsonNode::child(const nlohmann::json& value, std::string_view key) const {
  JsonNode node(value, *file_);
  node.path_ = path_;
  if (!path_.empty()) node.path_ += '.';
  node.path_ += key;
  return node;
}

JsonNode JsonNode::child(const nlohmann::json& value, std::size_t index) const {
  JsonNode node(value, *file_);
  node.path_ = path_;
  node.path_ += '[';
  node.path_ += std::to_string(index);
  node.path_ += ']';
  return node;
}

JsonNode JsonNode::at(std::string_view key) const {
  const nlohmann::json& members = object();
  const auto member = members.find(key);
  if (member == members.end()) fail("the key '" + std::string(key) + "' is missing");
  return child(*member, key);
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  const nlohmann::json& members = object();
  const auto member = members.find(key);
  if (member == members.end() || member->is_null()) return std::nullopt;
  return child(*member, key);
}

std::vector<JsonNode> JsonNode::elements() const {
  std::vector<JsonNode> nodes;
  for (const nlohmann::json& element : array()) {
    nodes.push_back(child(element, nodes.size()));
  }
  return nodes;
}

const nlohmann::json& JsonNode::object() const {
  if (!value_->is_object()) fail_expected("an object");
  return *value_;
}

const nlohmann::json& JsonNode::array() const {
  if (!value_->is_array()) fail_expected("an array");
  return *value_;
}

const std::string& JsonNode::string() const {
  if (!value_->is_string()) fail_expected("a string");
  return value_->get_ref<const std::string&>();
}

bool JsonNode::boolean() const {
  if (!value_->is_boolean()) fail_expected("true or false");
  return value_->get<bool>();
}

std::int64_t JsonNode::integer(std::int64_t minimum, std::int64_t maximum) const {
  const auto fits = [&] {
    if (!value_->is_number_integer()) return false;
    if (value_->is_number_unsigned() && value_->get<std::uint64_t>() > INT64_MAX) return false;
    const auto number = value_->get<std::int64_t>();
    return number >= minimum && number <= maximum;
  };
  if (!fits()) {
    fail_expected("an integer from " + std::to_string(minimum) + " to " + std::to_string(maximum));
  }
  return value_->get<std::int64_t>();
}

}  // namespace graft::text
