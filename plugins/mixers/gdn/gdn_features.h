// What stands around the delta rule, fused row by row with hand-written backward passes: the
// features of queries, keys and values, and the gated norm of the outputs. float32 and float64, on
// the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "rows.h"
#include "sequence.h"

namespace graft::gdn {

using kernels::FeatureRows;
using kernels::GatedNormRows;

struct FeatureOptions {
  bool silu = false;
  bool l2norm = false;  // x / sqrt(sum x^2 + kL2Eps)
  double norm_eps = 0;  // of the RMSNorm, when there is a weight
};

// Inside the square root, as in fla's l2norm; the gradient at a zero vector is finite (at most
// 1000).
inline constexpr double kL2Eps = 1e-6;

using mixers::make_rotation;
using mixers::Rotation;

// x [B,T,H*dim] -> [B,T,H,dim]: silu, then RMSNorm over each head with `norm_weight` [dim]
// (undefined: none), then the rotation of the pairs (i, i + n) of each head's first 2n entries,
// then the L2 norm. Differentiable once in x and norm_weight. The result is float32, or float64
// when x is.
at::Tensor head_features(const at::Tensor& x, int64_t heads, const FeatureOptions& options,
                         const at::Tensor& norm_weight = {}, const Rotation& rotation = {});

// RMSNorm(o) weight silu(gate) over the last axis, o [B,T,H,dim], gate [B,T,H*dim] -> [B,T,H*dim].
// weight [dim] and gate may be undefined: no norm, no gate. Differentiable once in all three.
// Computed in o's type.
at::Tensor gated_norm(const at::Tensor& o, const at::Tensor& norm_weight, double norm_eps,
                      const at::Tensor& gate);

}  // namespace graft::gdn
