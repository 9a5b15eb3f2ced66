#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/text/json_node.h"

namespace graft::text {

// The "decoder" of tokenizer.json: how the spellings of tokens become text. Supported: ByteLevel,
// Replace, ByteFallback, Fuse, Strip, and Sequence of them; without a decoder tokens are joined by
// spaces.
//
// `tokenizers` decodes a whole list of tokens; here the same steps take one token at a time, each
// holding back what later tokens can still change, so that streamed text equals the whole.
class Decoder {
 public:
  class Sink {
   public:
    virtual void token(std::string_view token) = 0;

   protected:
    ~Sink() = default;
  };

  // One step at work on one stream of tokens.
  class Step {
   public:
    virtual ~Step() = default;
    virtual void token(std::string_view token, Sink& next) = 0;
    // The stream ends: passes on what was held back.
    virtual void finish(Sink& next) = 0;
  };

  // Makes a Step for each stream.
  class Factory {
   public:
    virtual ~Factory() = default;
    virtual std::unique_ptr<Step> make() const = 0;
  };

  // A "decoder" of null.
  Decoder();
  explicit Decoder(const JsonNode& node);

  std::vector<std::unique_ptr<Step>> start() const;

 private:
  void add(const JsonNode& node);

  std::vector<std::unique_ptr<Factory>> factories_;
  bool fused_ =
      false;  // while reading: whether the steps so far yield one token for a whole stream
};

// The steps of a Decoder at work on one stream.
class DecodeChain {
 public:
  explicit DecodeChain(const Decoder& decoder) : steps_(decoder.start()) {}

  // Appends to `out` the text that has become certain.
  void token(std::string_view token, std::string& out);
  void finish(std::string& out);

 private:
  class Link;

  std::vector<std::unique_ptr<Decoder::Step>> steps_;
};

}  // namespace graft::text
