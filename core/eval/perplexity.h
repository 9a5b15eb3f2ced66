#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/student/model.h"

namespace graft {

struct PerplexityOptions {
  std::int64_t context = 512;  // tokens in a window
  std::int64_t windows = 0;    // the first this many; 0 = the whole text
  std::int64_t stride =
      0;  // tokens from one window's start to the next; 0 = context: windows share nothing
  bool bos =
      false;  // put the model's BOS token before each window (it takes a place of the context)
};

// The stride in tokens that 0 stands for, or the one that was given.
std::int64_t effective_stride(const PerplexityOptions& options);

struct Perplexity {
  double nll = 0;           // sum over scored tokens, nats
  std::int64_t scored = 0;  // tokens predicted: each once
  std::int64_t read = 0;    // tokens run through the model
  std::int64_t windows = 0;
  double seconds = 0;
  double value() const;  // exp(nll / scored)
};

// Token perplexity over consecutive windows, each run on its own from an empty state. A window's
// first token has nothing before it and is not scored (unless there is a BOS); where windows
// overlap, a token is scored in the first window that predicts it. Tokens are weighted, not windows
// averaged. Throws Error(input) when not one token can be scored, Error(usage) for impossible
// options, `what` names the text.
Perplexity perplexity(const Model& model, std::span<const std::int32_t> tokens,
                      const PerplexityOptions& options, const std::string& what,
                      const std::function<bool()>& should_stop = {});

// One line that says how a figure was made: counts, context, stride, BOS.
std::string protocol(const PerplexityOptions& options, const Perplexity& result);

}  // namespace graft
