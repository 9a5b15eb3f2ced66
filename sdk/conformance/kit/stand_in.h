// A mixer of the kit's own, so that an initializer can be tested without a second plugin: a linear
// recurrence with every well-known part that an initializer may set, in plain loops.
//
//   S_t = exp(g_t) S_{t-1} + b_t k_t v_t^T,  g = -exp(A_log) softplus(a x + dt_bias),
//   b = sigmoid(x W_b^T + b_b),  o_t = S_t^T q_t / d
//   y = W_o (RMSNorm(o) * silu(x W_g^T + b_g))
//
// With feature maps q and k are softplus(W q), softplus(W k) for each head.
#pragma once

#include "graft/graft.h"

namespace graft::conformance {

// One mixer; its option feature_maps (a bool, false) adds the roles of feature maps.
const graft_mixer_factory& stand_in_mixers();

}  // namespace graft::conformance
