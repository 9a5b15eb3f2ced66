// The block of linear attention with Hedgehog's feature map, hidden state to hidden state, and,
// with conv, decay and gate, that of HedgeMamba, on LibTorch tensors. It knows nothing of the
// plugins' ABI.
//
//   q, k, v = x W_q^T, x W_k^T, x W_v^T       then per stream: short conv, (q, k:) RMSNorm, RoPE
//   (the conv is u + conv(u): weights of 0 pass its input on)
//   C, B    = phi_q(q), phi_k(k)                                   per query head (../kernels/linear.h)
//   dt      = softplus(x W_dt^T + dt_bias)                         [B,T,H], 1 without decay
//   S_t     = exp(-exp(A_log) dt_t) S_{t-1} + dt_t B_t [v_t, 1]^T  without decay: the plain sum
//   [n, z]  = S_t^T C_t;   o_t = n / (z + eps)
//   y       = W_o (o silu(x W_g^T + b_g)) + b_o                    without gate: W_o o + b_o
//
// Hedgehog: arXiv 2402.04347, equations 1 to 3. HedgeMamba: arXiv 2604.14191. Keys and values have
// the teacher's number of heads; query head h reads those of head h / (heads / kv_heads), and has
// feature maps of its own for both. Matrix products with x are done in x's type, everything between
// them in float32 (float64 when x is).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "sequence.h"

namespace graft::mixers {

struct LinearBlockOptions {
  int64_t model_dim = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t feature_dim = 0;  // rows of a feature map; there are 2 feature_dim features
  bool qk_norm = false;
  double qk_norm_eps = 1e-6;
  Rope rope;  // of the teacher, or none
  bool qkv_bias = false, o_bias = false;
  int64_t short_conv = 0;  // width; 0 = none
  bool conv_bias = false;
  bool decay = false, output_gate = false;
  // See ../kernels/linear.h. The least z of one token with dt = 1 is about 2 floor.
  double feature_floor = 1e-12;
  // Keeps z + eps above 0 where nothing was written (dt = 0); far below what one token writes, so
  // that the weights of the values sum to 1.
  double eps = 1e-20;
  int64_t chunk = 64;

  int64_t features() const { return 2 * feature_dim; }
};

// What a sequence leaves behind. Every tensor may be undefined: a fresh sequence.
struct LinearBlockState {
  at::Tensor s;  // [B,H,features,head_dim+1]; the last column sums the features
  at::Tensor q_tail, k_tail, v_tail;  // [B,short_conv-1,channels]: the last inputs of the convs
  at::Tensor next_position;           // [B] int64, with rope
};

struct LinearBlockInput {
  Tokens tokens;  // its next_position is taken from the state
  LinearBlockState state;
};

struct LinearBlockOutput {
  at::Tensor y;            // [B,T,model], dtype of x; 0 at padded tokens, as are the next two
  at::Tensor head_output;  // [B,T,H,head_dim] o
  at::Tensor pre_output;   // [B,T,H*head_dim] after the gate, before the output projection
  at::Tensor g, dt;        // [B,T,H] log decay and write gate, with decay; 0 at padded tokens
  LinearBlockState state;  // those tensors that the options call for
};

LinearBlockOutput linear_block(const LinearBlockInput& in, const LinearBlockOptions& options,
                               const ParamSource& params);

}  // namespace graft::mixers
