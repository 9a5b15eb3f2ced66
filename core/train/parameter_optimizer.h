#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "core/train/adamw.h"
#include "core/train/parameter_info.h"

namespace graft {

using TensorsByName = std::map<std::string, at::Tensor>;

// A parameter with its values, and how it is trained.
struct TrainedParameter {
  ParameterInfo info;
  at::Tensor tensor;  // float32, updated in place
  double lr = 0;
  double weight_decay = 0;
};

// AdamW over named parameters, which require a gradient as long as this lives. Its state can be
// saved and loaded by their names.
class ParameterOptimizer {
 public:
  ParameterOptimizer(std::vector<TrainedParameter> parameters, double beta1, double beta2);
  ~ParameterOptimizer();
  ParameterOptimizer(const ParameterOptimizer&) = delete;
  ParameterOptimizer& operator=(const ParameterOptimizer&) = delete;

  const std::vector<TrainedParameter>& parameters() const { return parameters_; }
  void zero_grad() { adamw_.zero_grad(); }
  void scale_gradients(double factor);
  // The norm before; see AdamW.
  double clip(double max_norm) { return adamw_.clip_gradients(max_norm); }
  void step(double lr_factor) { adamw_.step(lr_factor); }

  // "exp_avg/NAME", "exp_avg_sq/NAME" and "steps/NAME"; the tensors are the optimizer's own.
  void save(TensorsByName& out) const;
  // Throws Error(input) naming what is missing or of another shape.
  void load(const TensorsByName& saved);

 private:
  std::vector<TrainedParameter> parameters_;  // in the order AdamW has them
  AdamW adamw_;
};

// Copies a saved tensor over one that is there. Throws Error(input) naming it when it is missing or
// of another shape.
void load_tensor(const TensorsByName& saved, const std::string& name, const at::Tensor& target);

}  // namespace graft
