#include "core/eval/generate.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

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
  const at::Tensor probabilities = (logits.to(at::kDouble) / options_.temperature).softmax(0);
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
  c10::InferenceMode inference;
  if (prompt.empty())
    fail(ErrorKind::usage,
         "the prompt has no tokens; give at least one character, or a model with a BOS token");
  TokenSampler sampler(options);
  GenerateReport report;
  Decoder decoder(model, 1);
  const auto& stops = model.config().stop_ids;

  auto start = Clock::now();
  at::Tensor ids = at::empty({1, static_cast<std::int64_t>(prompt.size())}, at::kLong);
  std::copy(prompt.begin(), prompt.end(), ids.data_ptr<std::int64_t>());
  at::Tensor logits = decoder.feed(ids);
  report.prefill_seconds = seconds_since(start);

  start = Clock::now();
  while (static_cast<std::int64_t>(report.ids.size()) < max_tokens) {
    const std::int32_t id = sampler.pick(logits[0]);
    if (!ignore_stop && std::find(stops.begin(), stops.end(), id) != stops.end()) {
      report.stopped = true;
      break;
    }
    report.ids.push_back(id);
    if (on_token && !on_token(id)) break;
    if (static_cast<std::int64_t>(report.ids.size()) == max_tokens) break;
    logits = decoder.feed(at::full({1, 1}, id, at::kLong));
  }
  report.decode_seconds = seconds_since(start);
  report.state_bytes = decoder.bytes();
  return report;
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
