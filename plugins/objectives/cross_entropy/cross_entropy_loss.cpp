#include "plugins/objectives/cross_entropy/cross_entropy_loss.h"

#include <cmath>

#include "plugins/objectives/shared/row_kernels.h"

namespace graft::cross_entropy {

using objectives::for_each_piece;
using objectives::kPiece;
using objectives::LogitRows;

RowResult cross_entropy_row(const LogitRows& student, std::int64_t row, std::int64_t label,
                            double z_weight, const LogitRows* grad, double grad_factor) {
  const float most = student.row_max(row);
  float buffer[kPiece], exponents[kPiece], exps[kPiece];
  const auto load = [&](std::int64_t begin, std::int64_t n) {
    objectives::shifted(student.read(row, begin, n, buffer), most, 1, n, exponents);
    return objectives::exponentials(exponents, n, exps);
  };
  double sum = 0;
  for_each_piece(student.vocabulary(),
                 [&](std::int64_t begin, std::int64_t n) { sum += load(begin, n); });
  const double above = std::log(sum);  // log Z - most
  const double log_z = static_cast<double>(most) + above;
  const double distance = static_cast<double>(most) - static_cast<double>(student.at(row, label));
  if (grad != nullptr) {
    const auto factor = static_cast<float>(grad_factor * (1 + 2 * z_weight * log_z) / sum);
    for_each_piece(student.vocabulary(), [&](std::int64_t begin, std::int64_t n) {
      load(begin, n);
      objectives::scaled(exps, factor, n, buffer);
      if (label >= begin && label < begin + n)
        buffer[label - begin] -= static_cast<float>(grad_factor);
      grad->write(row, begin, n, buffer);
    });
  }
  return {above + distance, log_z * log_z};
}

}  // namespace graft::cross_entropy
