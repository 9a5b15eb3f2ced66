#include <algorithm>
#include <cstring>
#include <limits>

#include "core/checkpoint/safetensors.h"

namespace graft {
namespace {

// A floating-point format, by its bits.
template <class WordType, WordType kExponent, WordType kMantissa>
struct Format {
  using Word = WordType;
  static constexpr Word exponent = kExponent;
  static constexpr Word mantissa = kMantissa;
  static constexpr Word top = static_cast<Word>(Word{1} << (std::numeric_limits<Word>::digits - 1));
  // Adding the exponent's lowest bit to an exponent of all ones carries into the sign's place,
  // which the mask has cleared: an addition tells infinity and NaN from all else.
  static constexpr Word carry = static_cast<Word>(top - exponent);

  static Word load(const std::byte* data, std::size_t i) {
    Word word;
    std::memcpy(&word, data + i * sizeof(Word), sizeof(Word));  // data need not be aligned
    return word;
  }
  static bool is_finite(Word word) {
    return (static_cast<Word>((word & exponent) + carry) & top) == 0;
  }
};

using F64 = Format<std::uint64_t, 0x7FF0000000000000, 0x000FFFFFFFFFFFFF>;
using F32 = Format<std::uint32_t, 0x7F800000, 0x007FFFFF>;
using F16 = Format<std::uint16_t, 0x7C00, 0x03FF>;
using BF16 = Format<std::uint16_t, 0x7F80, 0x007F>;
using F8E5M2 = Format<std::uint8_t, 0x7C, 0x03>;
// E4M3 has no infinity, and NaN only where exponent and mantissa are all ones.
using F8E4M3 = Format<std::uint8_t, 0x7F, 0x7F>;

// No branch within a block, so that the compiler makes vector code of it.
template <class F>
bool block_is_finite(const std::byte* data, std::size_t begin, std::size_t end) {
  typename F::Word carried = 0;
  for (std::size_t i = begin; i < end; ++i) {
    carried =
        static_cast<typename F::Word>(carried | ((F::load(data, i) & F::exponent) + F::carry));
  }
  return (carried & F::top) == 0;
}

template <class F>
std::optional<NonFinite> find(const std::byte* data, std::size_t count) {
  constexpr std::size_t kBlock = 4096;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t end = std::min(count, begin + kBlock);
    if (block_is_finite<F>(data, begin, end)) continue;
    std::size_t i = begin;
    while (F::is_finite(F::load(data, i))) ++i;
    const auto word = F::load(data, i);
    const bool infinite = (word & F::mantissa) == 0;
    const char* value = !infinite ? "nan" : (word & F::top) != 0 ? "-inf" : "inf";
    return NonFinite{static_cast<std::int64_t>(i), {}, value};
  }
  return std::nullopt;
}

std::optional<NonFinite> find_by_type(const TensorView& tensor) {
  const std::size_t count = tensor.bytes / size_of(tensor.dtype);
  switch (tensor.dtype) {
    case DType::F64:
      return find<F64>(tensor.data, count);
    case DType::F32:
      return find<F32>(tensor.data, count);
    case DType::F16:
      return find<F16>(tensor.data, count);
    case DType::BF16:
      return find<BF16>(tensor.data, count);
    case DType::F8_E5M2:
      return find<F8E5M2>(tensor.data, count);
    case DType::F8_E4M3:
      return find<F8E4M3>(tensor.data, count);
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<NonFinite> find_non_finite(const TensorView& tensor) {
  std::optional<NonFinite> found = find_by_type(tensor);
  if (!found) return found;
  found->index.resize(tensor.shape.size());
  std::int64_t rest = found->flat_index;
  for (std::size_t i = tensor.shape.size(); i-- > 0;) {
    found->index[i] = rest % tensor.shape[i];
    rest /= tensor.shape[i];
  }
  return found;
}

}  // namespace graft
