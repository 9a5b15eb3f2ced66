#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/abi/component.h"

namespace graft {

class TokenMixer;

// Asked between steps, by several threads at once; true ends the work with Error(interrupted). May
// be empty.
using StopCheck = std::function<bool()>;

// Layer-local training of one converted block on the teacher's inputs and outputs.
struct CalibrateOptions {
  std::int64_t tokens =
      24576;  // calibration tokens; those of the initializer are the first of them
  std::int64_t steps = 100;
  std::int64_t batch = 2;  // sequences in a step; 0 = all of them in each step
  double lr = 1e-3;
  std::map<std::string, double> lr_roles;  // role ("query" or "graft.role.query") -> learning rate
  std::vector<std::string> frozen_roles;   // roles that do not train
  std::string schedule = "cosine";         // constant | cosine
  std::int64_t warmup = 10;                // steps of linear warm-up
  double min_lr_ratio = 0.05;              // the cosine's floor, of lr
  double beta1 = 0.9, beta2 = 0.999;
  double weight_decay = 0.01;
  double clip = 1.0;       // gradient norm, 0 = none
  bool keep_best = false;  // keep the parameters of the lowest loss (full batches only)
  std::string token_weight = "residual";  // none | residual: 1/|residual|^2, mean 1
  double position0_weight = 64;           // how much more the first position counts ...
  std::int64_t position0_layers = 12;     // ... in the first layers
  std::string objective;                  // plugin id or alias
  std::map<std::string, OptionValue> objective_options;
};

struct CalibrateReport {
  std::int64_t steps = 0;
  std::int64_t tokens = 0;  // tokens processed over all steps
  double first_loss = 0;
  double last_loss = 0;
  double seconds = 0;
  std::vector<std::string> trained;  // parameter names, in param_specs order
};

// x, y: inputs and outputs of the teacher's block, weight: per token, all [N,T,...] float32. Trains
// the mixer's parameters in place. Throws Error(internal) naming layer and step when the loss is
// not finite; the parameters are then those of the step before.
CalibrateReport calibrate(TokenMixer& mixer, const Objective& objective,
                          const CalibrateOptions& options, const at::Tensor& x, const at::Tensor& y,
                          const at::Tensor& token_weight, std::uint64_t seed,
                          const StopCheck& should_stop);

}  // namespace graft
