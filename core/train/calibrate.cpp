#include "core/train/calibrate.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/student/token_mixer.h"
#include "core/train/adamw.h"
#include "core/train/objective_function.h"

namespace graft {
namespace {

constexpr const char* kRolePrefix = "graft.role.";

bool names_role(const std::string& given, const std::string& role) {
  return given == role || kRolePrefix + given == role;
}

// Throws when `given` is no role of the mixer: a typo must not silently train (or freeze) something
// else.
void require_role(const TokenMixer& mixer, const std::string& given, const std::string& key) {
  std::vector<std::string> known;
  for (const MixerParameter& parameter : mixer.parameters()) {
    if (names_role(given, parameter.role)) return;
    std::string role = parameter.role;
    if (role.starts_with(kRolePrefix)) role.erase(0, std::string(kRolePrefix).size());
    if (std::find(known.begin(), known.end(), role) == known.end()) known.push_back(role);
  }
  fail(ErrorKind::usage, key + ": mixer '" + mixer.plugin().label() +
                             "' has no parameter of role '" + given + "'" +
                             did_you_mean(given, known));
}

class Trainer {
 public:
  Trainer(TokenMixer& mixer, const CalibrateOptions& options, CalibrateReport& report)
      : mixer_(mixer), options_(options) {
    for (const std::string& role : options.frozen_roles)
      require_role(mixer, role, "calibrate.frozen_roles");
    for (const auto& [role, lr] : options.lr_roles) require_role(mixer, role, "calibrate.lr_roles");
    for (const MixerParameter& parameter : mixer.parameters()) {
      if (!trains(parameter)) continue;
      at::Tensor tensor = parameter.tensor;
      tensor.set_requires_grad(true);
      const bool decays = (parameter.spec->flags & GRAFT_P_NO_DECAY) == 0;
      optimizer_.add_group({tensor}, {lr_of(parameter), options.beta1, options.beta2, 1e-8,
                                      decays ? options.weight_decay : 0.0});
      report.trained.push_back(parameter.name);
    }
    if (report.trained.empty())
      fail(ErrorKind::usage,
           "calibrate.frozen_roles freezes every parameter of mixer '" + mixer.plugin().label() +
               "': nothing is left to train; set calibrate.enabled = false instead");
  }

  ~Trainer() {
    for (const MixerParameter& parameter : mixer_.parameters()) {
      at::Tensor tensor = parameter.tensor;
      tensor.mutable_grad().reset();
      tensor.set_requires_grad(false);
    }
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  double step(const ObjectiveFunction& objective, const at::Tensor& x, const at::Tensor& y,
              const at::Tensor& weight, std::int64_t step) {
    optimizer_.zero_grad();
    const MixerOutput out = mixer_.forward(x);
    const at::Tensor loss = objective.loss({{GRAFT_SIGNAL_STUDENT_HIDDEN, out.y},
                                            {GRAFT_SIGNAL_TEACHER_HIDDEN, y},
                                            {GRAFT_SIGNAL_TOKEN_WEIGHT, weight}});
    const double value = loss.item<double>();
    if (!std::isfinite(value)) return value;
    loss.backward();
    optimizer_.clip_gradients(options_.clip);
    if (options_.keep_best && value < best_loss_) remember(value);
    optimizer_.step(
        lr_factor(options_.schedule, step, options_.steps, options_.warmup, options_.min_lr_ratio));
    return value;
  }

  void restore_best() {
    if (best_.empty()) return;
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < best_.size(); ++i) {
      at::Tensor tensor = mixer_.parameters()[i].tensor;
      tensor.copy_(best_[i]);
    }
  }

 private:
  bool trains(const MixerParameter& parameter) const {
    const bool frozen =
        std::any_of(options_.frozen_roles.begin(), options_.frozen_roles.end(),
                    [&](const std::string& role) { return names_role(role, parameter.role); });
    return (parameter.spec->flags & GRAFT_P_TRAINABLE) != 0 && !frozen;
  }

  double lr_of(const MixerParameter& parameter) const {
    for (const auto& [role, lr] : options_.lr_roles)
      if (names_role(role, parameter.role)) return lr;
    return options_.lr;
  }

  void remember(double loss) {
    at::NoGradGuard no_grad;
    best_loss_ = loss;
    best_.clear();
    for (const MixerParameter& parameter : mixer_.parameters())
      best_.push_back(parameter.tensor.detach().clone());
  }

  TokenMixer& mixer_;
  const CalibrateOptions& options_;
  AdamW optimizer_;
  double best_loss_ = INFINITY;
  std::vector<at::Tensor> best_;
};

// Sequences in an order drawn anew for each pass over them; the last, short batch of a pass is not
// used.
class BatchOrder {
 public:
  BatchOrder(std::int64_t count, std::int64_t batch, std::uint64_t seed)
      : batch_(batch), engine_(seed) {
    order_.resize(static_cast<std::size_t>(count));
    std::iota(order_.begin(), order_.end(), 0);
    next_ = order_.size();
  }

  at::Tensor next() {
    const auto batch = static_cast<std::size_t>(batch_);
    if (next_ + batch > order_.size()) {
      // Fisher-Yates by hand: std::shuffle may differ between standard libraries.
      for (std::size_t i = order_.size() - 1; i > 0; --i)
        std::swap(order_[i], order_[engine_() % (i + 1)]);
      next_ = 0;
    }
    const at::Tensor indices = at::empty({batch_}, at::kLong);
    std::copy_n(order_.begin() + static_cast<std::ptrdiff_t>(next_), batch,
                indices.data_ptr<std::int64_t>());
    next_ += batch;
    return indices;
  }

 private:
  std::int64_t batch_;
  std::mt19937_64 engine_;
  std::vector<std::int64_t> order_;
  std::size_t next_ = 0;
};

}  // namespace

CalibrateReport calibrate(TokenMixer& mixer, const Objective& objective,
                          const CalibrateOptions& options, const at::Tensor& x, const at::Tensor& y,
                          const at::Tensor& token_weight, std::uint64_t seed,
                          const StopCheck& should_stop) {
  const auto start = Clock::now();
  CalibrateReport report;
  const std::int64_t sequences = x.size(0);
  const std::int64_t batch = options.batch == 0 ? sequences : std::min(options.batch, sequences);
  if (sequences == 0) fail(ErrorKind::input, "calibration needs at least one sequence of text");
  const bool full_batch = batch == sequences;
  if (options.keep_best && !full_batch)
    fail(ErrorKind::usage,
         "calibrate.keep_best compares losses of steps, which only means something when every step "
         "sees "
         "all sequences: set calibrate.batch = 0, or keep_best = false");

  at::AutoGradMode grad(true);
  Trainer trainer(mixer, options, report);
  const ObjectiveFunction loss(objective);
  BatchOrder order(sequences, batch, seed);
  for (std::int64_t step = 0; step < options.steps; ++step) {
    if (should_stop && should_stop())
      fail(ErrorKind::interrupted, "interrupted in calibration step " + std::to_string(step));
    const at::Tensor indices = full_batch ? at::Tensor() : order.next();
    const auto pick = [&](const at::Tensor& all) {
      return !all.defined() || full_batch ? all : all.index_select(0, indices);
    };
    const double value = trainer.step(loss, pick(x), pick(y), pick(token_weight), step);
    if (!std::isfinite(value))
      fail(ErrorKind::internal, "the loss is " + std::to_string(value) + " in calibration step " +
                                    std::to_string(step) + " (objective '" + objective.label() +
                                    "'); a smaller calibrate.lr may help");
    if (step == 0) report.first_loss = value;
    report.last_loss = value;
    report.tokens += batch * x.size(1);
    ++report.steps;
  }
  trainer.restore_best();
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace graft
