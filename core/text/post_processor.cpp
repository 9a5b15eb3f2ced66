#include "core/text/post_processor.h"

#include "core/text/bpe.h"

namespace graft::text {

void PostProcessor::add(const JsonNode& node) {
  const std::string& type = node.type();
  if (type == "Sequence") {
    for (const JsonNode& element : node.at("processors").elements()) add(element);
  } else if (type == "TemplateProcessing") {
    add_template(node);
  } else if (type != "ByteLevel") {
    node.fail_unsupported_type("ByteLevel, TemplateProcessing, Sequence");
  }
}

// "single" is a list of {"SpecialToken": {"id": NAME}} and one {"Sequence": {"id": "A"}};
// "special_tokens" gives the ids of each NAME.
void PostProcessor::add_template(const JsonNode& node) {
  Template made;
  bool text_seen = false;
  for (const JsonNode& piece : node.at("single").elements()) {
    if (const auto sequence = piece.find("Sequence")) {
      if (text_seen || sequence->at("id").string() != "A") {
        sequence->fail("a template for one text has the sequence A, once");
      }
      text_seen = true;
      continue;
    }
    const JsonNode name = piece.at("SpecialToken").at("id");
    const JsonNode token = node.at("special_tokens").at(name.string());
    for (const JsonNode& id : token.at("ids").elements()) {
      (text_seen ? made.behind : made.before)
          .push_back(static_cast<std::int32_t>(id.integer(0, BpeModel::kLargestId)));
    }
  }
  if (!text_seen) node.at("single").fail("it lacks the sequence A, the text itself");
  templates_.push_back(std::move(made));
}

void PostProcessor::apply(std::vector<std::int32_t>& ids) const {
  for (const Template& made : templates_) {
    ids.insert(ids.begin(), made.before.begin(), made.before.end());
    ids.insert(ids.end(), made.behind.begin(), made.behind.end());
  }
}

}  // namespace graft::text
