// The whole Gated DeltaNet block (arXiv 2412.06464, section 3.4), hidden state to hidden state, on
// plain pointers.
//
//   q, k, v = x W_q^T, x W_k^T, x W_v^T       then per stream: short conv, silu, (q, k:) RMSNorm,
//   RoPE, L2 norm beta    = sigmoid(x W_b^T + b_b)                          [B,T,H]  write gate g
//   = -exp(A_log) softplus(x W_a^T + dt_bias)         [B,T,H]  log decay o       = gated delta rule
//   (gdn_kernel.h)                 [B,T,H,value_dim] y       = W_o (RMSNorm(o) silu(x W_g^T + b_g))
//   + b_o
//
// Each stage exists where the options ask for it. All arithmetic is in T: float, also for a
// bfloat16 x, or double.
//
// All memory comes from the caller: what the backward needs is kept in `Kept`, the rest in a
// workspace whose size is counted by the code that uses it. In the backward, the features of q, k,
// v are computed again from the projections.
#pragma once

#include <array>
#include <cstdint>

#include "arena.h"
#include "gdn_options.h"
#include "tokens.h"

namespace graft::gdn {

enum Param : std::size_t {
  kQWeight,
  kKWeight,
  kVWeight,
  kQBias,
  kKBias,
  kVBias,
  kQNorm,
  kKNorm,
  kQConv,
  kKConv,
  kVConv,
  kQConvBias,
  kKConvBias,
  kVConvBias,
  kAWeight,
  kBWeight,
  kBBias,
  kALog,
  kDtBias,
  kGWeight,
  kGBias,
  kONorm,
  kOWeight,
  kOBias,
  kParams
};
inline constexpr std::array<const char*, kParams> kParamNames = {
    "q_proj.weight",   "k_proj.weight", "v_proj.weight", "q_proj.bias",     "k_proj.bias",
    "v_proj.bias",     "q_norm.weight", "k_norm.weight", "q_conv1d.weight", "k_conv1d.weight",
    "v_conv1d.weight", "q_conv1d.bias", "k_conv1d.bias", "v_conv1d.bias",   "a_proj.weight",
    "b_proj.weight",   "b_proj.bias",   "A_log",         "dt_bias",         "g_proj.weight",
    "g_proj.bias",     "o_norm.weight", "o_proj.weight", "o_proj.bias"};
// By Param; nullptr where the options call for none.
template <class T>
using ParamTable = std::array<T*, kParams>;

enum Tap : std::size_t { kHeadOutput, kPreOutput, kLogDecay, kWriteGate, kTaps };

// What the backward reads of a forward. The projections' outputs are as they left the GEMM; borders
// and errors as in gdn_kernel.h.
enum Activation : std::size_t {
  kQ,
  kK,
  kV,
  kGate,
  kDecay,
  kWrite,
  kHead,
  kErrors,
  kBorders,
  kActivations
};
// Elements of one; 0 where the options call for none.
int64_t activation_size(const BlockOptions& o, int64_t batch, int64_t tokens,
                        std::size_t activation);
template <class T>
using Kept = std::array<T*, kActivations>;

// What a sequence leaves behind: S [B,H,key_dim,value_dim], the last inputs of the short convs
// [B,short_conv-1,channels], and the position of the next token [B]. Each may be nullptr: zero, or
// not wanted. An output may be the input of the same name.
template <class T>
struct BlockState {
  T* s = nullptr;
  std::array<T*, 3> tails{};
};

template <class T>
struct BlockForward {
  mixers::Tokens tokens;
  const DLTensor* x = nullptr;
  ParamTable<const T> params{};
  BlockState<const T> state_in;
  BlockState<T> state_out;
  const int64_t* next_in = nullptr;
  int64_t* next_out = nullptr;
  DLTensor* y = nullptr;                // nullptr: not wanted
  std::array<DLTensor*, kTaps> taps{};  // nullptr: not wanted
  bool keep = false;
  Kept<T> kept{};  // written, where `keep`
};

template <class T>
struct BlockBackward {
  BlockForward<T> forward;  // its inputs; `keep` false: run it again, `kept` is not given
  const DLTensor* dy = nullptr;
  std::array<const DLTensor*, kTaps> dtaps{};
  BlockState<const T> d_state_out;
  BlockState<T> d_state_in;
  DLTensor* dx = nullptr;   // nullptr: not wanted
  ParamTable<T> dparams{};  // nullptr: not wanted
  bool accumulate = false;
};

// Bytes of workspace. `narrow`: x is bfloat16.
template <class T>
uint64_t forward_workspace(const BlockOptions& o, int64_t batch, int64_t tokens, bool keep,
                           bool narrow);
template <class T>
uint64_t backward_workspace(const BlockOptions& o, int64_t batch, int64_t tokens, bool kept,
                            bool narrow);

// `keep` and `kept` in the call as they were for the workspace.
template <class T>
void block_forward(const BlockOptions& o, const BlockForward<T>& call, void* workspace);
template <class T>
void block_backward(const BlockOptions& o, const BlockBackward<T>& call, void* workspace);

}  // namespace graft::gdn
