#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "core/abi/component.h"

namespace graft {

// Runs an objective with the workspace it asks for.
void run_objective(const Objective& objective, const graft_objective_args& args);

// An objective plugin as a scalar of LibTorch's graph. Borrows the objective.
class ObjectiveFunction {
 public:
  explicit ObjectiveFunction(const Objective& objective) : objective_(objective) {}

  // Signals by name (GRAFT_SIGNAL_*); undefined ones count as absent, those the objective does not
  // name are not used. Gradients flow to the signals it wants them for. Throws Error(plugin) naming
  // a required signal that is missing. `weight`: left as it is, or what the objective says it
  // divided its sum by.
  at::Tensor loss(const std::map<std::string, at::Tensor>& signals, double grad_scale = 1.0,
                  double* weight = nullptr) const;

 private:
  const Objective& objective_;
};

}  // namespace graft
