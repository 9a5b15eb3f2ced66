#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/text/json_node.h"
#include "core/text/regex.h"

namespace graft::text {

// The "pre_tokenizer" of tokenizer.json: how text is cut into words, within which alone the model
// merges. Supported: ByteLevel, Digits, Split, and Sequence of them.
class PreTokenizer {
 public:
  // Receives words in order. A word is not empty and valid only during the call.
  class Sink {
   public:
    virtual void word(std::string_view word) = 0;

   protected:
    ~Sink() = default;
  };

  // What one step needs while it runs.
  struct Buffers {
    std::string prefixed;
    std::string spelled;
  };

  class Step {
   public:
    virtual ~Step() = default;
    virtual void split(std::string_view piece, Buffers& buffers, Regex::Workspace& workspace,
                       Sink& next) const = 0;
  };

  // Leaves text in one piece.
  PreTokenizer() = default;
  explicit PreTokenizer(const JsonNode& node) { add(node); }

  // Cuts `text` (well-formed UTF-8). Words stream through the steps: beyond the buffers, the memory
  // in use does not grow with the text.
  void split(std::string_view text, Regex::Workspace& workspace, Sink& out) const;

  // Whether every word is spelled in the byte-level alphabet.
  bool is_byte_level() const { return is_byte_level_; }

 private:
  class Link;
  void add(const JsonNode& node);

  std::vector<std::unique_ptr<Step>> steps_;
  bool is_byte_level_ = false;
};

}  // namespace graft::text
