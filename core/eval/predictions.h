#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/teacher/backbone.h"

namespace graft {

// Where a model's predictions come from: the rows behind its final norm [B,T,D], and its output
// projection.
struct PredictionSource {
  const Backbone* backbone;
  at::Tensor rows;
};

// What a model predicts at each position, sums over the sequences of a batch; nats. Position t of
// the ids is predicted from those before it, so the first is never scored.
struct PredictionFigures {
  std::vector<double> nll;          // [T] -log p of the text at this position; [0] = 0
  std::vector<double> teacher_nll;  // with a teacher
  std::vector<double> kl, agreed;   // with a teacher: KL(teacher || model), same first choice
  std::int64_t sequences = 0;

  // Over all scored tokens.
  double mean_nll() const { return mean(nll); }
  double mean_teacher_nll() const { return mean(teacher_nll); }
  double mean_kl() const { return mean(kl); }
  double mean_agreed() const { return mean(agreed); }
  void add(const PredictionFigures& other);

 private:
  double mean(const std::vector<double>& sums) const;
};

// ids [B,T] i64. `teacher` may be null. Logits exist for a block of tokens only. Without gradients.
PredictionFigures compare_predictions(const PredictionSource& model,
                                      const PredictionSource* teacher, const at::Tensor& ids);

}  // namespace graft
