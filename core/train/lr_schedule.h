#pragma once

#include <cstdint>
#include <string>

namespace graft {

// The learning rate over a stage, as a factor of its peak.
struct LrSchedule {
  std::string kind = "cosine";  // constant | cosine | wsd (warm up, stay, decay)
  std::int64_t steps = 1;
  std::int64_t warmup = 0;       // steps of linear warm-up
  std::int64_t decay_steps = 0;  // wsd: steps of the decay at the end; 0 = a tenth of the steps
  double min_ratio = 0;          // where cosine and wsd end

  // `step` from 0. Warm-up reaches 1 with its last step. The cosine runs over the steps behind the
  // warm-up; wsd's decay is linear.
  double factor(std::int64_t step) const;
};

}  // namespace graft
