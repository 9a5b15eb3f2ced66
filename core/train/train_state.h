#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "core/train/sampler.h"

namespace graft {

// Where a run stands between two steps, beside its tensors. All counters of random numbers derive
// from the seed and these.
struct TrainState {
  std::int64_t stage = 0;       // index into the recipe's stages
  std::int64_t stage_step = 0;  // steps done in it
  std::int64_t step = 0;        // steps done in all
  std::int64_t tokens = 0;      // real tokens trained on in all
  SamplerPosition sampler;      // the stage's
  double seconds = 0;           // spent in training so far, all processes together
  double best = INFINITY;       // the stage's lowest perplexity on held-out text ...
  std::int64_t best_step = -1;  // ... and the step it was measured at; -1 = not yet
};

nlohmann::ordered_json to_json(const TrainState& state);
// Throws Error(input) naming `file` and the key.
TrainState train_state_from_json(const nlohmann::json& json, const std::string& file);

// What differs between a saved run and this one, one line each ("stage.align.lr: was 0.001, is now
// 0.002"); empty when nothing does. Both are objects of objects of strings: part, key, value.
std::string difference(const nlohmann::json& saved, const nlohmann::json& now);

}  // namespace graft
