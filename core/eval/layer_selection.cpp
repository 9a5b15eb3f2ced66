#include "core/eval/layer_selection.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/eval/predictions.h"
#include "core/teacher/lanes.h"

namespace graft {
namespace {

const std::vector<std::string> kPolicies = {"uniform", "uniform:k", "ar", "ga-s2", "swap-kl"};
constexpr std::string_view kUniformStep = "uniform:";

std::optional<std::int64_t> uniform_step(const std::string& policy) {
  if (!policy.starts_with(kUniformStep)) return std::nullopt;
  const std::string_view number = std::string_view(policy).substr(kUniformStep.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), step);
  if (error != std::errc() || end != number.data() + number.size() || step < 1)
    fail(ErrorKind::usage, "policy " + quoted(policy) + ": k must be a whole number of at least 1");
  return step;
}

void check_keep(const SelectOptions& options, std::int64_t n_layers) {
  if (const auto step = uniform_step(options.policy)) {
    if (options.keep != 0)
      fail(ErrorKind::usage, "policy " + quoted(options.policy) +
                                 " says how many layers are kept; with --keep write \"uniform\"");
    if (*step == 1 || n_layers == 1)
      fail(ErrorKind::usage, "policy " + quoted(options.policy) +
                                 " keeps every layer of this model: none would be converted");
    return;
  }
  if (options.keep < 1 || options.keep >= n_layers)
    fail(ErrorKind::usage, "--keep is " + std::to_string(options.keep) + "; of a model of " +
                               std::to_string(n_layers) + " layers 1 to " +
                               std::to_string(n_layers - 1) + " can keep their attention");
}

std::vector<int> uniform_layers(const SelectOptions& options, std::int64_t n_layers) {
  std::vector<int> layers;
  if (const auto step = uniform_step(options.policy)) {
    for (std::int64_t layer = 0; layer < n_layers; layer += *step)
      layers.push_back(static_cast<int>(layer));
  } else {
    for (std::int64_t i = 0; i < options.keep; ++i)
      layers.push_back(static_cast<int>(i * n_layers / options.keep));
  }
  return layers;
}

// Runs variants of the teacher on the same text, several side by side: each lane has its own
// instances of the mixers.
class Variants {
 public:
  Variants(const Backbone& teacher, const Model::Mixers& mixers, const at::Tensor& ids,
           const SelectHooks& hooks)
      : teacher_(teacher), mixers_{mixers}, ids_(ids), hooks_(hooks) {
    while (static_cast<std::int64_t>(mixers_.size()) < lanes(n_layers())) {
      Model::Mixers own;
      for (const auto& [layer, mixer] : mixers) own[layer] = mixer->replica();
      mixers_.push_back(std::move(own));
    }
  }

  std::int64_t n_layers() const { return teacher_.config().n_layers; }
  at::Tensor embed() const { return teacher_.embed(ids_); }

  at::Tensor attention(std::int64_t layer, const at::Tensor& h) const {
    return teacher_.finish_block(layer, h,
                                 teacher_.attention(layer, teacher_.block_input(layer, h)).y);
  }
  at::Tensor mixer(std::int64_t layer, const at::Tensor& h, std::int64_t lane) const {
    const Model::Mixers& own = mixers_[static_cast<std::size_t>(lane)];
    return teacher_.finish_block(layer, h,
                                 own.at(layer)->forward(teacher_.block_input(layer, h)).y);
  }
  // The layer with a block that gives 0.
  at::Tensor bypass(std::int64_t layer, const at::Tensor& h) const {
    return teacher_.finish_block(layer, h, at::zeros_like(h));
  }
  template <class Keeps>
  at::Tensor layer(std::int64_t layer, const at::Tensor& h, Keeps&& keeps,
                   std::int64_t lane) const {
    return keeps(layer) ? attention(layer, h) : mixer(layer, h, lane);
  }
  // Layers from `first` on, with attention where `keeps` says so; then the norm.
  template <class Keeps>
  at::Tensor rest(std::int64_t first, at::Tensor h, Keeps&& keeps, std::int64_t lane) const {
    for (std::int64_t at = first; at < n_layers(); ++at) h = layer(at, h, keeps, lane);
    return teacher_.final_norm(h);
  }
  // The stream before each layer.
  template <class Keeps>
  std::vector<at::Tensor> streams(Keeps&& keeps) const {
    std::vector<at::Tensor> before{embed()};
    for (std::int64_t at = 0; at + 1 < n_layers(); ++at)
      before.push_back(layer(at, before.back(), keeps, 0));
    return before;
  }

  double perplexity_of(const at::Tensor& rows) const {
    return std::exp(compare_predictions({&teacher_, rows}, nullptr, ids_).mean_nll());
  }
  double divergence_of(const at::Tensor& rows, const at::Tensor& teacher_rows) const {
    const PredictionSource teacher{&teacher_, teacher_rows};
    return compare_predictions({&teacher_, rows}, &teacher, ids_).mean_kl();
  }

  // figure_of(layer, h, lane) of each candidate, given the stream h before it.
  template <class FigureOf>
  std::vector<LayerScore> score(const std::vector<std::int64_t>& candidates,
                                std::vector<at::Tensor> before, const std::string& name,
                                FigureOf&& figure_of) const {
    std::vector<LayerScore> scores(candidates.size());
    std::mutex said;
    in_lanes(static_cast<std::int64_t>(candidates.size()), [&](std::int64_t i, std::int64_t lane) {
      if (hooks_.should_stop && hooks_.should_stop())
        fail(ErrorKind::interrupted, "interrupted while layers were selected");
      const std::int64_t at = candidates[static_cast<std::size_t>(i)];
      const at::Tensor h = std::move(before[static_cast<std::size_t>(at)]);
      const double figure = figure_of(at, h, lane);
      scores[static_cast<std::size_t>(i)] = {static_cast<int>(at), figure};
      const std::scoped_lock lock(said);
      say(at, name, figure);
    });
    return scores;
  }

  void begin(std::int64_t units) const {
    if (hooks_.begin) hooks_.begin(units);
  }

 private:
  void say(std::int64_t layer, const std::string& name, double figure) const {
    char text[96];
    std::snprintf(text, sizeof text, "layer %lld, %s %.4g", static_cast<long long>(layer),
                  name.c_str(), figure);
    if (hooks_.evaluated) hooks_.evaluated(text);
  }

  const Backbone& teacher_;
  std::vector<Model::Mixers> mixers_;  // of each lane
  const at::Tensor& ids_;
  const SelectHooks& hooks_;
};

bool always(std::int64_t) { return true; }

// One figure for each layer, from the teacher with something else in that layer.
template <class Instead, class Figure>
std::vector<LayerScore> one_at_a_time(const Variants& variants, Instead&& instead, Figure&& figure,
                                      const std::string& name) {
  std::vector<std::int64_t> layers(static_cast<std::size_t>(variants.n_layers()));
  std::iota(layers.begin(), layers.end(), 0);
  variants.begin(variants.n_layers());
  return variants.score(
      layers, variants.streams(always), name,
      [&](std::int64_t layer, const at::Tensor& h, std::int64_t lane) {
        return figure(variants.rest(layer + 1, instead(layer, h, lane), always, lane));
      });
}

// A variant that gives no number is as bad as can be.
double badness(const LayerScore& score) { return std::isnan(score.score) ? INFINITY : score.score; }

// Keeps the layers of the largest scores; of equals the earlier.
void keep_largest(std::vector<LayerScore>& scores, std::int64_t keep) {
  std::vector<LayerScore*> order;
  for (LayerScore& score : scores) order.push_back(&score);
  std::stable_sort(order.begin(), order.end(), [](const LayerScore* a, const LayerScore* b) {
    return badness(*a) > badness(*b);
  });
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i]->rank = static_cast<int>(i) + 1;
    order[i]->kept = static_cast<std::int64_t>(i) < keep;
  }
}

// Perplexity with each layer's attention given back to the student that keeps `kept`.
std::vector<LayerScore> addition_round(const Variants& variants,
                                       const std::set<std::int64_t>& kept) {
  const auto keeps = [&](std::int64_t layer) { return kept.contains(layer); };
  std::vector<std::int64_t> candidates;
  for (std::int64_t layer = 0; layer < variants.n_layers(); ++layer)
    if (!keeps(layer)) candidates.push_back(layer);
  return variants.score(candidates, variants.streams(keeps), "perplexity",
                        [&](std::int64_t layer, const at::Tensor& h, std::int64_t lane) {
                          return variants.perplexity_of(
                              variants.rest(layer + 1, variants.attention(layer, h), keeps, lane));
                        });
}

std::vector<LayerScore> add_greedily(const Variants& variants, std::int64_t keep) {
  std::int64_t units = 0;
  for (std::int64_t round = 0; round < keep; ++round) units += variants.n_layers() - round;
  variants.begin(units);
  std::vector<LayerScore> scores(static_cast<std::size_t>(variants.n_layers()));
  std::set<std::int64_t> kept;
  for (std::int64_t round = 0; round < keep; ++round) {
    const LayerScore* best = nullptr;
    const auto tried = addition_round(variants, kept);
    for (const LayerScore& score : tried) {
      scores[static_cast<std::size_t>(score.layer)] = score;
      if (best == nullptr || badness(score) < badness(*best)) best = &score;
    }
    LayerScore& added = scores[static_cast<std::size_t>(best->layer)];
    added.kept = true;
    added.rank = static_cast<int>(round) + 1;
    kept.insert(added.layer);
  }
  // The others by their figure of the last round.
  std::vector<LayerScore*> others;
  for (LayerScore& score : scores)
    if (!score.kept) others.push_back(&score);
  std::stable_sort(others.begin(), others.end(), [](const LayerScore* a, const LayerScore* b) {
    return badness(*a) < badness(*b);
  });
  for (std::size_t i = 0; i < others.size(); ++i)
    others[i]->rank = static_cast<int>(keep) + static_cast<int>(i) + 1;
  return scores;
}

void score_layers(const Backbone& teacher, const Model::Mixers& mixers, const at::Tensor& ids,
                  const SelectOptions& options, const SelectHooks& hooks, LayerSelection& result) {
  const Variants variants(teacher, mixers, ids, hooks);
  const at::Tensor teacher_rows = variants.rest(0, variants.embed(), always, 0);
  result.teacher_perplexity = variants.perplexity_of(teacher_rows);
  if (options.policy == "ar") {
    result.score = "perplexity of the teacher without this layer's attention";
    result.scores = one_at_a_time(
        variants,
        [&](std::int64_t layer, const at::Tensor& h, std::int64_t) {
          return variants.bypass(layer, h);
        },
        [&](const at::Tensor& rows) { return variants.perplexity_of(rows); }, "perplexity");
    keep_largest(result.scores, options.keep);
  } else if (options.policy == "swap-kl") {
    result.score =
        "KL(teacher || teacher with this layer's mixer in place of attention), nats per token";
    result.scores = one_at_a_time(
        variants,
        [&](std::int64_t layer, const at::Tensor& h, std::int64_t lane) {
          return variants.mixer(layer, h, lane);
        },
        [&](const at::Tensor& rows) { return variants.divergence_of(rows, teacher_rows); }, "KL");
    keep_largest(result.scores, options.keep);
  } else {
    result.score =
        "perplexity of the student when this layer's attention was given back, in the round that "
        "kept it or the last one";
    result.scores = add_greedily(variants, options.keep);
  }
  for (const LayerScore& score : result.scores)
    if (score.kept) result.layers.push_back(score.layer);
}

bool is_uniform(const std::string& policy) { return policy.starts_with("uniform"); }

}  // namespace

bool policy_needs_mixers(const SelectOptions& options, std::int64_t n_layers) {
  const std::string& policy = options.policy;
  if (!policy.starts_with(kUniformStep) &&
      std::find(kPolicies.begin(), kPolicies.end(), policy) == kPolicies.end())
    fail(ErrorKind::usage, "unknown policy " + quoted(policy) + did_you_mean(policy, kPolicies));
  check_keep(options, n_layers);
  return policy == "ga-s2" || policy == "swap-kl";
}

LayerSelection uniform_selection(const SelectOptions& options, std::int64_t n_layers) {
  policy_needs_mixers(options, n_layers);
  LayerSelection result;
  result.policy = options.policy;
  result.score = "none: the layers are spread over the depth";
  result.layers = uniform_layers(options, n_layers);
  return result;
}

LayerSelection select_layers(const Backbone& teacher, const Model::Mixers& mixers,
                             const at::Tensor& ids, const SelectOptions& options,
                             const SelectHooks& hooks) {
  const auto start = Clock::now();
  const std::int64_t n_layers = teacher.config().n_layers;
  const bool needs_mixers = policy_needs_mixers(options, n_layers);
  if (needs_mixers && static_cast<std::int64_t>(mixers.size()) != n_layers)
    fail(ErrorKind::internal, "policy " + quoted(options.policy) + " compares " +
                                  std::to_string(n_layers) + " layers, but only " +
                                  std::to_string(mixers.size()) + " were converted");
  if (is_uniform(options.policy)) return uniform_selection(options, n_layers);
  const c10::InferenceMode inference;
  LayerSelection result;
  result.policy = options.policy;
  result.sequences = ids.size(0);
  result.tokens_each = ids.size(1);
  score_layers(teacher, mixers, ids, options, hooks, result);
  result.seconds = seconds_since(start);
  return result;
}

std::string to_json(const LayerSelection& selection, std::int64_t n_layers,
                    const std::map<std::string, std::string>& provenance) {
  using nlohmann::ordered_json;
  ordered_json json = {{"format", "graft.layers/1"}, {"policy", selection.policy},
                       {"n_layers", n_layers},       {"layers", selection.layers},
                       {"score", selection.score},   {"scores", ordered_json::array()}};
  for (const LayerScore& score : selection.scores) {
    // JSON has no infinity: a variant beyond all bounds has no figure.
    const ordered_json value =
        std::isfinite(score.score) ? ordered_json(score.score) : ordered_json(nullptr);
    json["scores"].push_back(
        {{"layer", score.layer}, {"score", value}, {"kept", score.kept}, {"rank", score.rank}});
  }
  if (!selection.scores.empty()) {
    json["teacher_perplexity"] = selection.teacher_perplexity;
    json["text"] = {{"sequences", selection.sequences}, {"tokens_each", selection.tokens_each}};
  }
  json["seconds"] = selection.seconds;
  json["provenance"] = provenance;
  return json.dump(2) + "\n";
}

}  // namespace graft
