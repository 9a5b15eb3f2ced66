#include "short_conv.h"

#include <algorithm>

#include "lanes.h"

namespace graft::mixers {
namespace {

// The last `width` inputs, the newest last, of one block of channels. nullptr: an input that is
// zero, or not wanted.
template <class Pointer>
struct Window {
  int64_t width;
  Pointer at[kWidestConv] = {};

  Window(int64_t width_, Pointer tail, int64_t stride) : width(width_) {
    for (int64_t w = 1; w < width; ++w) at[w] = tail == nullptr ? nullptr : tail + (w - 1) * stride;
  }
  void push(Pointer newest) {
    for (int64_t w = 0; w + 1 < width; ++w) at[w] = at[w + 1];
    at[width - 1] = newest;
  }
};

constexpr int64_t kChannels = 64;  // of one unit of work

template <class T>
struct Block {
  const ShortConv<T>& conv;
  const Tokens& tokens;
  int64_t begin, n;  // channels

  Block(const ShortConv<T>& conv_, const Tokens& tokens_, int64_t index)
      : conv(conv_),
        tokens(tokens_),
        begin(index * kChannels),
        n(std::min(kChannels, conv_.channels - begin)) {}

  T* token(T* rows, int64_t index) const { return rows + index * conv.channels + begin; }
  const T* token(const T* rows, int64_t index) const {
    return rows + index * conv.channels + begin;
  }
  // Row 0 of a sequence's tail.
  template <class Pointer>
  Pointer tail(Pointer tails, int64_t b) const {
    return tails == nullptr ? nullptr : tails + b * (conv.width - 1) * conv.channels + begin;
  }
  const T* weight(int64_t c) const { return conv.weight + (begin + c) * conv.width; }
};

template <class T>
void convolve(const Block<T>& block, const Window<const T*>& window, T* out) {
  const ShortConv<T>& conv = block.conv;
  for (int64_t c = 0; c < block.n; ++c)
    out[c] = conv.bias == nullptr ? T(0) : conv.bias[block.begin + c];
  for (int64_t w = 0; w < conv.width; ++w) {
    const T* u = window.at[w];
    if (u == nullptr) continue;
    const T* weight = block.weight(0) + w;
    for (int64_t c = 0; c < block.n; ++c) out[c] += weight[c * conv.width] * u[c];
  }
}

// One sequence, one block of channels.
template <class T>
void forward_block(const Block<T>& block, int64_t b, const T* u, const T* tail_in, T* out,
                   T* tail_out) {
  const int64_t stride = block.conv.channels, length = block.tokens.length;
  Window<const T*> window(block.conv.width, block.tail(tail_in, b), stride);
  for (int64_t t = b * length; t < (b + 1) * length; ++t) {
    if (!block.tokens.real(t)) {
      std::fill_n(block.token(out, t), block.n, T(0));
      continue;
    }
    window.push(block.token(u, t));
    convolve(block, window, block.token(out, t));
  }
  if (tail_out == nullptr) return;
  T* tail = block.tail(tail_out, b);
  // In rising order: where the new tail lies over the old one, a row is read before it is written.
  for (int64_t w = 1; w < block.conv.width; ++w) {
    T* row = tail + (w - 1) * stride;
    if (window.at[w] == nullptr) {
      std::fill_n(row, block.n, T(0));
    } else if (window.at[w] != row) {
      std::copy_n(window.at[w], block.n, row);
    }
  }
}

// From the gradient at one token to those of the inputs below the window and of the parameters.
template <class T>
void scatter(const Block<T>& block, const T* d, const Window<const T*>& u, const Window<T*>& du,
             const ShortConvGradient<T>& to) {
  const int64_t width = block.conv.width;
  for (int64_t w = 0; w < width; ++w) {
    const T* weight = block.weight(0) + w;
    for (int64_t c = 0; du.at[w] != nullptr && c < block.n; ++c)
      du.at[w][c] += weight[c * width] * d[c];
    if (to.weight == nullptr || u.at[w] == nullptr) continue;
    T* d_weight = to.weight + block.begin * width + w;
    for (int64_t c = 0; c < block.n; ++c) d_weight[c * width] += d[c] * u.at[w][c];
  }
  for (int64_t c = 0; to.bias != nullptr && c < block.n; ++c) to.bias[block.begin + c] += d[c];
}

template <class T>
void backward_block(const Block<T>& block, int64_t b, const T* u, const T* tail_in,
                    const ShortConvGradient<T>& d) {
  const int64_t stride = block.conv.channels, kept = block.conv.width - 1,
                length = block.tokens.length;
  Window<const T*> inputs(block.conv.width, block.tail(tail_in, b), stride);
  T* const d_tail = block.tail(d.tail_in, b);
  Window<T*> gradients(block.conv.width, d_tail, stride);
  for (int64_t w = 0; d_tail != nullptr && w < kept; ++w)
    std::fill_n(d_tail + w * stride, block.n, T(0));
  for (int64_t t = b * length; t < (b + 1) * length; ++t) {
    std::fill_n(block.token(d.u, t), block.n, T(0));
    if (!block.tokens.real(t)) continue;
    inputs.push(block.token(u, t));
    gradients.push(block.token(d.u, t));
    scatter(block, block.token(d.out, t), inputs, gradients, d);
  }
  const T* const d_after = block.tail(d.tail_out, b);
  for (int64_t w = 1; d_after != nullptr && w <= kept; ++w) {
    if (gradients.at[w] == nullptr) continue;
    for (int64_t c = 0; c < block.n; ++c) gradients.at[w][c] += d_after[(w - 1) * stride + c];
  }
}

int64_t blocks(int64_t channels) { return (channels + kChannels - 1) / kChannels; }

}  // namespace

template <class T>
void short_conv(const ShortConv<T>& conv, const Tokens& tokens, const T* u, const T* tail_in,
                T* out, T* tail_out) {
  const int64_t n = blocks(conv.channels);
  for_each_unit(
      tokens.batch * n, tokens.length * kChannels * conv.width, [&](int64_t unit, int64_t) {
        forward_block(Block<T>(conv, tokens, unit % n), unit / n, u, tail_in, out, tail_out);
      });
}

template <class T>
void short_conv_backward(const ShortConv<T>& conv, const Tokens& tokens, const T* u,
                         const T* tail_in, const ShortConvGradient<T>& d) {
  // All sequences of a block of channels in one unit: the parameters' gradients are sums over them
  // in one order.
  for_each_unit(blocks(conv.channels), 2 * tokens.count() * kChannels * conv.width,
                [&](int64_t unit, int64_t) {
                  const Block<T> block(conv, tokens, unit);
                  if (!d.accumulate && d.weight != nullptr)
                    std::fill_n(d.weight + block.begin * conv.width, block.n * conv.width, T(0));
                  if (!d.accumulate && d.bias != nullptr)
                    std::fill_n(d.bias + block.begin, block.n, T(0));
                  for (int64_t b = 0; b < tokens.batch; ++b)
                    backward_block(block, b, u, tail_in, d);
                });
}

#define GRAFT_FOR_TYPE(T)                                                                      \
  template void short_conv<T>(const ShortConv<T>&, const Tokens&, const T*, const T*, T*, T*); \
  template void short_conv_backward<T>(const ShortConv<T>&, const Tokens&, const T*, const T*, \
                                       const ShortConvGradient<T>&);
GRAFT_FOR_TYPE(float)
GRAFT_FOR_TYPE(double)
#undef GRAFT_FOR_TYPE

}  // namespace graft::mixers
