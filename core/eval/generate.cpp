#include "core/eval/generate.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/clock.h"
#include "core/base/error.h"

namespace graft {
namespace {

// splitmix64: a uniform number in [0, 1), the same on every platform.
double uniform(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

struct PaddedPrompts {
  at::Tensor ids, mask;  // [B,T] i64 and u8; the mask is undefined where nothing is padded
};

PaddedPrompts pad_on_the_left(const std::vector<std::vector<std::int32_t>>& prompts) {
  std::size_t longest = 0, shortest = prompts.front().size();
  for (const auto& prompt : prompts) {
    if (prompt.empty())
      fail(ErrorKind::usage,
           "the prompt has no tokens; give at least one character, or a model with a BOS token");
    longest = std::max(longest, prompt.size());
    shortest = std::min(shortest, prompt.size());
  }
  const auto rows = static_cast<std::int64_t>(prompts.size());
  const auto width = static_cast<std::int64_t>(longest);
  PaddedPrompts padded{at::zeros({rows, width}, at::kLong), {}};
  if (shortest < longest) padded.mask = at::zeros({rows, width}, at::kByte);
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    const std::size_t first = b * longest + longest - prompts[b].size();
    std::copy(prompts[b].begin(), prompts[b].end(), padded.ids.data_ptr<std::int64_t>() + first);
    if (padded.mask.defined())
      std::fill_n(padded.mask.data_ptr<std::uint8_t>() + first, prompts[b].size(), std::uint8_t{1});
  }
  return padded;
}

// Where each prompt of a batch stands.
class Continuations {
 public:
  Continuations(std::size_t count, std::int64_t max_tokens, const SampleOptions& options,
                std::vector<std::int64_t> stops)
      : reports(count),
        max_tokens_(max_tokens),
        stops_(std::move(stops)),
        samplers_(count, TokenSampler(options)),
        open_(count, max_tokens > 0) {}

  bool all_done() const { return std::find(open_.begin(), open_.end(), true) == open_.end(); }

  // Takes a token of each open row of logits [B,V]; gives what to feed next, [B,1]: anything for
  // rows that are done.
  at::Tensor take(const at::Tensor& logits, const std::function<bool(std::int32_t)>& on_token) {
    at::Tensor next = at::zeros({logits.size(0), 1}, at::kLong);
    for (std::size_t b = 0; b < reports.size(); ++b)
      if (open_[b])
        next.data_ptr<std::int64_t>()[b] =
            take_one(b, logits[static_cast<std::int64_t>(b)], on_token);
    return next;
  }

  std::vector<GenerateReport> reports;

 private:
  std::int32_t take_one(std::size_t b, const at::Tensor& logits,
                        const std::function<bool(std::int32_t)>& on_token) {
    GenerateReport& report = reports[b];
    const std::int32_t id = samplers_[b].pick(logits);
    report.stopped = std::find(stops_.begin(), stops_.end(), id) != stops_.end();
    if (!report.stopped) report.ids.push_back(id);
    open_[b] = !report.stopped && (!on_token || on_token(id)) &&
               static_cast<std::int64_t>(report.ids.size()) < max_tokens_;
    return id;
  }

  std::int64_t max_tokens_;
  std::vector<std::int64_t> stops_;
  std::vector<TokenSampler> samplers_;
  std::vector<bool> open_;
};

std::vector<GenerateReport> continue_prompts(const Model& model,
                                             const std::vector<std::vector<std::int32_t>>& prompts,
                                             std::int64_t max_tokens, const SampleOptions& options,
                                             const std::function<bool(std::int32_t)>& on_token,
                                             bool ignore_stop) {
  c10::InferenceMode inference;
  Continuations rows(prompts.size(), max_tokens, options,
                     ignore_stop ? std::vector<std::int64_t>{} : model.config().stop_ids);
  const PaddedPrompts padded = pad_on_the_left(prompts);
  Decoder decoder(model, padded.ids.size(0));

  const auto started = Clock::now();
  at::Tensor logits = decoder.feed(padded.ids, padded.mask);
  const double prefill_seconds = seconds_since(started);

  const auto prefilled = Clock::now();
  while (!rows.all_done()) {
    const at::Tensor next = rows.take(logits, on_token);
    if (!rows.all_done()) logits = decoder.feed(next);
  }
  const double decode_seconds = seconds_since(prefilled);
  for (GenerateReport& report : rows.reports) {
    report.prefill_seconds = prefill_seconds;
    report.decode_seconds = decode_seconds;
    report.state_bytes = decoder.bytes();
  }
  return std::move(rows.reports);
}

}  // namespace

TokenSampler::TokenSampler(const SampleOptions& options) : options_(options), state_(options.seed) {
  if (!(options.temperature >= 0))
    fail(ErrorKind::usage, "temperature is " + std::to_string(options.temperature) +
                               "; it must be 0 (greedy) or more");
  if (!(options.top_p > 0 && options.top_p <= 1))
    fail(ErrorKind::usage,
         "top-p is " + std::to_string(options.top_p) + "; it must lie above 0 and at most 1");
  if (options.top_k < 0)
    fail(ErrorKind::usage,
         "top-k is " + std::to_string(options.top_k) + "; it must be 0 (all) or more");
}

std::int32_t TokenSampler::pick(const at::Tensor& logits) {
  if (options_.temperature == 0)
    return static_cast<std::int32_t>(logits.argmax().item<std::int64_t>());
  // The largest is 0 before the division, and the divisor no smaller than what leaves the others
  // finite: a temperature near 0 is greedy rather than NaN.
  const at::Tensor below = logits.to(at::kDouble).sub(logits.max().to(at::kDouble));
  const at::Tensor probabilities = below.div(std::max(options_.temperature, 1e-100)).softmax(0);
  const auto [sorted, order] = probabilities.sort(/*stable=*/true, 0, /*descending=*/true);
  const double* p = sorted.const_data_ptr<double>();
  std::int64_t kept = 0;
  double mass = 0;
  const std::int64_t limit =
      options_.top_k == 0 ? sorted.size(0) : std::min(options_.top_k, sorted.size(0));
  while (kept < limit && (kept == 0 || mass < options_.top_p)) mass += p[kept++];
  double target = uniform(state_) * mass;
  std::int64_t chosen = 0;
  while (chosen + 1 < kept && target >= p[chosen]) target -= p[chosen++];
  return static_cast<std::int32_t>(order[chosen].item<std::int64_t>());
}

GenerateReport generate(const Model& model, std::span<const std::int32_t> prompt,
                        std::int64_t max_tokens, const SampleOptions& options,
                        const std::function<bool(std::int32_t)>& on_token, bool ignore_stop) {
  return std::move(continue_prompts(model, {{prompt.begin(), prompt.end()}}, max_tokens, options,
                                    on_token, ignore_stop)
                       .front());
}

std::vector<GenerateReport> generate_batch(const Model& model,
                                           const std::vector<std::vector<std::int32_t>>& prompts,
                                           std::int64_t max_tokens, const SampleOptions& options,
                                           bool ignore_stop,
                                           const std::function<bool()>& should_stop) {
  if (prompts.empty()) return {};
  const auto goes_on = [&](std::int32_t) { return !should_stop || !should_stop(); };
  return continue_prompts(model, prompts, max_tokens, options, goes_on, ignore_stop);
}

at::Tensor greedy(const Model& model, const at::Tensor& prompts, std::int64_t tokens) {
  c10::InferenceMode inference;
  if (tokens == 0) return at::empty({prompts.size(0), 0}, at::kLong);
  Decoder decoder(model, prompts.size(0));
  const at::Tensor logits = decoder.feed(prompts);
  return greedy(decoder, logits, tokens);
}

at::Tensor greedy(Decoder& decoder, const at::Tensor& logits, std::int64_t tokens) {
  c10::InferenceMode inference;
  std::vector<at::Tensor> out{logits.argmax(-1, /*keepdim=*/true)};
  while (static_cast<std::int64_t>(out.size()) < tokens)
    out.push_back(decoder.feed(out.back()).argmax(-1, /*keepdim=*/true));
  return at::cat(out, 1);
}

}  // namespace graft
