#include "core/eval/needle.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/base/error.h"

namespace graft {
namespace {

using Tokens = std::vector<std::int32_t>;

struct Trial {
  Tokens needle, question, answer;
  std::size_t size() const { return needle.size() + question.size() + answer.size(); }
};

Trial make_trial(const Tokenizer& tokenizer, std::int64_t number) {
  static constexpr std::array<const char*, 8> towns = {"Lisbon", "Oslo",  "Cairo", "Quito",
                                                       "Delhi",  "Turin", "Perth", "Riga"};
  const std::string town = towns[static_cast<std::size_t>(number) % towns.size()];
  // Five digits, different for every trial; the last ones spread over the range.
  const std::string digits = std::to_string(10000 + (number * 48271 + 12345) % 90000);
  return {tokenizer.encode(" The secret number of " + town + " is " + digits + "."),
          tokenizer.encode(" Question: what is the secret number of " + town +
                           "? Answer: the secret number of " + town + " is"),
          tokenizer.encode(" " + digits)};
}

// `n` tokens of the haystack from a place of the trial's own.
Tokens haystack(std::span<const std::int32_t> tokens, std::int64_t trial, std::size_t n) {
  Tokens out(n);
  const std::size_t start = static_cast<std::size_t>(trial) * 7919;
  for (std::size_t i = 0; i < n; ++i) out[i] = tokens[(start + i) % tokens.size()];
  return out;
}

NeedleCase make_case(const Tokenizer& tokenizer, std::span<const std::int32_t> tokens,
                     std::int64_t length, double depth, std::int64_t trials) {
  NeedleCase made{length, depth, at::empty({trials, length}, at::kLong), {}};
  auto* out = made.ids.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < trials; ++i) {
    const Trial trial = make_trial(tokenizer, i);
    if (static_cast<std::int64_t>(trial.size()) >= length)
      fail(ErrorKind::usage, "needle.lengths: " + std::to_string(length) +
                                 " tokens have no room for a haystack: needle, question and answer "
                                 "take " +
                                 std::to_string(trial.size()));
    const std::size_t rest = static_cast<std::size_t>(length) - trial.size();
    const Tokens hay = haystack(tokens, i, rest);
    const auto cut = hay.begin() + std::lround(depth * static_cast<double>(rest));
    out = std::copy(hay.begin(), cut, out);
    out = std::copy(trial.needle.begin(), trial.needle.end(), out);
    out = std::copy(cut, hay.end(), out);
    out = std::copy(trial.question.begin(), trial.question.end(), out);
    out = std::copy(trial.answer.begin(), trial.answer.end(), out);
    made.answer_begins.push_back(length - static_cast<std::int64_t>(trial.answer.size()));
  }
  return made;
}

}  // namespace

std::vector<NeedleCase> make_needles(const Tokenizer& tokenizer,
                                     std::span<const std::int32_t> tokens,
                                     const NeedleOptions& options, std::int64_t max_positions) {
  if (tokens.empty()) fail(ErrorKind::input, "a haystack needs text");
  for (const double depth : options.depths)
    if (!(depth >= 0 && depth <= 1))
      fail(ErrorKind::usage, "needle.depths: " + std::to_string(depth) +
                                 " is no depth; 0 is the text's start, 1 its end");
  std::vector<NeedleCase> cases;
  for (const std::int64_t length : options.lengths) {
    if (length > max_positions)
      fail(ErrorKind::usage, "needle.lengths: " + std::to_string(length) +
                                 " tokens are more than the teacher's context of " +
                                 std::to_string(max_positions));
    for (const double depth : options.depths)
      cases.push_back(make_case(tokenizer, tokens, length, depth, options.trials));
  }
  return cases;
}

NeedleFigure find_needles(const Model& model, const NeedleCase& needles) {
  const c10::InferenceMode inference;
  NeedleFigure figure{needles.length, needles.depth};
  double tokens = 0;
  const std::int64_t trials = needles.ids.size(0);
  for (std::int64_t i = 0; i < trials; ++i) {
    const std::int64_t begin = needles.answer_begins[static_cast<std::size_t>(i)];
    const std::int64_t n = needles.length - begin;
    const at::Tensor answer = needles.ids[i].narrow(0, begin, n);
    // One text at a time: they are long.
    const at::Tensor rows = model.hidden(needles.ids.narrow(0, i, 1))[0].narrow(0, begin - 1, n);
    const at::Tensor log_p = model.logits(rows).log_softmax(-1);
    figure.found += log_p.argmax(-1).equal(answer) ? 1 : 0;
    figure.bits -= log_p.gather(-1, answer.unsqueeze(-1)).sum().item<double>() / std::log(2.0);
    tokens += static_cast<double>(n);
  }
  figure.found /= static_cast<double>(trials);
  figure.bits /= tokens;
  return figure;
}

}  // namespace graft
