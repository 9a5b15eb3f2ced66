#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "core/abi/component.h"
#include "core/teacher/backbone.h"

namespace graft {

// One term of a loss: weight * objective. Borrows the objective.
struct WeightedObjective {
  const Objective* objective = nullptr;
  std::string name;   // its key in LogitLoss::parts; unique among the terms
  double weight = 1;  // >= 0; at 0 the value is reported and nothing trains on it
};

// A label that says "no next token here": the token does not count.
inline constexpr std::int64_t kNoLabel = -100;

// What a loss on logits is computed from. N tokens in any leading shape (N, or B x T: the same one
// for all tensors). A token counts when its mask is not 0, its weight is not 0 and its label is not
// kNoLabel, for every objective alike; what the others hold, NaN included, is never looked at.
struct LogitLossInput {
  at::Tensor student_rows;  // [N,D] float32 after Backbone::final_norm; usually requires a gradient
  at::Tensor teacher_rows;  // [N,D'] float32, or undefined: no objective may need teacher.logits
  const Backbone* student = nullptr;  // its output projection; trained if it requires a gradient
  const Backbone* teacher = nullptr;  // with teacher_rows
  at::Tensor labels;                  // [N] i64 in [0,V) or kNoLabel, or undefined
  at::Tensor mask;                    // [N] u8 or bool, 1 = counts; undefined: all count
  at::Tensor token_weight;            // [N] float32 >= 0; undefined: 1
  // For the logits of a block and their gradients; decides how many tokens a block has.
  std::int64_t block_bytes = std::int64_t{160} << 20;
};

struct LogitLoss {
  at::Tensor loss;  // float32 scalar: sum of weight * value, of this batch's share of the step;
                    // backward() may be called once
  // By the objective's name: its value, a mean over this batch's tokens before its weight. What an
  // objective reports besides is "<name>.<metric>".
  std::map<std::string, double> parts;
  double tokens = 0;  // weight of the tokens that count (their number where there are no weights)
};

// The weight of the tokens that count: what LogitLoss::tokens will be. Sum it over the
// micro-batches of a step to get the denominator below.
double counted_tokens(const LogitLossInput& input);

// Throws Error(usage) naming the objective, the signal and what there is, when an objective needs a
// signal that this scope (whole model) cannot give, takes no gradient to student.logits, has a name
// twice or a weight that is negative or not finite.
void check_logit_objectives(std::span<const WeightedObjective> objectives, bool has_teacher,
                            bool has_labels);

// The loss over the vocabulary and, where something requires a gradient, its gradients to
// student_rows and the student's output projection, in blocks of tokens: the logits [N,V] never
// exist, only those of one block. Each objective's value is the mean over the tokens that count,
// whatever the blocks are; one that an objective leaves out by a rule of its own adds 0 to it.
//
// `denominator`: tokens of the whole accumulated step, so that the losses (and gradients) of its
// micro-batches add up to the step's own; 0 = this batch's own tokens. No token that counts: loss
// and gradients are 0.
//
// Throws Error(plugin) as the objectives do, Error(usage) as check_logit_objectives() does,
// Error(internal) for shapes that do not fit.
LogitLoss logit_loss(const LogitLossInput& input, std::span<const WeightedObjective> objectives,
                     double denominator = 0);

}  // namespace graft
