#include "core/text/normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/stringpiece.h>

#include <algorithm>
#include <limits>

#include "core/base/error.h"
#include "core/text/pattern.h"

namespace graft::text {

namespace {

using Step = Normalizer::Step;

// Unicode normalisation forms (UAX #15).
class UnicodeForm : public Step {
 public:
  using GetInstance = const icu::Normalizer2* (*)(UErrorCode&);

  explicit UnicodeForm(GetInstance get_instance) {
    UErrorCode status = U_ZERO_ERROR;
    form_ = get_instance(status);
    if (U_FAILURE(status) != 0) {
      fail(ErrorKind::internal,
           std::string("ICU has no normalisation data: ") + u_errorName(status));
    }
  }

  void apply(std::string& text, Regex::Workspace&) const override {
    // Every form leaves ASCII alone, and most text is.
    const bool ascii = std::all_of(text.begin(), text.end(),
                                   [](char c) { return static_cast<unsigned char>(c) < 0x80; });
    if (ascii) return;
    if (text.size() > static_cast<std::size_t>(std::numeric_limits<int32_t>::max())) {
      fail(ErrorKind::input, "a text of 2 GiB or more cannot be normalised; split it");
    }
    std::string out;
    out.reserve(text.size());
    icu::StringByteSink<std::string> sink(&out);
    UErrorCode status = U_ZERO_ERROR;
    form_->normalizeUTF8(0, icu::StringPiece(text), sink, nullptr, status);
    if (U_FAILURE(status) != 0) {
      fail(ErrorKind::internal, std::string("ICU cannot normalise: ") + u_errorName(status));
    }
    text = std::move(out);
  }

 private:
  const icu::Normalizer2* form_ = nullptr;  // ICU's, never freed
};

class Prepend : public Step {
 public:
  explicit Prepend(const JsonNode& node) : prefix_(node.at("prepend").string()) {}
  void apply(std::string& text, Regex::Workspace&) const override { text.insert(0, prefix_); }

 private:
  std::string prefix_;
};

class Replace : public Step {
 public:
  explicit Replace(const JsonNode& node)
      : pattern_(node.at("pattern")), content_(node.at("content").string()) {}

  void apply(std::string& text, Regex::Workspace& workspace) const override {
    std::string out;
    out.reserve(text.size());
    pattern_.for_each_stretch(text, workspace,
                              [&](std::size_t begin, std::size_t end, bool is_match) {
                                if (is_match) {
                                  out += content_;
                                } else {
                                  out.append(text, begin, end - begin);
                                }
                              });
    text = std::move(out);
  }

 private:
  Pattern pattern_;
  std::string content_;
};

}  // namespace

void Normalizer::add(const JsonNode& node) {
  const std::string& type = node.type();
  if (type == "Sequence") {
    for (const JsonNode& element : node.at("normalizers").elements()) add(element);
  } else if (type == "NFC") {
    steps_.push_back(std::make_unique<UnicodeForm>(&icu::Normalizer2::getNFCInstance));
  } else if (type == "NFD") {
    steps_.push_back(std::make_unique<UnicodeForm>(&icu::Normalizer2::getNFDInstance));
  } else if (type == "NFKC") {
    steps_.push_back(std::make_unique<UnicodeForm>(&icu::Normalizer2::getNFKCInstance));
  } else if (type == "NFKD") {
    steps_.push_back(std::make_unique<UnicodeForm>(&icu::Normalizer2::getNFKDInstance));
  } else if (type == "Prepend") {
    steps_.push_back(std::make_unique<Prepend>(node));
  } else if (type == "Replace") {
    steps_.push_back(std::make_unique<Replace>(node));
  } else {
    node.fail_unsupported_type("NFC, NFD, NFKC, NFKD, Prepend, Replace, Sequence");
  }
}

std::string Normalizer::apply(std::string_view text, Regex::Workspace& workspace) const {
  std::string out(text);
  for (const std::unique_ptr<Step>& step : steps_) {
    if (out.empty()) break;
    step->apply(out, workspace);
  }
  return out;
}

}  // namespace graft::text
