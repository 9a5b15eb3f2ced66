#include "core/train/adamw.h"

#include <ATen/Functions.h>
#include <ATen/ops/_fused_adamw.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/base/error.h"

namespace graft {

void AdamW::add_group(std::vector<at::Tensor> parameters, const AdamWOptions& options) {
  if (parameters.empty()) return;
  Group group{options, std::move(parameters), {}, {}, {}};
  for (const at::Tensor& parameter : group.parameters) {
    group.exp_avg.push_back(at::zeros_like(parameter));
    group.exp_avg_sq.push_back(at::zeros_like(parameter));
    group.steps.push_back(at::zeros({}, at::kFloat));
  }
  groups_.push_back(std::move(group));
}

void AdamW::step(double lr_factor) {
  at::NoGradGuard no_grad;
  for (Group& group : groups_) {
    std::vector<at::Tensor> parameters, gradients, exp_avg, exp_avg_sq, steps;
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      if (!group.parameters[i].grad().defined()) continue;
      group.steps[i].add_(1);
      parameters.push_back(group.parameters[i].detach());
      gradients.push_back(group.parameters[i].grad());
      exp_avg.push_back(group.exp_avg[i]);
      exp_avg_sq.push_back(group.exp_avg_sq[i]);
      steps.push_back(group.steps[i]);
    }
    if (parameters.empty()) continue;
    const AdamWOptions& o = group.options;
    at::_fused_adamw_(parameters, gradients, exp_avg, exp_avg_sq, {}, steps, o.lr * lr_factor,
                      o.beta1, o.beta2, o.weight_decay, o.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  }
}

void AdamW::zero_grad() {
  for (Group& group : groups_)
    for (at::Tensor& parameter : group.parameters) parameter.mutable_grad().reset();
}

double AdamW::clip_gradients(double max_norm) {
  at::NoGradGuard no_grad;
  double square = 0;
  for (const Group& group : groups_)
    for (const at::Tensor& parameter : group.parameters)
      if (parameter.grad().defined())
        square += std::pow(at::norm(parameter.grad()).item<double>(), 2);
  const double norm = std::sqrt(square);
  if (max_norm > 0 && norm > max_norm)
    for (Group& group : groups_)
      for (at::Tensor& parameter : group.parameters)
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(max_norm / (norm + 1e-6));
  return norm;
}

std::vector<AdamW::State> AdamW::states() const {
  std::vector<State> states;
  for (const Group& group : groups_)
    for (std::size_t i = 0; i < group.parameters.size(); ++i)
      states.push_back({group.exp_avg[i], group.exp_avg_sq[i], group.steps[i]});
  return states;
}

double lr_factor(const std::string& schedule, std::int64_t step, std::int64_t steps,
                 std::int64_t warmup, double min_ratio) {
  const double warm =
      warmup > 0 ? std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(warmup)) : 1.0;
  if (schedule == "constant") return warm;
  if (schedule != "cosine")
    fail(ErrorKind::usage, "calibrate.schedule is '" + schedule + "'; it takes constant or cosine");
  const double phase = std::numbers::pi * static_cast<double>(step) /
                       static_cast<double>(std::max<std::int64_t>(steps, 1));
  return warm * (0.5 + 0.5 * std::cos(phase)) * (1 - min_ratio) + min_ratio;
}

}  // namespace graft
