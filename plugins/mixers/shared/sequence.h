// What mixers that are written with LibTorch do to a batch of sequences around their recurrence:
// projections, positions, RoPE, short convolutions, and all of it where some tokens are padding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "rope.h"

namespace graft::mixers {

// A parameter by its name, e.g. "q_proj.weight".
using ParamSource = std::function<at::Tensor(std::string_view name)>;

// The type of all that stands between matrix products: float64 for float64, else float32.
at::ScalarType inner_type(const at::Tensor& x);

// x W^T [+ b] in x's type, with "<name>.weight" and "<name>.bias".
at::Tensor project(const at::Tensor& x, const ParamSource& params, const std::string& name,
                   bool with_bias);

// A batch as the host gives it.
struct Tokens {
  at::Tensor x;  // [B,T,model]
  // [B,T] int64, or undefined: counted over the real tokens from `next_position`
  at::Tensor positions;
  // [B,T] bool, true = real, or undefined: all real. A padded token is as if it were not there.
  at::Tensor pad_mask;
  at::Tensor next_position;  // [B] int64, or undefined: 0
};

// A mask without a padded token is no mask; and what padded tokens hold becomes 0, since it may be
// NaN.
Tokens without_pads(Tokens tokens);

// [B,T] int64.
at::Tensor token_positions(const Tokens& tokens);
// [B]: one past the last real token's position; as it was where a row has none.
at::Tensor next_position(const Tokens& tokens, const at::Tensor& positions);

// cos and sin [B,T,n] of the angles positions * inv_freq, times `factor`; undefined when there is
// no rotation.
struct Rotation {
  at::Tensor cos, sin;
};
// positions [B,T] (any integer or floating type); angles are computed in float64 and stored as
// `type`.
Rotation make_rotation(const at::Tensor& positions, const std::vector<double>& inv_freq,
                       double factor, at::ScalarType type);

// u [heads,B,T,dim] with the pairs (i, i + n) of the first 2n entries of each head rotated.
at::Tensor rotate(const at::Tensor& u, const Rotation& rotation);

struct ConvResult {
  at::Tensor out;   // [B,T,channels]
  at::Tensor tail;  // [B,width-1,channels]: the last real inputs, for the next call
};

// Causal depthwise convolution: out_t = bias + sum_w weight[w] u_{t - width + 1 + w} over `tail`
// and then the real tokens of u [B,T,channels]. weight [channels,1,width], bias [channels] or
// undefined, tail undefined: zeros, mask as in Tokens.
ConvResult causal_conv(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& tail, const at::Tensor& mask);

}  // namespace graft::mixers
