#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace graft {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

// AdamW (arXiv 1711.05101) over LibTorch's fused kernel, one group per learning rate and weight
// decay. The fused kernel reads and writes each parameter once per step; torch::optim::AdamW passes
// over memory a dozen times.
class AdamW {
 public:
  // Parameters are float32 and updated in place.
  void add_group(std::vector<at::Tensor> parameters, const AdamWOptions& options);

  // Gradients are the parameters' own; one that is undefined is left alone. Learning rates are
  // multiplied by `lr_factor`.
  void step(double lr_factor);
  void zero_grad();

  // Scales all gradients so that their joint norm is at most `max_norm` (0 = no limit); returns the
  // norm before.
  double clip_gradients(double max_norm);

  // What AdamW knows of each parameter, in the order they were added. The tensors are its own: what
  // is copied into them is loaded.
  struct State {
    at::Tensor exp_avg, exp_avg_sq;
    at::Tensor steps;  // scalar
  };
  std::vector<State> states() const;

 private:
  struct Group {
    AdamWOptions options;
    std::vector<at::Tensor> parameters, exp_avg, exp_avg_sq, steps;
  };
  std::vector<Group> groups_;
};

// Factor of the learning rate at `step` (0-based) of `steps`: linear warm-up, then constant or a
// cosine down to min_ratio. Throws Error(usage) for an unknown schedule.
double lr_factor(const std::string& schedule, std::int64_t step, std::int64_t steps,
                 std::int64_t warmup, double min_ratio);

}  // namespace graft
