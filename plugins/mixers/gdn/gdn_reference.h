// The gated delta rule written as its recurrence, one token at a time, in plain LibTorch
// operations: slow, readable, and what the chunked form is tested against. Shapes and meaning as in
// gdn_chunk.h; gradients come from autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include "gdn_chunk.h"

namespace graft::gdn {

DeltaRuleResult gated_delta_rule_reference(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const at::Tensor& g,
                                           const at::Tensor& beta, const at::Tensor& state);

}  // namespace graft::gdn
