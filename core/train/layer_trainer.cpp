#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "core/base/error.h"
#include "core/train/objective_function.h"
#include "core/train/stage_trainer.h"

namespace graft {
namespace {

// One converted block with its optimizer, and what the current step has summed up so far.
class Block {
 public:
  Block(const Stage& stage, std::int64_t layer, TokenMixer& mixer,
        std::vector<TrainedParameter> parameters)
      : stage_(stage),
        layer_(layer),
        mixer_(mixer),
        optimizer_(std::move(parameters), stage.beta1, stage.beta2) {}

  void begin() {
    optimizer_.zero_grad();
    loss_ = weight_ = 0;
    parts_.clear();
  }

  // Adds one batch: gradients times its weight, which end() divides by their sum. The weight is
  // what the objective divided by, so that a step is the same however it is cut into batches;
  // several objectives, which may divide by different things, share that of the tokens.
  void add(const StageObjectives& objectives, const Batch& batch, const at::Tensor& x,
           const at::Tensor& y, const at::Tensor& token_weight) {
    at::AutoGradMode grad(true);
    const at::Tensor out = run_mixer(mixer_, x, stage_.compute);
    double weight = token_weight.defined() ? token_weight.sum(at::kDouble).item<double>()
                                           : static_cast<double>(batch.real);
    at::Tensor total;
    for (const StageObjectives::Item& item : objectives.items()) {
      const bool alone = objectives.items().size() == 1;
      const at::Tensor loss = ObjectiveFunction(*item.objective)
                                  .loss({{GRAFT_SIGNAL_STUDENT_HIDDEN, out},
                                         {GRAFT_SIGNAL_TEACHER_HIDDEN, y},
                                         {GRAFT_SIGNAL_LOSS_MASK, batch.mask},
                                         {GRAFT_SIGNAL_TOKEN_WEIGHT, token_weight}},
                                        1.0, alone ? &weight : nullptr);
      parts_[item.name] += loss.item<double>() * weight;
      const at::Tensor term = loss * item.weight;
      total = total.defined() ? total + term : term;
    }
    loss_ += total.item<double>() * weight;
    weight_ += weight;
    if (std::isfinite(loss_)) (total * weight).backward();
  }

  // The gradients of the step, clipped; returns their norm before.
  double end() {
    if (weight_ > 0) optimizer_.scale_gradients(1 / weight_);
    return optimizer_.clip(stage_.clip);
  }

  void update(double lr_factor) {
    if (stage_.keep_best && loss() < best_loss_) remember();
    optimizer_.step(lr_factor);
  }

  void restore_best() {
    at::NoGradGuard no_grad;
    for (const auto& [name, tensor] : best_) load_tensor(best_, name, parameter(name));
    best_.clear();
    best_loss_ = INFINITY;
  }

  std::int64_t layer() const { return layer_; }
  double loss() const { return weight_ > 0 ? loss_ / weight_ : 0; }
  double part(const std::string& name) const { return weight_ > 0 ? parts_.at(name) / weight_ : 0; }

  void save(TensorsByName& out) const {
    optimizer_.save(out);
    for (const auto& [name, tensor] : best_) out["best/" + name] = tensor;
    if (!best_.empty()) out[best_loss_name()] = at::scalar_tensor(best_loss_, at::kDouble);
  }

  void load(const TensorsByName& saved) {
    optimizer_.load(saved);
    const auto found = saved.find(best_loss_name());
    if (found == saved.end()) return;
    remember();
    for (const auto& [name, tensor] : best_) load_tensor(saved, "best/" + name, tensor);
    best_loss_ = found->second.item<double>();
  }

 private:
  std::string best_loss_name() const { return "best_loss/" + std::to_string(layer_); }

  at::Tensor parameter(const std::string& name) const {
    for (const TrainedParameter& candidate : optimizer_.parameters())
      if (candidate.info.name == name) return candidate.tensor;
    fail(ErrorKind::internal, "layer " + std::to_string(layer_) + " trains no '" + name + "'");
  }

  // The parameters that gave this step's loss.
  void remember() {
    at::NoGradGuard no_grad;
    best_loss_ = loss();
    best_.clear();
    for (const TrainedParameter& trained : optimizer_.parameters())
      best_[trained.info.name] = trained.tensor.detach().clone();
  }

  const Stage& stage_;
  std::int64_t layer_;
  TokenMixer& mixer_;
  ParameterOptimizer optimizer_;
  double loss_ = 0, weight_ = 0;
  std::map<std::string, double> parts_;
  TensorsByName best_;
  double best_loss_ = INFINITY;
};

// The teacher runs once over each batch for all layers; at each converted one the student's block
// runs on the teacher's input and its backward follows at once, so no graph spans layers.
class LayerTrainer final : public StageTrainer {
 public:
  LayerTrainer(const Stage& stage, const Backbone& teacher, const Model::Mixers& mixers,
               const StageObjectives& objectives, std::vector<TrainedParameter> parameters)
      : stage_(stage), teacher_(teacher), objectives_(objectives) {
    std::map<std::int64_t, std::vector<TrainedParameter>> by_layer;
    for (TrainedParameter& parameter : parameters)
      by_layer[parameter.info.layer].push_back(std::move(parameter));
    for (auto& [layer, of_layer] : by_layer)
      blocks_.push_back(
          std::make_unique<Block>(stage, layer, *mixers.at(layer), std::move(of_layer)));
  }

  StepReport step(std::int64_t step, const std::vector<Batch>& batches) override {
    StepReport report;
    for (const auto& block : blocks_) block->begin();
    for (const Batch& batch : batches) {
      run(step, batch);
      report.tokens += batch.real;
    }
    const double factor = stage_.schedule.factor(step);
    report.lr = stage_.lr * factor;
    double square = 0;
    for (const auto& block : blocks_) {
      const double norm = block->end();
      if (!std::isfinite(norm)) fail_not_finite(step, block->layer(), "gradient norm", norm);
      square += norm * norm;
    }
    report.grad_norm = std::sqrt(square);
    for (const auto& block : blocks_) block->update(factor);
    summarise(report);
    return report;
  }

  void finish() override {
    if (!stage_.keep_best) return;
    for (const auto& block : blocks_) block->restore_best();
  }

  void save(TensorsByName& out) const override {
    for (const auto& block : blocks_) block->save(out);
  }
  void load(const TensorsByName& saved) override {
    for (const auto& block : blocks_) block->load(saved);
  }

 private:
  void run(std::int64_t step, const Batch& batch) {
    at::NoGradGuard no_grad;
    at::Tensor h = teacher_.embed(batch.ids);
    std::int64_t layer = 0;
    for (const auto& block : blocks_) {
      for (; layer < block->layer(); ++layer)
        h = teacher_.finish_block(layer, h,
                                  teacher_.attention(layer, teacher_.block_input(layer, h)).y);
      const at::Tensor x = teacher_.block_input(layer, h), y = teacher_.attention(layer, x).y;
      block->add(objectives_, batch, x, y, token_weight(batch, h + y, layer));
      if (!std::isfinite(block->loss())) fail_not_finite(step, layer, "loss", block->loss());
      if (block != blocks_.back()) h = teacher_.finish_block(layer, h, y);
      ++layer;
    }
  }

  // 1/|residual|^2: an error counts by what it does to the stream. The first position carries the
  // massive activation that later layers lean on and would count for nothing by its own norm.
  at::Tensor token_weight(const Batch& batch, const at::Tensor& residual,
                          std::int64_t layer) const {
    if (stage_.token_weight == "none") return {};
    at::Tensor weight = residual.square().sum(-1).clamp_min(1e-12).reciprocal();
    if (layer < stage_.position0_layers) weight.select(1, 0).mul_(1 + stage_.position0_weight);
    return batch.mask.defined() ? weight * batch.mask : weight;
  }

  void summarise(StepReport& report) const {
    const auto count = static_cast<double>(blocks_.size());
    for (const auto& block : blocks_) {
      report.layer_loss[block->layer()] = block->loss();
      report.loss += block->loss() / count;
      for (const StageObjectives::Item& item : objectives_.items())
        report.parts[item.name] += block->part(item.name) / count;
    }
  }

  [[noreturn]] void fail_not_finite(std::int64_t step, std::int64_t layer, const char* what,
                                    double value) const {
    throw NotFinite("stage '" + stage_.name + "', step " + std::to_string(step + 1) + ", layer " +
                    std::to_string(layer) + ": the " + what + " is " + std::to_string(value) +
                    "; a smaller lr may help");
  }

  const Stage& stage_;
  const Backbone& teacher_;
  const StageObjectives& objectives_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace

std::unique_ptr<StageTrainer> make_layer_trainer(const Stage& stage, const Backbone& teacher,
                                                 const Model::Mixers& mixers,
                                                 const StageObjectives& objectives,
                                                 std::vector<TrainedParameter> parameters) {
  return std::make_unique<LayerTrainer>(stage, teacher, mixers, objectives, std::move(parameters));
}

}  // namespace graft
