// Cross entropy of one token's distribution with its label.
#pragma once

#include <cstdint>

#include "plugins/objectives/shared/logit_rows.h"

namespace graft::cross_entropy {

struct RowResult {
  double cross_entropy = 0;  // log Z - s[label], nats
  double z_loss = 0;         // (log Z)^2
};

// With log Z = log sum_j exp(s_j) of a row:
//
//   loss = log Z - s[label] + z_weight (log Z)^2
//   d/ds_j = (1 + 2 z_weight log Z) softmax(s)_j - [j == label]
//
// If `grad` is given its row becomes `grad_factor` d/ds. `label` is in [0, V). Numbers in float32
// around the row's maximum, sums and logarithms in float64.
RowResult cross_entropy_row(const objectives::LogitRows& student, std::int64_t row,
                            std::int64_t label, double z_weight, const objectives::LogitRows* grad,
                            double grad_factor);

}  // namespace graft::cross_entropy
