#include "core/train/parameter_optimizer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <sstream>
#include <tuple>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

std::string text_of(at::IntArrayRef shape) {
  std::ostringstream text;
  text << shape;
  return text.str();
}

}  // namespace

void load_tensor(const TensorsByName& saved, const std::string& name, const at::Tensor& target) {
  const auto found = saved.find(name);
  if (found == saved.end())
    fail(ErrorKind::input, "the checkpoint has no tensor " + quoted(name) +
                               ", which this recipe's student or optimizer has");
  if (found->second.sizes() != target.sizes())
    fail(ErrorKind::input, "the checkpoint's tensor " + quoted(name) + " has shape " +
                               text_of(found->second.sizes()) + ", expected " +
                               text_of(target.sizes()));
  at::NoGradGuard no_grad;
  at::Tensor into = target;
  into.copy_(found->second);
}

ParameterOptimizer::ParameterOptimizer(std::vector<TrainedParameter> parameters, double beta1,
                                       double beta2)
    : parameters_(std::move(parameters)) {
  const auto rates = [](const TrainedParameter& p) { return std::tuple(p.lr, p.weight_decay); };
  // Parameters of equal rates side by side: each group is one call of the fused kernel.
  std::stable_sort(
      parameters_.begin(), parameters_.end(),
      [&](const TrainedParameter& a, const TrainedParameter& b) { return rates(a) < rates(b); });
  for (std::size_t first = 0, end = 0; first < parameters_.size(); first = end) {
    std::vector<at::Tensor> group;
    for (; end < parameters_.size() && rates(parameters_[end]) == rates(parameters_[first]);
         ++end) {
      parameters_[end].tensor.set_requires_grad(true);
      group.push_back(parameters_[end].tensor);
    }
    const auto [lr, weight_decay] = rates(parameters_[first]);
    adamw_.add_group(std::move(group), {lr, beta1, beta2, 1e-8, weight_decay});
  }
}

ParameterOptimizer::~ParameterOptimizer() {
  for (TrainedParameter& parameter : parameters_) {
    parameter.tensor.mutable_grad().reset();
    parameter.tensor.set_requires_grad(false);
  }
}

void ParameterOptimizer::scale_gradients(double factor) {
  at::NoGradGuard no_grad;
  for (TrainedParameter& parameter : parameters_)
    if (parameter.tensor.grad().defined()) parameter.tensor.mutable_grad().mul_(factor);
}

void ParameterOptimizer::save(TensorsByName& out) const {
  const auto states = adamw_.states();
  for (std::size_t i = 0; i < states.size(); ++i) {
    const std::string& name = parameters_[i].info.name;
    out["exp_avg/" + name] = states[i].exp_avg;
    out["exp_avg_sq/" + name] = states[i].exp_avg_sq;
    out["steps/" + name] = states[i].steps;
  }
}

void ParameterOptimizer::load(const TensorsByName& saved) {
  TensorsByName own;
  save(own);
  for (const auto& [name, tensor] : own) load_tensor(saved, name, tensor);
}

}  // namespace graft
