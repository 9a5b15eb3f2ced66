#include "plugins/objectives/kl/kl_loss.h"

#include <cmath>

#include "plugins/objectives/shared/row_kernels.h"

namespace graft::kl {
namespace {

using objectives::for_each_piece;
using objectives::kPiece;
using objectives::LogitRows;

// One piece of both rows: exponents (logit - largest) / tau and what exp makes of them.
struct Piece {
  float student[kPiece], teacher[kPiece];
  float exp_student[kPiece], exp_teacher[kPiece];
  double sum_student = 0, sum_teacher = 0;
};

class Row {
 public:
  Row(const KlOptions& options, const LogitRows& student, const LogitRows& teacher,
      std::int64_t row)
      : options_(options),
        student_(student),
        teacher_(teacher),
        row_(row),
        student_max_(student.row_max(row)),
        teacher_max_(teacher.row_max(row)),
        inverse_tau_(static_cast<float>(1 / options.tau)) {
    if (!std::isfinite(teacher_max_)) {
      throw sdk::Status(
          GRAFT_INVALID_ARGUMENT, "tensor:" GRAFT_SIGNAL_TEACHER_LOGITS,
          sdk::cat("the logits at ", objectives::token_position(teacher.tokens_shape(), row),
                   " have the maximum ", teacher_max_,
                   ": a distribution needs one that is finite"));
    }
  }

  double divergence() {
    double weighted = 0;  // sum of the first distribution's exp times the difference of exponents
    for_each_piece(student_.vocabulary(), [&](std::int64_t begin, std::int64_t n) {
      load(begin, n);
      sum_student_ += piece_.sum_student;
      sum_teacher_ += piece_.sum_teacher;
      weighted += forward() ? objectives::weighted_difference(piece_.exp_teacher, piece_.teacher,
                                                              piece_.student, n)
                            : objectives::weighted_difference(piece_.exp_student, piece_.student,
                                                              piece_.teacher, n);
    });
    mean_ = weighted / (forward() ? sum_teacher_ : sum_student_);
    const double log_ratio = std::log(sum_student_) - std::log(sum_teacher_);
    const double value = mean_ + (forward() ? log_ratio : -log_ratio);
    // Rounding may leave a divergence of 0 just below it. NaN stays NaN.
    return options_.tau * options_.tau * (value < 0 ? 0 : value);
  }

  void gradient(const LogitRows& out, double factor) {
    const double scale = factor * options_.tau;
    const auto of_student = static_cast<float>(scale / sum_student_);
    const auto of_teacher = static_cast<float>(scale / sum_teacher_);
    float values[kPiece];
    for_each_piece(student_.vocabulary(), [&](std::int64_t begin, std::int64_t n) {
      load(begin, n);
      if (forward()) {
        objectives::scaled_difference(piece_.exp_student, of_student, piece_.exp_teacher,
                                      of_teacher, n, values);
      } else {
        objectives::scaled_deviation(piece_.exp_student, of_student, piece_.student, piece_.teacher,
                                     static_cast<float>(mean_), n, values);
      }
      out.write(row_, begin, n, values);
    });
  }

 private:
  bool forward() const { return options_.direction == Direction::forward; }

  void load(std::int64_t begin, std::int64_t n) {
    float buffer[kPiece];
    objectives::shifted(student_.read(row_, begin, n, buffer), student_max_, inverse_tau_, n,
                        piece_.student);
    objectives::shifted(teacher_.read(row_, begin, n, buffer), teacher_max_, inverse_tau_, n,
                        piece_.teacher);
    piece_.sum_student = objectives::exponentials(piece_.student, n, piece_.exp_student);
    piece_.sum_teacher = objectives::exponentials(piece_.teacher, n, piece_.exp_teacher);
    if (!forward()) objectives::replace_minus_infinity(piece_.teacher, -kRuledOut, n);
  }

  const KlOptions& options_;
  const LogitRows& student_;
  const LogitRows& teacher_;
  std::int64_t row_;
  float student_max_, teacher_max_, inverse_tau_;
  double sum_student_ = 0, sum_teacher_ = 0, mean_ = 0;
  Piece piece_;
};

}  // namespace

double kl_row(const KlOptions& options, const LogitRows& student, const LogitRows& teacher,
              std::int64_t row, const LogitRows* grad, double grad_factor) {
  Row of(options, student, teacher, row);
  const double value = of.divergence();
  if (grad != nullptr) of.gradient(*grad, grad_factor);
  return value;
}

}  // namespace graft::kl
