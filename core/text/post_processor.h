#pragma once

#include <cstdint>
#include <vector>

#include "core/text/json_node.h"

namespace graft::text {

// The "post_processor" of tokenizer.json, for one text at a time: what is put around its ids when
// special tokens are asked for. Supported: TemplateProcessing, ByteLevel (concerns offsets alone,
// so does nothing here), and Sequence of them.
class PostProcessor {
 public:
  PostProcessor() = default;
  explicit PostProcessor(const JsonNode& node) { add(node); }

  void apply(std::vector<std::int32_t>& ids) const;

 private:
  struct Template {
    // Ids before the text, and behind it.
    std::vector<std::int32_t> before;
    std::vector<std::int32_t> behind;
  };
  void add(const JsonNode& node);
  void add_template(const JsonNode& node);

  std::vector<Template> templates_;
};

}  // namespace graft::text
