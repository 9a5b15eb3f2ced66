// Inverses of the gates' functions, natural value -> raw parameter.
#pragma once

namespace graft::mixers {

// x with log(1 + exp(x)) = y; y > 0.
double softplus_inverse(double y);
// x with 1 / (1 + exp(-x)) = y; 0 < y < 1.
double sigmoid_inverse(double y);
// The larger x with x / (1 + exp(-x)) = y; y >= kSiluMinimum.
double silu_inverse(double y);

// silu's smallest value, which it takes at -1.278.
inline constexpr double kSiluMinimum = -0.27846454276107374;

}  // namespace graft::mixers
