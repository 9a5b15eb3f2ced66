// The whole Gated DeltaNet block in LibTorch operations under autograd: the reference that the
// tests hold the block of gdn_block.h against. No plugin contains it.
//
//   q, k, v = x W_q^T, x W_k^T, x W_v^T       then per stream: short conv, silu, (q, k:) RMSNorm,
//   RoPE, L2 norm beta    = sigmoid(x W_b^T + b_b)                          [B,T,H]  write gate g
//   = -exp(A_log) softplus(x W_a^T + dt_bias)         [B,T,H]  log decay o       = gated delta rule
//   (gdn_chunk.h)                  [B,T,H,value_dim] y       = W_o (RMSNorm(o) silu(x W_g^T + b_g))
//   + b_o
//
// Each stage exists where the options ask for it. Matrix products are done in x's dtype, everything
// between them in float32 (float64 when x is).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "gdn_options.h"
#include "sequence.h"

namespace graft::gdn::torch_block {

// What a sequence leaves behind. Every tensor may be undefined: a fresh sequence.
struct BlockState {
  at::Tensor s;  // [B,H,key_dim,value_dim]
  at::Tensor q_tail, k_tail,
      v_tail;                // [B,short_conv-1,channels]: the last inputs of the short convs
  at::Tensor next_position;  // [B] int64, with RoPE: position of the next token where none is given
};

struct BlockInput {
  at::Tensor x;  // [B,T,model]
  BlockState state;
  at::Tensor
      positions;  // [B,T] int64, or undefined: counted from next_position over the real tokens
  // [B,T] bool, true = real, or undefined: all real. A padded token is as if it were not there: its
  // x is not read, it leaves the state as it is, and its y is 0.
  at::Tensor pad_mask;
  // What else than the state and head_output is computed; y needs pre_output.
  bool want_y = true, want_pre_output = true;
};

struct BlockOutput {
  at::Tensor y;            // [B,T,model], dtype of x
  BlockState state;        // those tensors that the options call for
  at::Tensor head_output;  // [B,T,H,value_dim] what the recurrence gives
  at::Tensor pre_output;   // [B,T,H*value_dim] after norm and gate, before the output projection
  at::Tensor g, beta;      // [B,T,H] log decay and write gate, 0 at padded tokens
};

// Parameters by fla's names; asked only for those that the options call for.
using BlockParams = mixers::ParamSource;

BlockOutput gdn_block(const BlockInput& in, const BlockOptions& options, const BlockParams& params);

}  // namespace graft::gdn::torch_block
