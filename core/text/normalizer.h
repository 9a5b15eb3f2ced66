#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/text/json_node.h"
#include "core/text/regex.h"

namespace graft::text {

// The "normalizer" of tokenizer.json: what happens to text before it is split. Supported: NFC, NFD,
// NFKC, NFKD, Prepend, Replace, and Sequence of them.
class Normalizer {
 public:
  class Step {
   public:
    virtual ~Step() = default;
    // `text` is well-formed UTF-8 and not empty.
    virtual void apply(std::string& text, Regex::Workspace& workspace) const = 0;
  };

  // Leaves text as it is.
  Normalizer() = default;
  explicit Normalizer(const JsonNode& node) { add(node); }

  bool is_identity() const { return steps_.empty(); }
  std::string apply(std::string_view text, Regex::Workspace& workspace) const;

 private:
  void add(const JsonNode& node);

  std::vector<std::unique_ptr<Step>> steps_;
};

}  // namespace graft::text
