#include "core/text/decoder.h"

#include <algorithm>
#include <cctype>
#include <optional>

#include "core/text/byte_level.h"
#include "core/text/pattern.h"
#include "core/text/utf8.h"

namespace graft::text {

namespace {

using Factory = Decoder::Factory;
using Sink = Decoder::Sink;
using Step = Decoder::Step;

// Makes steps that share one immutable description of themselves.
template <typename StepType, typename Spec>
class FactoryOf : public Factory {
 public:
  explicit FactoryOf(Spec spec) : spec_(std::move(spec)) {}
  std::unique_ptr<Step> make() const override { return std::make_unique<StepType>(spec_); }

 private:
  Spec spec_;
};

struct NoSpec {};

// No decoder: tokens with spaces between them.
class JoinBySpaces : public Step {
 public:
  explicit JoinBySpaces(const NoSpec&) {}
  void token(std::string_view token, Sink& next) override {
    if (!first_) next.token(" ");
    first_ = false;
    next.token(token);
  }
  void finish(Sink&) override { first_ = true; }

 private:
  bool first_ = true;
};

// Bytes out of their spellings; holds back the bytes of a character that is not complete.
class ByteLevel : public Step {
 public:
  explicit ByteLevel(const NoSpec&) {}
  void token(std::string_view token, Sink& next) override {
    append_bytes_of(bytes_, token);
    pass_on(without_cut_character(bytes_), next);
  }
  void finish(Sink& next) override { pass_on(bytes_.size(), next); }

 private:
  void pass_on(std::size_t length, Sink& next) {
    if (length == 0) return;
    next.token(replace_ill_formed(std::string_view(bytes_).substr(0, length)));
    bytes_.erase(0, length);
  }

  std::string bytes_;
};

// A run of tokens like <0xE4> gives the text its bytes form together, or U+FFFD for each of them.
// Until the run ends it is not known which.
class ByteFallback : public Step {
 public:
  explicit ByteFallback(const NoSpec&) {}
  void token(std::string_view token, Sink& next) override {
    if (const auto byte = byte_of(token)) {
      bytes_ += *byte;
    } else {
      finish(next);
      next.token(token);
    }
  }
  void finish(Sink& next) override {
    if (bytes_.empty()) return;
    if (is_well_formed(bytes_)) {
      next.token(bytes_);
    } else {
      std::string replaced;
      for (std::size_t i = 0; i < bytes_.size(); ++i) append_character(replaced, kReplacement);
      next.token(replaced);
    }
    bytes_.clear();
  }

 private:
  static std::optional<char> byte_of(std::string_view token) {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
    unsigned byte = 0;
    for (const char c : token.substr(3, 2)) {
      const auto u = static_cast<unsigned char>(c);
      if (std::isxdigit(u) == 0) return std::nullopt;
      byte = byte * 16U +
             static_cast<unsigned>(std::isdigit(u) != 0 ? u - '0' : std::tolower(u) - 'a' + 10);
    }
    return static_cast<char>(byte);
  }

  std::string bytes_;
};

class Fuse : public Step {
 public:
  explicit Fuse(const NoSpec&) {}
  void token(std::string_view token, Sink& next) override { next.token(token); }
  void finish(Sink&) override {}
};

struct ReplaceSpec {
  std::shared_ptr<const Pattern> pattern;
  std::string content;
};

class Replace : public Step {
 public:
  explicit Replace(ReplaceSpec spec) : spec_(std::move(spec)) {}
  void token(std::string_view token, Sink& next) override {
    std::string out;
    spec_.pattern->for_each_stretch(
        token, workspace_, [&](std::size_t begin, std::size_t end, bool is_match) {
          out += is_match ? std::string_view(spec_.content) : token.substr(begin, end - begin);
        });
    next.token(out);
  }
  void finish(Sink&) override {}

 private:
  ReplaceSpec spec_;
  Regex::Workspace workspace_;
};

struct StripSpec {
  std::string content;  // one character
  std::size_t start = 0;
  std::size_t stop = 0;
};

// Takes up to `start` of a character off the front of a text that comes in parts, and up to `stop`
// off its end.
class StripWhole : public Step {
 public:
  explicit StripWhole(StripSpec spec) : spec_(std::move(spec)), start_left_(spec_.start) {}
  void token(std::string_view part, Sink& next) override {
    std::string out;
    while (!part.empty()) {
      const std::string_view character = part.substr(0, character_length(part.front()));
      part.remove_prefix(character.size());
      if (character != spec_.content) {
        for (; held_ > 0; --held_) out += spec_.content;
        start_left_ = 0;
        out += character;
      } else if (start_left_ > 0) {
        --start_left_;
      } else if (held_ < spec_.stop) {
        ++held_;
      } else {  // one more at the end than will be taken off
        out += character;
      }
    }
    if (!out.empty()) next.token(out);
  }
  void finish(Sink&) override {
    start_left_ = spec_.start;
    held_ = 0;
  }

 private:
  StripSpec spec_;
  std::size_t start_left_;
  std::size_t held_ = 0;
};

// The same for each token.
class StripEach : public Step {
 public:
  explicit StripEach(StripSpec spec) : whole_(std::move(spec)) {}
  void token(std::string_view token, Sink& next) override {
    whole_.token(token, next);
    whole_.finish(next);
  }
  void finish(Sink&) override {}

 private:
  StripWhole whole_;
};

template <typename StepType, typename Spec>
std::unique_ptr<Factory> factory(Spec spec) {
  return std::make_unique<FactoryOf<StepType, Spec>>(std::move(spec));
}

StripSpec strip_spec(const JsonNode& node) {
  constexpr std::int64_t kMost = 1'000'000;
  StripSpec spec{node.at("content").string(),
                 static_cast<std::size_t>(node.at("start").integer(0, kMost)),
                 static_cast<std::size_t>(node.at("stop").integer(0, kMost))};
  if (spec.content.empty() || spec.content.size() != character_length(spec.content.front())) {
    node.at("content").fail("expected one character");
  }
  return spec;
}

}  // namespace

Decoder::Decoder() { factories_.push_back(factory<JoinBySpaces>(NoSpec{})); }

Decoder::Decoder(const JsonNode& node) { add(node); }

void Decoder::add(const JsonNode& node) {
  const std::string& type = node.type();
  if (type == "Sequence") {
    for (const JsonNode& element : node.at("decoders").elements()) add(element);
  } else if (type == "Strip") {
    StripSpec spec = strip_spec(node);
    factories_.push_back(fused_ ? factory<StripWhole>(std::move(spec))
                                : factory<StripEach>(std::move(spec)));
  } else if (type == "Fuse") {
    factories_.push_back(factory<Fuse>(NoSpec{}));
    fused_ = true;
  } else if (type != "ByteLevel" && type != "ByteFallback" && type != "Replace") {
    node.fail_unsupported_type("ByteLevel, ByteFallback, Fuse, Replace, Strip, Sequence");
  } else if (fused_) {
    node.fail(type + " after Fuse or ByteLevel is not supported: it would need the whole text");
  } else if (type == "ByteLevel") {
    factories_.push_back(factory<ByteLevel>(NoSpec{}));
    fused_ = true;
  } else if (type == "ByteFallback") {
    factories_.push_back(factory<ByteFallback>(NoSpec{}));
  } else {
    factories_.push_back(factory<Replace>(ReplaceSpec{
        std::make_shared<const Pattern>(node.at("pattern")), node.at("content").string()}));
  }
}

std::vector<std::unique_ptr<Step>> Decoder::start() const {
  std::vector<std::unique_ptr<Step>> steps;
  steps.reserve(factories_.size());
  for (const std::unique_ptr<Factory>& factory : factories_) steps.push_back(factory->make());
  return steps;
}

// Hands on to the step at `index`, or to the text when there is none.
class DecodeChain::Link final : public Decoder::Sink {
 public:
  Link(DecodeChain& chain, std::size_t index, std::string& out)
      : chain_(chain), index_(index), out_(out) {}
  void token(std::string_view token) override {
    if (index_ == chain_.steps_.size()) {
      out_ += token;
    } else {
      Link next(chain_, index_ + 1, out_);
      chain_.steps_[index_]->token(token, next);
    }
  }

 private:
  DecodeChain& chain_;
  std::size_t index_;
  std::string& out_;
};

void DecodeChain::token(std::string_view token, std::string& out) {
  Link(*this, 0, out).token(token);
}

void DecodeChain::finish(std::string& out) {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Link next(*this, i + 1, out);
    steps_[i]->finish(next);
  }
}

}  // namespace graft::text
