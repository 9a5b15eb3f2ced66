#include "plugins/objectives/layer_alignment/alignment_loss.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <cmath>
#include <stdexcept>
#include <string>

namespace graft::layer_alignment {
namespace {

// As torch.nn.functional.cosine_similarity: a norm below it counts as it.
constexpr double kLeastNorm = 1e-8;
// Variance below this part of the mean square is rounding, not variance.
constexpr double kLeastVariance = 1e-10;

// The batch as [N, D] rows in the computing dtype, left-out tokens set to zero so that nothing they
// hold can reach a sum: 0 * NaN would.
struct Tokens {
  at::Tensor o, y;  // [N, D]
  at::Tensor w;     // [N], 0 where left out
  int64_t dim;
};

Tokens gather(const at::Tensor& student, const at::Tensor& teacher, const at::Tensor& mask,
              const at::Tensor& weight) {
  const auto dtype = student.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t dim = student.size(-1);
  const auto rows = [&](const at::Tensor& t) { return t.to(dtype).reshape({-1, dim}); };
  Tokens tokens{rows(student), rows(teacher), {}, dim};
  tokens.w = weight.defined() ? weight.to(dtype).reshape({-1})
                              : at::ones({tokens.o.size(0)}, tokens.o.options());
  if (!mask.defined() && !weight.defined()) return tokens;
  at::Tensor counts = tokens.w.ne(0);
  if (mask.defined()) counts = counts.logical_and(mask.reshape({-1}).ne(0));
  const at::Tensor zero = at::zeros({}, tokens.o.options());
  tokens.w = at::where(counts, tokens.w, zero);
  tokens.o = at::where(counts.unsqueeze(1), tokens.o, zero);
  tokens.y = at::where(counts.unsqueeze(1), tokens.y, zero);
  return tokens;
}

at::Tensor total(const at::Tensor& per_token) { return per_token.sum(at::kDouble); }
at::Tensor row_squares(const at::Tensor& rows) { return rows.square().sum(-1); }

// numerator / denominator, 0 for 0 / 0: no token counts.
at::Tensor ratio(const at::Tensor& numerator, const at::Tensor& denominator) {
  return at::where(denominator.eq(0), at::zeros_like(denominator), numerator / denominator);
}

// A teacher of zeros has no scale: the absolute loss is left.
at::Tensor first_positive(const at::Tensor& relative, const at::Tensor& absolute) {
  return at::where(relative.gt(0), relative, absolute);
}

struct Sums {
  at::Tensor numerator, denominator;
  at::Tensor grad;  // [N, D], of the numerator
};

at::Tensor variance_sum(const Tokens& t) {
  const at::Tensor w = t.w.unsqueeze(1);
  const at::Tensor mean = ratio((w * t.y).sum(0, true, at::kDouble), total(t.w)).to(t.y.dtype());
  const at::Tensor spread = total(t.w * row_squares(t.y - mean));
  const at::Tensor energy = total(t.w * row_squares(t.y));
  return at::where(spread.gt(kLeastVariance * energy), spread, energy);
}

Sums squared_error(const Tokens& t, Loss loss, bool relative) {
  const at::Tensor d = t.o - t.y;
  const at::Tensor absolute = total(t.w) * static_cast<double>(t.dim);
  Sums sums{total(t.w * row_squares(d)), absolute, 2 * t.w.unsqueeze(1) * d};
  if (loss == Loss::nmse) {
    sums.denominator = first_positive(variance_sum(t), absolute);
  } else if (relative) {
    sums.denominator = first_positive(total(t.w * row_squares(t.y)), absolute);
  }
  return sums;
}

Sums distance(const Tokens& t, bool relative) {
  const at::Tensor d = t.o - t.y;
  const at::Tensor norm = row_squares(d).sqrt();
  const at::Tensor s = t.w.sqrt();  // w weighs squares
  const at::Tensor absolute = total(s) * std::sqrt(static_cast<double>(t.dim));
  // At equality the distance has no derivative; 0 is in its subdifferential.
  const at::Tensor slope = at::where(norm.gt(0), s / norm, at::zeros_like(norm));
  Sums sums{total(s * norm), absolute, slope.unsqueeze(1) * d};
  if (relative) {
    sums.denominator = first_positive(total(s * row_squares(t.y).sqrt()), absolute);
  }
  return sums;
}

Sums cosine_distance(const Tokens& t) {
  const at::Tensor norm = row_squares(t.o).sqrt();
  const at::Tensor o_norm = norm.clamp_min(kLeastNorm);
  const at::Tensor y_norm = row_squares(t.y).sqrt().clamp_min(kLeastNorm);
  const at::Tensor cosine = (t.o * t.y).sum(-1) / (o_norm * y_norm);
  // Below the least norm the divisor is a constant and only the first term is left.
  const at::Tensor along =
      at::where(norm.gt(kLeastNorm), cosine / o_norm.square(), at::zeros_like(norm));
  const at::Tensor grad_cosine = t.y / (o_norm * y_norm).unsqueeze(1) - along.unsqueeze(1) * t.o;
  return {total(t.w * (1 - cosine)), total(t.w), -t.w.unsqueeze(1) * grad_cosine};
}

}  // namespace

Loss loss_named(std::string_view name) {
  if (name == "mse") return Loss::mse;
  if (name == "l2") return Loss::l2;
  if (name == "cosine") return Loss::cosine;
  if (name == "nmse") return Loss::nmse;
  throw std::invalid_argument("expected mse, l2, cosine or nmse, got '" + std::string(name) + "'");
}

Alignment align(const AlignmentOptions& options, const at::Tensor& student,
                const at::Tensor& teacher, const at::Tensor& mask, const at::Tensor& weight,
                bool want_grad) {
  const Tokens tokens = gather(student, teacher, mask, weight);
  Sums sums;
  switch (options.loss) {
    case Loss::l2:
      sums = distance(tokens, options.relative);
      break;
    case Loss::cosine:
      sums = cosine_distance(tokens);
      break;
    default:
      sums = squared_error(tokens, options.loss, options.relative);
      break;
  }
  Alignment result{ratio(sums.numerator, sums.denominator), sums.denominator, {}};
  if (want_grad) {
    const at::Tensor scale =
        ratio(at::ones_like(sums.denominator), sums.denominator).to(sums.grad.dtype());
    result.grad = (sums.grad * scale).reshape(student.sizes());
  }
  return result;
}

}  // namespace graft::layer_alignment
