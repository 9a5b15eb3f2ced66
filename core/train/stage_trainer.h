#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/student/model.h"
#include "core/train/batch.h"
#include "core/train/parameter_optimizer.h"
#include "core/train/stage.h"

namespace graft {

class PluginRegistry;

// One optimizer step. Losses are sums over the real tokens of all its micro-batches over their
// number.
struct StepReport {
  double loss = 0;                            // layer scope: the mean over layers
  std::map<std::string, double> parts;        // by objective, before its weight
  std::map<std::int64_t, double> layer_loss;  // layer scope
  double lr = 0;                              // of the stage; groups have their own
  double grad_norm = 0;                       // before clipping, of all parameters together
  std::int64_t tokens = 0;                    // real ones
};

// A loss or gradient that is not finite.
class NotFinite : public Error {
 public:
  explicit NotFinite(const std::string& message) : Error(ErrorKind::internal, message) {}
};

// Trains what a stage trains, step by step. Borrows models and objectives; parameters require a
// gradient as long as it lives.
class StageTrainer {
 public:
  virtual ~StageTrainer() = default;

  // One step on the batches of all its micro-batches. `step` counts from 0 within the stage. A loss
  // or gradient that is not finite throws NotFinite naming step and layer (or model) before
  // anything is updated.
  virtual StepReport step(std::int64_t step, const std::vector<Batch>& batches) = 0;
  // Behind the last step.
  virtual void finish() {}

  // Everything beside the parameters themselves that the next step depends on.
  virtual void save(TensorsByName& out) const = 0;
  virtual void load(const TensorsByName& saved) = 0;
};

// The objectives of a stage, made and checked: a signal that the stage's scope does not provide is
// an Error(usage) naming objective, signal, and the scope that has it.
class StageObjectives {
 public:
  StageObjectives(PluginRegistry& registry, const Stage& stage);

  struct Item {
    std::string name;  // unique: the alias, numbered when it is there twice
    double weight = 1;
    std::unique_ptr<Objective> objective;
  };
  const std::vector<Item>& items() const { return items_; }
  bool need(const std::string& signal) const;

 private:
  std::vector<Item> items_;
};

// What a layer's mixer gives for x in the precision of `compute`: in bfloat16 when both want it,
// parameters, states and y being float32 in any case.
at::Tensor run_mixer(TokenMixer& mixer, const at::Tensor& x, Compute compute);

// `parameters` hold the mixers' tensors. Teacher and mixers are borrowed.
std::unique_ptr<StageTrainer> make_layer_trainer(const Stage& stage, const Backbone& teacher,
                                                 const Model::Mixers& mixers,
                                                 const StageObjectives& objectives,
                                                 std::vector<TrainedParameter> parameters);

// `parameters` hold tensors of the student's mixers and backbone. All are borrowed.
std::unique_ptr<StageTrainer> make_model_trainer(const Stage& stage, const Backbone& teacher,
                                                 const Model& student,
                                                 const StageObjectives& objectives,
                                                 std::vector<TrainedParameter> parameters);

}  // namespace graft
