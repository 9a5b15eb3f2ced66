#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/teacher/backbone.h"
#include "core/train/convert.h"
#include "core/train/lr_schedule.h"

namespace graft {

// layer: each converted block alone, on the teacher's input and against the teacher's output.
// model: the student end to end.
enum class StageScope { layer, model };

struct ObjectiveChoice {
  PluginChoice plugin;
  double weight = 1;
  std::string where{};  // for messages; empty = the stage's
};

// Parameters with a learning rate or weight decay of their own; negative = the stage's.
struct GroupChoice {
  std::vector<std::string> match;  // selectors, see select_parameters()
  double lr = -1;
  double weight_decay = -1;
  std::string where;  // for messages
};

// More tokens than any run will see; below it no sum of a run's stages leaves 64 bits.
constexpr std::int64_t kMostTokens = 1'000'000'000'000'000;

// The largest number there is where the product does not fit.
inline std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

// One stage of a run: what it starts from, what it trains and for how long.
struct Stage {
  std::string name;
  std::string where;                            // the row in the recipe, for messages
  std::map<std::string, std::string> places{};  // key -> where it was given, for messages
  StageScope scope = StageScope::layer;

  // A new mixer and what fills it; neither = the student of the stage before.
  std::optional<PluginChoice> mixer, init;
  bool init_from_student = false;  // the initializer reads the stage before, not the teacher
  std::int64_t init_tokens = 16384, init_window = 256;

  std::int64_t steps = 1;  // 0: the start alone
  std::int64_t batch = 4, context = 256, accumulate = 1;
  std::int64_t pool = 0;  // tokens of text it draws from, 0 = all
  std::int64_t eval_every = 0, checkpoint_every = 0;

  std::vector<ObjectiveChoice> objectives;
  std::vector<std::string> train{"mixers"};
  std::vector<GroupChoice> groups;  // the first that matches counts
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, weight_decay = 0.01, clip = 1;
  LrSchedule schedule;

  Compute compute = Compute::float32;
  bool recompute = false;  // model scope
  bool keep_best = false;  // layer scope
  std::string token_weight = "none";
  double position0_weight = 0;
  std::int64_t position0_layers = 12;

  // The place of a key, or of the row where the key has its default.
  const std::string& place(const std::string& key) const {
    const auto found = places.find(key);
    return found == places.end() ? where : found->second;
  }
  // Both saturate: a product too large for 64 bits is refused when the run is planned.
  std::int64_t tokens_per_step() const {
    return saturating_product(saturating_product(batch, context), accumulate);
  }
  std::int64_t tokens() const { return saturating_product(steps, tokens_per_step()); }
};

}  // namespace graft
