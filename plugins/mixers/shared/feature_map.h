// The learned feature map of Hedgehog (arXiv 2402.04347, section 4.2; the softmax over both signs
// is that of its reference code).
#pragma once

#include <ATen/core/Tensor.h>

namespace graft::mixers {

//   phi(u) = max(softmax([W u + b, -(W u + b)]), floor)      per head, 2 e features from d entries
//
// u [H,N,d], weight [H,e,d], bias [H,e], all float32 or all float64 -> [H,N,2e]. The softmax takes
// its maximum off first, so that no u overflows. The floor keeps the product of a query's and a
// key's features above 0 where all that matters of one lies where the other has rounded to nothing:
// the rows of the attention then still sum to 1. Features at the floor have no gradient. 0: no
// floor. Differentiable once.
at::Tensor hedgehog_features(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                             double floor);

}  // namespace graft::mixers
