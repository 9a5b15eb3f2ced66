#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace graft::layer_alignment {

enum class Loss { mse, l2, cosine, nmse };

// The loss of that name; throws std::invalid_argument naming the four.
Loss loss_named(std::string_view name);

struct AlignmentOptions {
  Loss loss = Loss::mse;
  bool relative = false;  // mse and l2 only
};

// What one batch gives. Batches combine exactly: the loss of a whole is sum(numerator) /
// sum(denominator) of its parts (nmse aside, whose denominator holds the batch's own mean).
struct Alignment {
  at::Tensor loss;         // scalar, numerator / denominator; 0 when no token counts
  at::Tensor denominator;  // scalar, what the sum over tokens was divided by
  at::Tensor grad;         // d loss / d student, like student; undefined unless wanted
};

// student o and teacher y [..., D]; mask [...] (non-zero = counts) and weight w [...] >= 0 may be
// undefined. Tokens that the mask or a weight of 0 leaves out count for nothing, whatever they
// hold. Float64 inputs are computed in float64, all others in float32. Formulas: README.md.
Alignment align(const AlignmentOptions& options, const at::Tensor& student,
                const at::Tensor& teacher, const at::Tensor& mask, const at::Tensor& weight,
                bool want_grad);

}  // namespace graft::layer_alignment
