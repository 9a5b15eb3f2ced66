#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/student/model.h"
#include "core/text/tokenizer.h"

namespace graft {

// A needle in a haystack: a sentence that names a number, somewhere in a text about other things,
// asked for at its end. What a model that forgets cannot answer.
struct NeedleOptions {
  std::vector<std::int64_t> lengths{256, 512, 1024};  // tokens of the whole, answer included
  std::vector<double> depths{0, 0.25, 0.5, 0.75, 1};  // where in the text; 0 = its start
  std::int64_t trials = 4;                            // texts and numbers for each pair
};

// Texts of one length with their needles at one depth.
struct NeedleCase {
  std::int64_t length = 0;
  double depth = 0;
  at::Tensor ids;                           // [trials, length] i64
  std::vector<std::int64_t> answer_begins;  // of each trial; the answer ends with the text
};

struct NeedleFigure {
  std::int64_t length = 0;
  double depth = 0;
  double found =
      0;  // share of trials in which every token of the answer is the model's first choice
  double bits = 0;  // -log2 p of an answer's token, mean
};

// The same cases for every model. `tokens`: the haystack, a text of any length; it is repeated
// where it is too short. Throws Error(usage) naming a length that leaves no room for needle and
// question, or that is beyond `max_positions`.
std::vector<NeedleCase> make_needles(const Tokenizer& tokenizer,
                                     std::span<const std::int32_t> tokens,
                                     const NeedleOptions& options, std::int64_t max_positions);

NeedleFigure find_needles(const Model& model, const NeedleCase& needles);

}  // namespace graft
