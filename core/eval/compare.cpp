#include "core/eval/compare.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/eval/generate.h"
#include "core/eval/predictions.h"

namespace graft {
namespace {

at::Tensor ids_of(std::span<const std::int32_t> tokens) {
  at::Tensor ids = at::empty({1, static_cast<std::int64_t>(tokens.size())}, at::kLong);
  std::copy(tokens.begin(), tokens.end(), ids.data_ptr<std::int64_t>());
  return ids;
}

// `n` tokens, repeated from the start where the text is shorter.
at::Tensor repeated(std::span<const std::int32_t> tokens, std::int64_t n) {
  at::Tensor ids = at::empty({1, n}, at::kLong);
  auto* const out = ids.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < n; ++i) out[i] = tokens[static_cast<std::size_t>(i) % tokens.size()];
  return ids;
}

double per_second(double tokens, Clock::time_point start) {
  const double seconds = seconds_since(start);
  return seconds > 0 ? tokens / seconds : 0;
}

void check_contexts(const CompareOptions& options, const ModelConfig& config) {
  const auto check = [&](std::int64_t context, const std::string& key) {
    if (context <= config.max_positions) return;
    fail(ErrorKind::usage, key + ": " + std::to_string(context) +
                               " tokens are more than the teacher's context of " +
                               std::to_string(config.max_positions));
  };
  if (options.context < 2)
    fail(ErrorKind::usage, "eval.context is " + std::to_string(options.context) +
                               "; a prediction needs at least 2 tokens");
  check(options.context, "eval.context");
  for (const std::int64_t context : options.speed_contexts)
    check(context + options.speed_tokens, "speed.contexts (with speed.tokens)");
}

}  // namespace

std::vector<PositionBucket> position_buckets(std::int64_t context) {
  std::vector<PositionBucket> buckets;
  for (std::int64_t first = 1; first < context; first *= 2)
    buckets.push_back({first, std::min(2 * first, context) - 1, 0});
  return buckets;
}

Comparison::Comparison(const Model& teacher, const Tokenizer& tokenizer,
                       std::span<const std::int32_t> tokens, const std::string& what,
                       const CompareOptions& options, std::function<bool()> should_stop)
    : teacher_(teacher), options_(options), tokens_(tokens), should_stop_(std::move(should_stop)) {
  const c10::InferenceMode inference;
  check_contexts(options_, teacher.config());
  const auto context = static_cast<std::size_t>(options_.context);
  const std::size_t there_are = tokens.size() / context;
  if (there_are == 0)
    fail(ErrorKind::input, "text " + quoted(what) + " has " + std::to_string(tokens.size()) +
                               " tokens; one window (eval.context) needs " +
                               std::to_string(context));
  const std::size_t count = options_.windows == 0
                                ? there_are
                                : std::min(there_are, static_cast<std::size_t>(options_.windows));
  needles_ = make_needles(tokenizer, tokens, options_.needle, teacher.config().max_positions);
  if (options_.prompts > 0) {
    const auto behind = static_cast<std::int64_t>(count * context);
    continuations_ = continue_greedily(
        teacher, spread_prompts(tokens, behind, options_.prompts, options_.prompt_length, what),
        options_.continuation);
  }
  for (std::size_t i = 0; i < count; ++i) {
    check_stop();
    const at::Tensor ids = ids_of(tokens.subspan(i * context, context));
    windows_.push_back({ids, teacher.hidden(ids)});
  }
}

void Comparison::check_stop() const {
  if (should_stop_ && should_stop_())
    fail(ErrorKind::interrupted, "interrupted while models were compared");
}

void Comparison::predictions(const Model& model, ModelFigures& figures) const {
  PredictionFigures sum;
  for (const Window& window : windows_) {
    check_stop();
    const PredictionSource teacher{&teacher_.backbone(), window.teacher_rows};
    const bool is_teacher = &model == &teacher_;
    const PredictionSource own{&model.backbone(),
                               is_teacher ? window.teacher_rows : model.hidden(window.ids)};
    sum.add(compare_predictions(own, &teacher, window.ids));
  }
  figures.perplexity = std::exp(sum.mean_nll());
  figures.kl = sum.mean_kl();
  figures.agreement = sum.mean_agreed();
  figures.bits_lost = position_buckets(options_.context);
  for (PositionBucket& bucket : figures.bits_lost) {
    for (std::int64_t at = bucket.first; at <= bucket.last; ++at) {
      const auto i = static_cast<std::size_t>(at);
      bucket.bits_lost += sum.nll[i] - sum.teacher_nll[i];
    }
    bucket.bits_lost /= std::log(2.0) * static_cast<double>(sum.sequences) *
                        static_cast<double>(bucket.last - bucket.first + 1);
  }
}

void Comparison::greedy_agreement(const Model& model, ModelFigures& figures) const {
  if (!continuations_.prompts.defined()) return;
  check_stop();
  const at::Tensor equal = greedy(model, continuations_.prompts, options_.continuation)
                               .eq(continuations_.continuations)
                               .to(at::kDouble)
                               .mean(0);
  for (std::int64_t i = 0; i < equal.size(0); ++i)
    figures.greedy.push_back(equal[i].item<double>());
}

SpeedFigure Comparison::speed(const Model& model, std::int64_t context) const {
  check_stop();
  const at::Tensor ids = repeated(tokens_, context + options_.speed_tokens);
  Decoder decoder(model, 1);
  SpeedFigure figure{context};
  auto start = Clock::now();
  decoder.feed(ids.narrow(1, 0, context));
  figure.prefill_per_second = per_second(static_cast<double>(context), start);
  start = Clock::now();
  for (std::int64_t i = 0; i < options_.speed_tokens; ++i)
    decoder.feed(ids.narrow(1, context + i, 1));
  figure.decode_per_second = per_second(static_cast<double>(options_.speed_tokens), start);
  figure.state_bytes = decoder.bytes();
  return figure;
}

ModelFigures Comparison::measure(const Model& model, const std::string& name) const {
  const c10::InferenceMode inference;
  if (model.config().vocab_size != teacher_.config().vocab_size)
    fail(ErrorKind::input, quoted(name) + " has a vocabulary of " +
                               std::to_string(model.config().vocab_size) + " tokens, the teacher " +
                               std::to_string(teacher_.config().vocab_size) +
                               ": predictions over different tokens cannot be compared");
  ModelFigures figures;
  figures.name = name;
  predictions(model, figures);
  greedy_agreement(model, figures);
  for (const NeedleCase& needles : needles_) {
    check_stop();
    figures.needle.push_back(find_needles(model, needles));
  }
  for (const std::int64_t context : options_.speed_contexts)
    figures.speed.push_back(speed(model, context));
  return figures;
}

std::string to_json(const std::vector<ModelFigures>& models, const CompareOptions& options,
                    const std::map<std::string, std::string>& protocol) {
  using nlohmann::ordered_json;
  ordered_json json = {{"format", "graft.compare/1"},
                       {"context", options.context},
                       {"protocol", protocol},
                       {"models", ordered_json::array()}};
  for (const ModelFigures& model : models) {
    ordered_json row = {{"name", model.name},
                        {"perplexity", model.perplexity},
                        {"kl", model.kl},
                        {"agreement", model.agreement},
                        {"greedy_by_position", model.greedy},
                        {"bits_lost_by_position", ordered_json::array()},
                        {"needle", ordered_json::array()},
                        {"speed", ordered_json::array()}};
    for (const PositionBucket& bucket : model.bits_lost)
      row["bits_lost_by_position"].push_back(
          {{"first", bucket.first}, {"last", bucket.last}, {"bits", bucket.bits_lost}});
    for (const NeedleFigure& needle : model.needle)
      row["needle"].push_back({{"length", needle.length},
                               {"depth", needle.depth},
                               {"found", needle.found},
                               {"bits", needle.bits}});
    for (const SpeedFigure& speed : model.speed)
      row["speed"].push_back({{"context", speed.context},
                              {"prefill_tokens_per_second", speed.prefill_per_second},
                              {"decode_tokens_per_second", speed.decode_per_second},
                              {"state_bytes", speed.state_bytes}});
    json["models"].push_back(std::move(row));
  }
  return json.dump(2) + "\n";
}

}  // namespace graft
