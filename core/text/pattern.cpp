#include "core/text/pattern.h"

#include "core/base/error.h"

namespace graft::text {

Regex regex_at(const JsonNode& node) {
  const std::string& expression = node.string();
  try {
    return Regex(expression);
  } catch (const Error& error) {
    node.fail(error.what());
  }
}

Pattern::Pattern(const JsonNode& node) {
  if (const auto literal = node.find("String")) {
    literal_ = literal->string();
  } else if (const auto expression = node.find("Regex")) {
    regex_ = regex_at(*expression);
  } else {
    node.fail("expected {\"String\": ...} or {\"Regex\": ...}");
  }
}

}  // namespace graft::text
