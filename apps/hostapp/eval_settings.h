#pragma once

#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/eval/perplexity.h"
#include "core/text/tokenizer.h"

namespace graft {

// How perplexity is measured here: the keys eval.*.
PerplexityOptions perplexity_options(const Config& config);

// The text that figures are made on: eval_text, else text. Throws Error(usage) when there is none.
std::vector<std::string> evaluation_texts(const Config& config);

// All of its tokens, and what to call it.
struct EvaluationText {
  std::string name;
  std::vector<std::int32_t> tokens;
};
EvaluationText read_evaluation_text(const Config& config, const Tokenizer& tokenizer);

}  // namespace graft
