#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/student/model.h"

namespace graft {

// Which K layers keep their attention:
//   uniform    spread evenly over the depth: floor(i L / K); "uniform:k" is layers 0, k, 2k, ...
//   ar         attention removed: one layer's attention gives 0, and the layers whose absence
//   raises
//              the teacher's perplexity most are kept
//   ga-s2      greedy addition: from a student of mixers alone, the layer whose attention lowers
//   its
//              perplexity most is given back, K times
//   swap-kl    one layer's attention is swapped for its mixer, and the layers where that moves the
//              teacher's predictions most (KL(teacher || swapped)) are kept
struct SelectOptions {
  std::string policy = "swap-kl";
  std::int64_t keep = 0;  // K; 0 with "uniform:k" only
};

// One layer's figure: perplexity (ar, ga-s2) or KL in nats per token (swap-kl).
struct LayerScore {
  int layer = 0;
  double score = 0;
  bool kept = false;
  int rank = 0;  // 1 = first to be kept
};

struct LayerSelection {
  std::string policy;
  std::string score;               // what LayerScore::score is, for a reader
  std::vector<int> layers;         // kept, ascending
  std::vector<LayerScore> scores;  // of every layer, ascending; empty for uniform
  double teacher_perplexity = 0;   // on the same text; 0 for uniform
  std::int64_t sequences = 0, tokens_each = 0;
  double seconds = 0;
};

struct SelectHooks {
  std::function<void(std::int64_t units)> begin;           // evaluations to come
  std::function<void(const std::string& note)> evaluated;  // one call at a time, in no order
  std::function<bool()> should_stop;
};

// Does the policy compare layers with their mixers? Throws Error(usage) for an unknown policy, and
// for a K that a model of `n_layers` layers cannot keep.
bool policy_needs_mixers(const SelectOptions& options, std::int64_t n_layers);

// ids [N,T] i64: calibration text, never the text of an evaluation. `mixers`: one for each layer,
// where the policy needs them. Layers before the one at question are the same for every candidate,
// so each evaluation starts at its layer; logits exist for a block of tokens only.
// Throws Error(interrupted) when should_stop says so.
LayerSelection select_layers(const Backbone& teacher, const Model::Mixers& mixers,
                             const at::Tensor& ids, const SelectOptions& options,
                             const SelectHooks& hooks = {});

// The same for the policies that measure nothing: uniform and uniform:k.
LayerSelection uniform_selection(const SelectOptions& options, std::int64_t n_layers);

// What --keep-attention FILE reads: "format", "layers", "n_layers", beside policy and scores.
std::string to_json(const LayerSelection& selection, std::int64_t n_layers,
                    const std::map<std::string, std::string>& provenance);

}  // namespace graft
