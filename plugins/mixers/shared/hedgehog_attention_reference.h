// hedgehog_attention() as its formula reads, token by token in LibTorch operations: what the
// kernels are tested against.
#pragma once

#include <ATen/core/Tensor.h>

#include "hedgehog_attention.h"

namespace graft::mixers {

// phi(u) = max(softmax([W u + b, -(W u + b)]), floor); u [B,T,H,d], weight [H,e,d], bias [H,e] ->
// [B,T,H,2e]. Features at the floor have no gradient.
at::Tensor hedgehog_features(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                             double floor);

HedgehogAttentionResult hedgehog_attention_reference(const HedgehogAttention& in);

}  // namespace graft::mixers
