#include "core/text/pre_tokenizer.h"

#include <optional>
#include <utility>

#include "core/text/byte_level.h"
#include "core/text/pattern.h"
#include "core/text/utf8.h"

namespace graft::text {

namespace {

using Buffers = PreTokenizer::Buffers;
using Sink = PreTokenizer::Sink;
using Step = PreTokenizer::Step;

enum class Behavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

Behavior behavior_at(const JsonNode& node) {
  const std::string& name = node.string();
  if (name == "Removed") return Behavior::removed;
  if (name == "Isolated") return Behavior::isolated;
  if (name == "MergedWithPrevious") return Behavior::merged_with_previous;
  if (name == "MergedWithNext") return Behavior::merged_with_next;
  if (name == "Contiguous") return Behavior::contiguous;
  node.fail("unknown behavior '" + name +
            "'; known: Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous");
}

// Joins the stretches of a piece into words as `behavior` has it. Holds one stretch back, since the
// next may join it.
class Joiner {
 public:
  Joiner(std::string_view piece, Behavior behavior, Sink& sink)
      : piece_(piece), behavior_(behavior), sink_(sink) {}

  void push(std::size_t begin, std::size_t end, bool is_match) {
    switch (behavior_) {
      case Behavior::isolated:
        emit(begin, end);
        return;
      case Behavior::removed:
        if (!is_match) emit(begin, end);
        return;
      case Behavior::contiguous:
        join_if(is_match == last_is_match_, begin, end);
        break;
      case Behavior::merged_with_previous:
        join_if(is_match && !last_is_match_, begin, end);
        break;
      case Behavior::merged_with_next:
        join_if(!is_match && last_is_match_, begin, end);
        break;
    }
    last_is_match_ = is_match;
  }

  void finish() {
    if (held_) emit(held_->first, held_->second);
    held_.reset();
  }

 private:
  void join_if(bool join, std::size_t begin, std::size_t end) {
    if (join && held_) {
      held_->second = end;
    } else {
      finish();
      held_.emplace(begin, end);
    }
  }

  void emit(std::size_t begin, std::size_t end) {
    if (begin < end) sink_.word(piece_.substr(begin, end - begin));
  }

  std::string_view piece_;
  Behavior behavior_;
  Sink& sink_;
  std::optional<std::pair<std::size_t, std::size_t>> held_;
  bool last_is_match_ = false;
};

class Split : public Step {
 public:
  explicit Split(const JsonNode& node)
      : pattern_(node.at("pattern")),
        behavior_(behavior_at(node.at("behavior"))),
        invert_(node.at("invert").boolean()) {}

  void split(std::string_view piece, Buffers&, Regex::Workspace& workspace,
             Sink& next) const override {
    Joiner joiner(piece, behavior_, next);
    pattern_.for_each_stretch(piece, workspace,
                              [&](std::size_t begin, std::size_t end, bool is_match) {
                                joiner.push(begin, end, is_match != invert_);
                              });
    joiner.finish();
  }

 private:
  Pattern pattern_;
  Behavior behavior_;
  bool invert_;
};

// Each run of digits (general category N) on its own, or each digit.
class Digits : public Step {
 public:
  explicit Digits(const JsonNode& node)
      : behavior_(node.at("individual_digits").boolean() ? Behavior::isolated
                                                         : Behavior::contiguous) {}

  void split(std::string_view piece, Buffers&, Regex::Workspace&, Sink& next) const override {
    Joiner joiner(piece, behavior_, next);
    std::size_t done = 0;
    for (std::size_t position = 0; position < piece.size();) {
      const std::size_t begin = position;
      if (!is_numeric(next_character(piece, position))) continue;
      if (begin > done) joiner.push(done, begin, false);
      joiner.push(begin, position, true);
      done = position;
    }
    if (done < piece.size()) joiner.push(done, piece.size(), false);
    joiner.finish();
  }

 private:
  Behavior behavior_;
};

// Spells words in the byte-level alphabet, after cutting by GPT-2's expression (Radford et al.
// 2019, encoder.py) unless use_regex is false. Its trim_offsets concerns offsets, which are not
// kept here.
class ByteLevel : public Step {
 public:
  explicit ByteLevel(const JsonNode& node)
      : add_prefix_space_(node.at("add_prefix_space").boolean()) {
    const auto use_regex = node.find("use_regex");
    if (!use_regex || use_regex->boolean()) {
      regex_.emplace(
          R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)");
    }
  }

  void split(std::string_view piece, Buffers& buffers, Regex::Workspace& workspace,
             Sink& next) const override {
    if (add_prefix_space_ && !piece.starts_with(' ')) {
      buffers.prefixed.assign(1, ' ').append(piece);
      piece = buffers.prefixed;
    }
    const auto emit = [&](std::size_t begin, std::size_t end, bool) {
      buffers.spelled.clear();
      append_byte_level(buffers.spelled, piece.substr(begin, end - begin));
      next.word(buffers.spelled);
    };
    if (regex_) {
      for_each_stretch(*regex_, piece, workspace, emit);
    } else {
      emit(0, piece.size(), false);
    }
  }

 private:
  bool add_prefix_space_;
  std::optional<Regex> regex_;
};

}  // namespace

void PreTokenizer::add(const JsonNode& node) {
  const std::string& type = node.type();
  if (type == "Sequence") {
    for (const JsonNode& element : node.at("pretokenizers").elements()) add(element);
  } else if (type == "ByteLevel") {
    steps_.push_back(std::make_unique<ByteLevel>(node));
    is_byte_level_ = true;
  } else if (type == "Digits") {
    steps_.push_back(std::make_unique<Digits>(node));
  } else if (type == "Split") {
    steps_.push_back(std::make_unique<Split>(node));
  } else {
    node.fail_unsupported_type("ByteLevel, Digits, Split, Sequence");
  }
}

// Feeds the words of one step to the next.
class PreTokenizer::Link final : public Sink {
 public:
  Link(const Step& step, Regex::Workspace& workspace) : step_(step), workspace_(workspace) {}
  void set_next(Sink& next) { next_ = &next; }
  void word(std::string_view word) override { step_.split(word, buffers_, workspace_, *next_); }

 private:
  const Step& step_;
  Regex::Workspace& workspace_;
  Sink* next_ = nullptr;
  Buffers buffers_;
};

void PreTokenizer::split(std::string_view text, Regex::Workspace& workspace, Sink& out) const {
  if (text.empty()) return;
  std::vector<Link> links;
  links.reserve(steps_.size());
  for (const std::unique_ptr<Step>& step : steps_) links.emplace_back(*step, workspace);
  Sink* next = &out;
  for (auto link = links.rbegin(); link != links.rend(); ++link) {
    link->set_next(*next);
    next = &*link;
  }
  next->word(text);
}

}  // namespace graft::text
