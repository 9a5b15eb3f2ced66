// Causal linear attention on Hedgehog's features as a LibTorch function with a hand-written
// backward: the kernels of
// ../kernels/linear.h over all heads of a batch. See there for the formula.
#pragma once

#include <ATen/core/Tensor.h>

#include "linear.h"

namespace graft::mixers {

struct HedgehogAttention {
  at::Tensor q;  // [B,T,H,d]
  at::Tensor k,
      v;  // [B,T,kv_heads,d], [B,T,kv_heads,D]; query head h reads those of head h / (H / kv_heads)
  // Feature maps of queries and keys, weight [H,e,d] and bias [H,e]; there are 2 e features.
  at::Tensor weight_q, bias_q, weight_k, bias_k;
  at::Tensor g, write;  // [B,T,H] log decay <= 0 and factor of what is written; undefined: 0 and 1
  at::Tensor state;     // [B,H,2e,D+1], the last column sums the features; undefined: zero
  double floor = 0, eps = 0;
  int64_t chunk = 64;
};

struct HedgehogAttentionResult {
  at::Tensor o;      // [B,T,H,D]
  at::Tensor state;  // [B,H,2e,D+1]
};

// All tensors are float32 or all float64, on the CPU, with dense last axes. Differentiable once
// with respect to every tensor. The backward keeps the state at the start of each chunk and one
// number a token and head, and computes the rest again. Each head of each sequence is computed by
// one thread in a fixed order. A single token without a gradient takes the recurrence itself.
// Raises c10::Error naming the argument when shapes or types do not fit.
HedgehogAttentionResult hedgehog_attention(const HedgehogAttention& in,
                                           const linear::Kernels& kernels = linear::kernels());

}  // namespace graft::mixers
