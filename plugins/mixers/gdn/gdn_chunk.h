// The gated delta rule in its chunked form, as LibTorch functions with a hand-written backward.
//
//   S_t = exp(g_t) S_{t-1};   S_t += beta_t k_t (v_t - S_t^T k_t)^T;   o_t = key_dim^{-1/2} S_t^T
//   q_t      per head
//
// (Gated DeltaNet, arXiv 2412.06464, equation 10; the state forgets BEFORE the error is read.)
//
//   q, k  [B,T,H,key_dim]    v [B,T,H,value_dim]    g, beta [B,T,H]    state
//   [B,H,key_dim,value_dim]
//
// g is the log decay, <= 0; -inf is a full reset. g = 0 with beta = 0 leaves the state as it is. T
// = 0, B = 0 and a short last chunk are legal. q, k, v, beta may be float32, float64, bfloat16 or
// float16; g and the state are float32, or float64 when q is: all arithmetic is done in the state's
// type. CPU only.
//
// Every function raises c10::Error naming the argument when shapes, types or devices do not fit.
#pragma once

#include <ATen/core/Tensor.h>

#include "gdn_kernel.h"

namespace graft::gdn {

struct DeltaRuleResult {
  at::Tensor o;      // [B,T,H,value_dim], dtype of v
  at::Tensor state;  // [B,H,key_dim,value_dim], float32 or float64
};

// `state` may be undefined: zero. Differentiable once with respect to every tensor argument; the
// backward keeps the state at the start of each chunk and one [B,T,H,value_dim] tensor, and
// recomputes the rest chunk by chunk. Each head of each sequence is one unit of work: results do
// not depend on the number of threads or on the other rows of the batch. Cost of the forward per
// token and head: about 2 (3 key_dim value_dim + chunk (key_dim + 1.5 value_dim)) flops, of forward
// and backward together about three times that.
DeltaRuleResult gated_delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& g, const at::Tensor& beta,
                                 const at::Tensor& state, int64_t chunk,
                                 const Kernels& kernels = kernels());

// The same, token by token and without a gradient: for decoding. `state` is read and, where
// `in_place`, written.
DeltaRuleResult gated_delta_rule_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& g, const at::Tensor& beta,
                                      const at::Tensor& state, bool in_place = false,
                                      const Kernels& kernels = kernels());

}  // namespace graft::gdn
