#include "tokens.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "graft/tensor.hpp"
#include "lanes.h"

namespace graft::mixers {
namespace {

float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// To nearest, ties to even.
uint16_t to_bfloat16(float x) {
  if (std::isnan(x)) return 0x7fc0;
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

bool is_bfloat16(const DLTensor& tensor) { return sdk::same_dtype(tensor.dtype, sdk::bfloat16); }

int64_t width_of(const DLTensor& tensor, const Tokens& tokens) {
  return tokens.count() == 0 ? 0 : sdk::numel(tensor) / tokens.count();
}

// Where token (b, t) of a tensor with strides begins, in elements.
int64_t offset_of(const DLTensor& tensor, int64_t b, int64_t t) {
  return b * sdk::stride_of(tensor, 0) + t * sdk::stride_of(tensor, 1);
}

template <class Element>
const Element* elements(const DLTensor& tensor) {
  return static_cast<const Element*>(sdk::data_address(tensor));
}

template <class T>
void read_row(const DLTensor& tensor, int64_t offset, int64_t stride, int64_t width, T* out) {
  if (is_bfloat16(tensor)) {
    const uint16_t* in = elements<uint16_t>(tensor) + offset;
    for (int64_t c = 0; c < width; ++c) out[c] = static_cast<T>(from_bfloat16(in[c * stride]));
  } else if (stride == 1) {
    std::copy_n(elements<T>(tensor) + offset, width, out);
  } else {
    const T* in = elements<T>(tensor) + offset;
    for (int64_t c = 0; c < width; ++c) out[c] = in[c * stride];
  }
}

}  // namespace

Tokens tokens_of(const graft_mixer_forward& call) {
  Tokens tokens{call.x->shape[0], call.x->shape[1], nullptr, nullptr};
  if (call.pad_mask != nullptr) {
    const uint8_t* mask = elements<uint8_t>(*call.pad_mask);
    const bool pads =
        std::any_of(mask, mask + tokens.count(), [](uint8_t real) { return real == 0; });
    if (pads) tokens.mask = mask;
  }
  if (call.positions != nullptr) tokens.positions = elements<int64_t>(*call.positions);
  return tokens;
}

template <class T>
bool holds(const DLTensor& tensor) {
  return sdk::same_dtype(tensor.dtype, sdk::dtype_of<T>());
}

template <class T>
const T* rows_of(const DLTensor& tensor, const Tokens& tokens, T* space) {
  if (tokens.mask == nullptr && holds<T>(tensor) && sdk::is_contiguous(tensor))
    return elements<T>(tensor);
  const int64_t width = width_of(tensor, tokens), stride = sdk::stride_of(tensor, 2);
  for_each_piece(tokens.count(), width, [&](int64_t, int64_t begin, int64_t end, int64_t) {
    for (int64_t n = begin; n < end; ++n) {
      T* row = space + n * width;
      if (tokens.real(n)) {
        read_row(tensor, offset_of(tensor, n / tokens.length, n % tokens.length), stride, width,
                 row);
      } else {
        std::fill_n(row, width, T(0));
      }
    }
  });
  return space;
}

template <class T>
void store_rows(const Tokens& tokens, const T* from, DLTensor& tensor) {
  const int64_t width = width_of(tensor, tokens);
  const bool narrow = is_bfloat16(tensor);
  void* const data = sdk::data_address(tensor);
  if (!narrow && tokens.mask == nullptr && data == from) return;
  for_each_piece(tokens.count(), width, [&](int64_t, int64_t begin, int64_t end, int64_t) {
    for (int64_t n = begin; n < end; ++n) {
      const T* row = from + n * width;
      const bool real = tokens.real(n);
      if (narrow) {
        uint16_t* out = static_cast<uint16_t*>(data) + n * width;
        for (int64_t c = 0; c < width; ++c)
          out[c] = real ? to_bfloat16(static_cast<float>(row[c])) : uint16_t{0};
      } else {
        T* out = static_cast<T*>(data) + n * width;
        if (!real) {
          std::fill_n(out, width, T(0));
        } else if (out != row) {
          std::copy_n(row, width, out);
        }
      }
    }
  });
}

template <class T>
void clear_pads(const Tokens& tokens, int64_t width, T* rows) {
  for (int64_t n = 0; tokens.mask != nullptr && n < tokens.count(); ++n) {
    if (!tokens.real(n)) std::fill_n(rows + n * width, width, T(0));
  }
}

template <class T>
void add_tensor(const DLTensor* tensor, const Tokens& tokens, T* values) {
  if (tensor == nullptr) return;
  const int64_t width = width_of(*tensor, tokens);
  for_each_piece(tokens.count(), width, [&](int64_t, int64_t begin, int64_t end, int64_t) {
    for (int64_t n = begin; n < end; ++n) {
      if (!tokens.real(n)) continue;
      T* row = values + n * width;
      if (is_bfloat16(*tensor)) {
        const uint16_t* in = elements<uint16_t>(*tensor) + n * width;
        for (int64_t c = 0; c < width; ++c) row[c] += static_cast<T>(from_bfloat16(in[c]));
      } else {
        const T* in = elements<T>(*tensor) + n * width;
        for (int64_t c = 0; c < width; ++c) row[c] += in[c];
      }
    }
  });
}

void find_positions(const Tokens& tokens, const int64_t* next_in, int64_t* positions,
                    int64_t* next_out) {
  for (int64_t b = 0; b < tokens.batch; ++b) {
    const int64_t before = next_in == nullptr ? 0 : next_in[b];
    int64_t seen = 0, last = -1;
    for (int64_t n = b * tokens.length; n < (b + 1) * tokens.length; ++n) {
      const bool real = tokens.real(n);
      positions[n] = tokens.positions != nullptr ? tokens.positions[n] : before + seen;
      seen += real ? 1 : 0;
      if (real) last = std::max(last, positions[n]);
    }
    if (next_out != nullptr) next_out[b] = seen > 0 ? last + 1 : before;
  }
}

template <class T>
void rotation_tables(const Rope& rope, int64_t tokens, const int64_t* positions, T* cos, T* sin) {
  const auto n = static_cast<int64_t>(rope.inv_freq.size());
  for_each_piece(tokens, 100 * n, [&](int64_t, int64_t begin, int64_t end, int64_t) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < n; ++i) {
        const double angle =
            static_cast<double>(positions[t]) * rope.inv_freq[static_cast<std::size_t>(i)];
        cos[t * n + i] = static_cast<T>(std::cos(angle) * rope.factor);
        sin[t * n + i] = static_cast<T>(std::sin(angle) * rope.factor);
      }
    }
  });
}

#define GRAFT_FOR_TYPE(T)                                           \
  template bool holds<T>(const DLTensor&);                          \
  template const T* rows_of<T>(const DLTensor&, const Tokens&, T*); \
  template void store_rows<T>(const Tokens&, const T*, DLTensor&);  \
  template void clear_pads<T>(const Tokens&, int64_t, T*);          \
  template void add_tensor<T>(const DLTensor*, const Tokens&, T*);  \
  template void rotation_tables<T>(const Rope&, int64_t, const int64_t*, T*, T*);
GRAFT_FOR_TYPE(float)
GRAFT_FOR_TYPE(double)
#undef GRAFT_FOR_TYPE

}  // namespace graft::mixers
