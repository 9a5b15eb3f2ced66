// Causal depthwise convolution over the real tokens of each sequence:
//
//   out_t = bias + sum_w weight[c,w] u_{t - width + 1 + w}
//
// where the tokens before the first are the tail that the call before left. Padded tokens are
// skipped.
#pragma once

#include <cstdint>

#include "tokens.h"

namespace graft::mixers {

inline constexpr int64_t kWidestConv = 8;

template <class T>
struct ShortConv {
  int64_t channels = 0, width = 0;
  const T* weight = nullptr;  // [channels,width]
  const T* bias = nullptr;    // [channels] or nullptr
};

// u, out [B,T,channels]; out is 0 at padded tokens. tail_in [B,width-1,channels], nullptr: zeros;
// tail_out nullptr or tail_in.
template <class T>
void short_conv(const ShortConv<T>& conv, const Tokens& tokens, const T* u, const T* tail_in,
                T* out, T* tail_out);

template <class T>
struct ShortConvGradient {
  const T* out = nullptr;       // [B,T,channels]
  const T* tail_out = nullptr;  // [B,width-1,channels]; nullptr: zero
  T* u = nullptr;               // written
  T* tail_in = nullptr;         // written; nullptr: not wanted
  T* weight = nullptr;          // nullptr: not wanted
  T* bias = nullptr;
  bool accumulate = false;  // of weight and bias
};

template <class T>
void short_conv_backward(const ShortConv<T>& conv, const Tokens& tokens, const T* u,
                         const T* tail_in, const ShortConvGradient<T>& d);

}  // namespace graft::mixers
