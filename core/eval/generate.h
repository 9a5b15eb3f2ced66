#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/student/model.h"

namespace graft {

struct SampleOptions {
  double temperature = 0;  // 0 = greedy: the most likely token, the lowest id of equals
  std::int64_t top_k = 0;  // 0 = all
  double top_p = 1.0;      // the smallest set of tokens whose probability reaches it
  std::uint64_t seed = 0;
};

// Draws tokens from logits; the same seed draws the same tokens.
class TokenSampler {
 public:
  // Throws Error(usage) naming the option that is out of range.
  explicit TokenSampler(const SampleOptions& options);
  std::int32_t pick(const at::Tensor& logits);  // [V]

 private:
  SampleOptions options_;
  std::uint64_t state_;
};

struct GenerateReport {
  std::vector<std::int32_t> ids;  // what was generated, a stop token not included
  bool stopped = false;           // by a stop token
  double prefill_seconds = 0, decode_seconds = 0;
  std::uint64_t state_bytes = 0;  // keys, values and states at the end
};

// Feeds the prompt at once, then token by token. `on_token` sees each token as it comes and may end
// the generation by returning false. Stops at one of the model's stop tokens, unless `ignore_stop`.
// Throws Error(usage) for an empty prompt.
GenerateReport generate(const Model& model, std::span<const std::int32_t> prompt,
                        std::int64_t max_tokens, const SampleOptions& options,
                        const std::function<bool(std::int32_t)>& on_token = {},
                        bool ignore_stop = false);

// Several prompts as one batch, padded on the left; each sampler has the same seed, so that a
// prompt draws the numbers it would draw alone. The times and bytes of each report are those of the
// batch. `should_stop` is asked after each token and ends the whole batch. Throws Error(usage) for
// an empty prompt; no prompts give no reports.
std::vector<GenerateReport> generate_batch(const Model& model,
                                           const std::vector<std::vector<std::int32_t>>& prompts,
                                           std::int64_t max_tokens, const SampleOptions& options,
                                           bool ignore_stop = false,
                                           const std::function<bool()>& should_stop = {});

// Greedy continuations of equally long prompts ids [B,P] i64, as one batch: [B,tokens] i64. Stop
// tokens do not stop.
at::Tensor greedy(const Model& model, const at::Tensor& prompts, std::int64_t tokens);
// The same from where a decoder stands, given its last logits [B,V]; at least one token.
at::Tensor greedy(Decoder& decoder, const at::Tensor& logits, std::int64_t tokens);

}  // namespace graft
