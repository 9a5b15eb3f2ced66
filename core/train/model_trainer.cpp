#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "core/base/error.h"
#include "core/train/logit_loss.h"
#include "core/train/recompute.h"
#include "core/train/stage_trainer.h"

namespace graft {
namespace {

class ModelTrainer final : public StageTrainer {
 public:
  ModelTrainer(const Stage& stage, const Backbone& teacher, const Model& student,
               const StageObjectives& objectives, std::vector<TrainedParameter> parameters)
      : stage_(stage),
        teacher_(teacher),
        student_(student),
        optimizer_(std::move(parameters), stage.beta1, stage.beta2),
        wants_teacher_(objectives.need(GRAFT_SIGNAL_TEACHER_LOGITS)) {
    for (const StageObjectives::Item& item : objectives.items())
      objectives_.push_back({item.objective.get(), item.name, item.weight});
  }

  StepReport step(std::int64_t step, const std::vector<Batch>& batches) override {
    at::AutoGradMode grad(true);
    optimizer_.zero_grad();
    StepReport report;
    double labelled = 0;
    for (const Batch& batch : batches) labelled += static_cast<double>(batch.labelled);
    for (const Batch& batch : batches) {
      if (batch.labelled > 0) add(step, batch, labelled, report);
      report.tokens += batch.real;
    }
    report.grad_norm = optimizer_.clip(stage_.clip);
    if (!std::isfinite(report.grad_norm))
      fail_not_finite(step, where_the_gradient_broke(), "gradient norm", report.grad_norm);
    const double factor = stage_.schedule.factor(step);
    report.lr = stage_.lr * factor;
    optimizer_.step(factor);
    return report;
  }

  void save(TensorsByName& out) const override { optimizer_.save(out); }
  void load(const TensorsByName& saved) override { optimizer_.load(saved); }

 private:
  void add(std::int64_t step, const Batch& batch, double labelled, StepReport& report) {
    LogitLossInput input;
    if (wants_teacher_) {
      at::NoGradGuard no_grad;
      input.teacher_rows = teacher_.hidden(batch.ids);
      input.teacher = &teacher_;
    }
    input.student_rows = student_rows(batch.ids);
    input.student = &student_.backbone();
    input.labels = batch.labels;
    const LogitLoss loss = logit_loss(input, objectives_, labelled);
    const double value = loss.loss.item<double>();
    if (!std::isfinite(value)) fail_not_finite(step, where_the_stream_broke(batch), "loss", value);
    if (loss.loss.requires_grad()) loss.loss.backward();
    report.loss += value;
    for (const auto& [name, part] : loss.parts) report.parts[name] += part * loss.tokens / labelled;
  }

  at::Tensor student_rows(const at::Tensor& ids) const {
    const Backbone& backbone = student_.backbone();
    at::Tensor h = backbone.embed(ids);
    for (std::int64_t layer = 0; layer < student_.config().n_layers; ++layer) {
      const auto run = [this, layer](const at::Tensor& x) { return run_layer(layer, x); };
      h = stage_.recompute ? recompute(run, h) : run(h);
    }
    return backbone.final_norm(h);
  }

  at::Tensor run_layer(std::int64_t layer, const at::Tensor& h) const {
    const Backbone& backbone = student_.backbone();
    const at::Tensor x = backbone.block_input(layer, h);
    const auto mixer = student_.mixers().find(layer);
    const at::Tensor y = mixer == student_.mixers().end()
                             ? backbone.attention(layer, x).y
                             : run_mixer(*mixer->second, x, stage_.compute);
    return backbone.finish_block(layer, h, y);
  }

  // The first layer whose output is not finite.
  std::string where_the_stream_broke(const Batch& batch) const {
    at::NoGradGuard no_grad;
    at::Tensor h = student_.backbone().embed(batch.ids);
    if (!all_finite(h)) return "embeddings";
    for (std::int64_t layer = 0; layer < student_.config().n_layers; ++layer) {
      h = run_layer(layer, h);
      if (!all_finite(h)) return "layer " + std::to_string(layer);
    }
    return "logits";
  }

  // Gradients come from above: the last layer that has one that is not finite.
  std::string where_the_gradient_broke() const {
    const TrainedParameter* last = nullptr;
    for (const TrainedParameter& parameter : optimizer_.parameters()) {
      const at::Tensor& gradient = parameter.tensor.grad();
      if (!gradient.defined() || all_finite(gradient)) continue;
      if (last == nullptr || parameter.info.layer >= last->info.layer) last = &parameter;
    }
    if (last == nullptr) return "whole model";
    return last->info.layer < 0
               ? last->info.name
               : "layer " + std::to_string(last->info.layer) + " (" + last->info.name + ")";
  }

  static bool all_finite(const at::Tensor& values) {
    return at::isfinite(values).all().item<bool>();
  }

  [[noreturn]] void fail_not_finite(std::int64_t step, const std::string& where, const char* what,
                                    double value) const {
    throw NotFinite("stage '" + stage_.name + "', step " + std::to_string(step + 1) + ", " + where +
                    ": the " + what + " is " + std::to_string(value) + "; a smaller lr may help");
  }

  const Stage& stage_;
  const Backbone& teacher_;
  const Model& student_;
  ParameterOptimizer optimizer_;
  std::vector<WeightedObjective> objectives_;
  bool wants_teacher_;
};

}  // namespace

std::unique_ptr<StageTrainer> make_model_trainer(const Stage& stage, const Backbone& teacher,
                                                 const Model& student,
                                                 const StageObjectives& objectives,
                                                 std::vector<TrainedParameter> parameters) {
  return std::make_unique<ModelTrainer>(stage, teacher, student, objectives, std::move(parameters));
}

}  // namespace graft
