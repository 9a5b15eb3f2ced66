#include "core/train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/base/error.h"

namespace graft {

double LrSchedule::factor(std::int64_t step) const {
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (kind == "constant") return 1;
  const auto falling = [&](std::int64_t from, double at_start) {
    const auto length = static_cast<double>(std::max<std::int64_t>(steps - from, 1));
    return std::clamp(static_cast<double>(step - from) / length, 0.0, 1.0) * at_start;
  };
  if (kind == "cosine") {
    const double phase = falling(warmup, std::numbers::pi);
    return min_ratio + (1 - min_ratio) * (0.5 + 0.5 * std::cos(phase));
  }
  if (kind != "wsd")
    fail(ErrorKind::usage, "schedule is '" + kind + "'; it takes constant, cosine or wsd");
  const std::int64_t decay = decay_steps > 0 ? decay_steps : std::max<std::int64_t>(steps / 10, 1);
  const std::int64_t from = std::max(steps - decay, warmup);
  return step < from ? 1 : 1 - falling(from, 1 - min_ratio);
}

}  // namespace graft
