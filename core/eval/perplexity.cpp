#include "core/eval/perplexity.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/teacher/lanes.h"

namespace graft {
namespace {

// Rows of logits held at once: V is large (49k to 152k), so 256 rows of float32 are 50 to 156 MB.
constexpr std::int64_t kRowsAtOnce = 256;
constexpr std::size_t kWindowsAtOnce = 4;

struct Window {
  std::int64_t start, end;    // tokens of the text
  std::int64_t first_scored;  // the first token of the text whose prediction counts here
};

std::vector<Window> make_windows(std::int64_t tokens, const PerplexityOptions& options) {
  const std::int64_t room = options.context - (options.bos ? 1 : 0);
  const std::int64_t stride = effective_stride(options);
  std::vector<Window> windows;
  std::int64_t scored_to = 0;
  for (std::int64_t start = 0; start < tokens; start += stride) {
    if (options.windows > 0 && static_cast<std::int64_t>(windows.size()) == options.windows) break;
    const std::int64_t end = std::min(start + room, tokens);
    const std::int64_t first = std::max(scored_to, start + (options.bos ? 0 : 1));
    if (first < end) {
      windows.push_back({start, end, first});
      scored_to = end;
    }
    if (end == tokens) break;
  }
  return windows;
}

// Windows of one length make a batch: the last may be shorter than the others.
std::vector<std::span<const Window>> make_batches(std::span<const Window> windows) {
  std::vector<std::span<const Window>> batches;
  const auto length = [](const Window& window) { return window.end - window.start; };
  while (!windows.empty()) {
    std::size_t count = 1;
    while (count < windows.size() && count < kWindowsAtOnce &&
           length(windows[count]) == length(windows[0]))
      ++count;
    batches.push_back(windows.first(count));
    windows = windows.subspan(count);
  }
  return batches;
}

// Sum of -log p over the scored tokens of equally long windows, run as one batch.
double negative_log_likelihood(const Model& model, std::span<const std::int32_t> tokens,
                               std::span<const Window> windows, const PerplexityOptions& options) {
  const std::int64_t length = windows[0].end - windows[0].start;
  const std::int64_t shift = options.bos ? 1 : 0;
  at::Tensor ids =
      at::empty({static_cast<std::int64_t>(windows.size()), length + shift}, at::kLong);
  auto* out = ids.data_ptr<std::int64_t>();
  for (const Window& window : windows) {
    if (options.bos) *out++ = *model.config().bos_id;
    for (std::int64_t i = window.start; i < window.end; ++i)
      *out++ = tokens[static_cast<std::size_t>(i)];
  }
  const at::Tensor hidden = model.hidden(ids);
  double nll = 0;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const std::int64_t first = windows[w].first_scored - windows[w].start + shift,
                       total = length + shift;
    for (std::int64_t at = first; at < total; at += kRowsAtOnce) {
      const std::int64_t rows = std::min(kRowsAtOnce, total - at);
      const at::Tensor row_ids = ids[static_cast<std::int64_t>(w)].narrow(0, at, rows);
      const at::Tensor logits =
          model.logits(hidden[static_cast<std::int64_t>(w)].narrow(0, at - 1, rows));
      nll += at::cross_entropy_loss(logits, row_ids, {}, at::Reduction::None)
                 .sum(at::kDouble)
                 .item<double>();
    }
  }
  return nll;
}

void check(const Model& model, const PerplexityOptions& options) {
  if (options.context < 2)
    fail(ErrorKind::usage, "eval.context is " + std::to_string(options.context) +
                               "; a prediction needs at least 2 tokens");
  if (options.stride < 0 || options.stride > options.context)
    fail(ErrorKind::usage, "eval.stride is " + std::to_string(options.stride) +
                               "; it must lie in 0 (windows share nothing) to eval.context (" +
                               std::to_string(options.context) +
                               "), or tokens between windows would be skipped");
  if (options.bos && !model.config().bos_id)
    fail(ErrorKind::usage, "eval.bos is set, but the model's config.json names no bos_token_id");
}

}  // namespace

double Perplexity::value() const {
  return scored == 0 ? NAN : std::exp(nll / static_cast<double>(scored));
}

Perplexity perplexity(const Model& model, std::span<const std::int32_t> tokens,
                      const PerplexityOptions& options, const std::string& what,
                      const std::function<bool()>& should_stop) {
  c10::InferenceMode inference;
  check(model, options);
  const auto start = Clock::now();
  const auto windows = make_windows(static_cast<std::int64_t>(tokens.size()), options);
  if (windows.empty())
    fail(ErrorKind::input, "text " + quoted(what) + " has " + std::to_string(tokens.size()) +
                               " tokens: not one can be scored; a prediction needs at least 2");
  const auto batches = make_batches(windows);
  const auto count = static_cast<std::int64_t>(batches.size());
  std::vector<Model> replicas;  // of the lanes but the first
  for (std::int64_t lane = 1; lane < lanes(count); ++lane) replicas.push_back(model.replica());
  std::vector<double> nll(batches.size());  // summed in order, whoever is done first
  in_lanes(count, [&](std::int64_t i, std::int64_t lane) {
    if (should_stop && should_stop())
      fail(ErrorKind::interrupted, "interrupted while evaluating " + quoted(what));
    const Model& own = lane == 0 ? model : replicas[static_cast<std::size_t>(lane - 1)];
    const auto at = static_cast<std::size_t>(i);
    nll[at] = negative_log_likelihood(own, tokens, batches[at], options);
  });
  Perplexity result;
  result.nll = std::accumulate(nll.begin(), nll.end(), 0.0);
  result.windows = static_cast<std::int64_t>(windows.size());
  for (const Window& window : windows) {
    result.scored += window.end - window.first_scored;
    result.read += window.end - window.start + (options.bos ? 1 : 0);
  }
  result.seconds = seconds_since(start);
  return result;
}

std::int64_t effective_stride(const PerplexityOptions& options) {
  return options.stride == 0 ? options.context - (options.bos ? 1 : 0) : options.stride;
}

std::string protocol(const PerplexityOptions& options, const Perplexity& result) {
  return std::to_string(result.windows) + " consecutive windows of " +
         std::to_string(options.context) + " tokens, stride " +
         std::to_string(effective_stride(options)) + ", " +
         (options.bos ? "BOS before each" : "no BOS") + ", each from an empty state; " +
         std::to_string(result.scored) + " tokens scored, each once";
}

}  // namespace graft
