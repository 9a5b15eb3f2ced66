// Kullback-Leibler divergence of one token's distributions.
#pragma once

#include <cstdint>

#include "plugins/objectives/shared/logit_rows.h"

namespace graft::kl {

enum class Direction { forward, reverse };

struct KlOptions {
  Direction direction = Direction::forward;
  double tau = 1;
};

// With p = softmax(teacher / tau) and q = softmax(student / tau) of a row, in nats:
//
//   forward  tau^2 KL(p || q) = tau^2 sum_j p_j (log p_j - log q_j)   d/ds_j = tau (q_j - p_j)
//   reverse  tau^2 KL(q || p) = tau^2 sum_j q_j (log q_j - log p_j)   d/ds_j = tau q_j (log q_j -
//                                                                     log p_j - KL(q || p))
//
// A term of probability 0 is 0. In reverse a token that the teacher rules out (logit -inf) counts
// as if its logit over tau stood kRuledOut below the teacher's largest: infinite by the letter, but
// then no gradient would lead away from it.
//
// If `grad` is given its row becomes `grad_factor` d/ds. Numbers in float32 around the row's
// maximum, sums and logarithms in float64. Throws Status naming the token where the teacher's row
// has no finite maximum: then p is not defined. The student's NaN becomes the loss's.
inline constexpr float kRuledOut = 100;
double kl_row(const KlOptions& options, const objectives::LogitRows& student,
              const objectives::LogitRows& teacher, std::int64_t row,
              const objectives::LogitRows* grad, double grad_factor);

}  // namespace graft::kl
