// Causal linear attention with an optional scalar decay, in chunks, as LibTorch functions with a
// hand-written backward. For each of n independent rows (a head of a sequence):
//
//   S_t = exp(g_t) S_{t-1} + k_t x_t^T;   y_t = S_t^T q_t
//
//   q, k [n,T,F]    x [n,T,V]    g [n,T]    state [n,F,V]    ->    y [n,T,V], state [n,F,V]
//
// It is the scan of Mamba-2 (state space duality, arXiv 2405.21060, section 6) and, without g, that
// of linear attention. Where x carries a channel of ones, that channel of y is the normaliser.
//
// g is the log decay, <= 0; -inf forgets everything. g = 0 with x = 0 leaves the state as it is: a
// padded token. T = 0, n = 0 and a short last chunk are legal. All tensors have one type, float32
// or float64; CPU only. Only sums of g over consecutive tokens are exponentiated, each summed by
// itself, so that nothing is divided by a decay and a long run of strong decays loses no digits.
//
// Every function raises c10::Error naming the argument when shapes or types do not fit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace graft::mixers {

struct LinearScanResult {
  at::Tensor y, state;
};

// `g` undefined: no decay; `state` undefined: zero. Differentiable once with respect to every
// tensor argument. The chunks of up to kChunksAtOnce are computed together; the backward keeps the
// state at the start of each such group and recomputes the rest, so memory beyond the arguments is
// [n,chunk,T]-like within one group and [n,F,V] per group, never [n,T,F,V].
LinearScanResult linear_scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& x,
                             const at::Tensor& g, const at::Tensor& state, int64_t chunk);

inline constexpr int64_t kChunksAtOnce = 16;

// The same for T = 1 and without a gradient: for decoding.
LinearScanResult linear_scan_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& x,
                                  const at::Tensor& g, const at::Tensor& state);

// linear_scan() or another of its signature with the chunk bound.
using Scan =
    std::function<LinearScanResult(const at::Tensor& q, const at::Tensor& k, const at::Tensor& x,
                                   const at::Tensor& g, const at::Tensor& state)>;

struct LinearAttentionResult {
  at::Tensor o;      // [n,T,D]
  at::Tensor state;  // [n,F,D+1]; the last column sums the keys
};

// Numerator and normaliser of linear attention in one scan of x = write [v, 1]:
//
//   o_t = sum_s w_ts v_s / (sum_s w_ts + eps),   w_ts = write_s exp(g_{s+1} + ... + g_t) q_t . k_s
//
// q, k as in linear_scan() with entries >= 0, v [n,T,D], write [n,T] >= 0 or undefined: 1.
LinearAttentionResult linear_attention(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& write,
                                       const at::Tensor& g, const at::Tensor& state, double eps,
                                       const Scan& scan);

}  // namespace graft::mixers
