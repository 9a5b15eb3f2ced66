#include "kit/tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "kit/verdict.h"

namespace graft::conformance {
namespace {

// A multiple of the promised alignment; wide enough for a stray vector store.
constexpr std::size_t kGuard = 256;
constexpr std::size_t kAlignment = 64;
constexpr std::byte kGuardByte{0xA5};

double from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t to_bfloat16(double value) {
  const float f = static_cast<float>(value);
  if (std::isnan(f)) return 0x7FC0;
  const auto bits = std::bit_cast<std::uint32_t>(f);
  // To the nearest, ties to even.
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

double from_float16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F, fraction = bits & 0x3FF;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 0x1F) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

std::uint16_t to_float16(double value) {
  if (std::isnan(value)) return 0x7E00;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (size >= 65520) return sign | 0x7C00;
  if (size == 0) return sign;
  const int exponent = std::max(std::ilogb(size), -14);
  // rint() rounds ties to even; a carry moves into the exponent by itself.
  const auto steps = static_cast<std::uint32_t>(std::rint(std::ldexp(size, 10 - exponent)));
  return sign |
         static_cast<std::uint16_t>((static_cast<std::uint32_t>(exponent + 14) << 10) + steps);
}

template <class T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
template <class T>
void store(std::byte* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

double read_element(DLDataType type, const std::byte* p) {
  if (type.code == kDLBfloat) return from_bfloat16(load<std::uint16_t>(p));
  if (type.code == kDLFloat) {
    if (type.bits == 64) return load<double>(p);
    if (type.bits == 32) return static_cast<double>(load<float>(p));
    return from_float16(load<std::uint16_t>(p));
  }
  if (type.code == kDLUInt || type.code == kDLBool)
    return static_cast<double>(load<std::uint8_t>(p));
  if (type.bits == 64) return static_cast<double>(load<std::int64_t>(p));
  return static_cast<double>(load<std::int32_t>(p));
}

void write_element(DLDataType type, std::byte* p, double value) {
  if (type.code == kDLBfloat) return store(p, to_bfloat16(value));
  if (type.code == kDLFloat) {
    if (type.bits == 64) return store(p, value);
    if (type.bits == 32) return store(p, static_cast<float>(value));
    return store(p, to_float16(value));
  }
  if (type.code == kDLUInt || type.code == kDLBool)
    return store(p, static_cast<std::uint8_t>(value));
  if (type.bits == 64) return store(p, static_cast<std::int64_t>(value));
  store(p, static_cast<std::int32_t>(value));
}

bool known(DLDataType type) {
  if (type.lanes != 1) return false;
  switch (type.code) {
    case kDLFloat:
      return type.bits == 64 || type.bits == 32 || type.bits == 16;
    case kDLBfloat:
      return type.bits == 16;
    case kDLInt:
      return type.bits == 64 || type.bits == 32;
    case kDLUInt:
    case kDLBool:
      return type.bits == 8;
    default:
      return false;
  }
}

}  // namespace

void Tensor::Free::operator()(std::byte* p) const { std::free(p); }

Tensor::Tensor(DLDataType dtype, std::vector<std::int64_t> shape) : shape_(std::move(shape)) {
  if (!known(dtype))
    fail("the plugin asks for a tensor of ", sdk::dtype_name(dtype), ", which the kit cannot make");
  size_ = 1;
  for (const std::int64_t n : shape_) {
    if (n < 0 || n > (std::int64_t{1} << 40))
      fail("a tensor of shape ", sdk::shape_string(shape_), " is asked for");
    size_ *= n;
  }
  strides_.assign(shape_.size(), 1);
  for (std::size_t i = shape_.size(); i-- > 1;) strides_[i - 1] = strides_[i] * shape_[i];
  dl_.device = {kDLCPU, 0};
  dl_.ndim = static_cast<std::int32_t>(shape_.size());
  dl_.dtype = dtype;
  dl_.shape = shape_.data();
  dl_.strides = strides_.data();
  const std::size_t rounded = (byte_count() + kAlignment - 1) / kAlignment * kAlignment;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded + 2 * kGuard)));
  if (memory_ == nullptr) throw std::bad_alloc();
  std::fill_n(memory_.get(), rounded + 2 * kGuard, kGuardByte);
  dl_.data = size_ == 0 ? nullptr : first();
  poison();
}

Tensor::Tensor(DLDataType dtype, std::vector<std::int64_t> shape, std::span<const double> values)
    : Tensor(dtype, std::move(shape)) {
  set(values);
}

Tensor Tensor::copy() const {
  if (!there()) return {};
  Tensor out(dl_.dtype, shape_);
  if (size_ > 0) std::memcpy(out.first(), first(), byte_count());
  return out;
}

std::byte* Tensor::first() const { return memory_.get() + kGuard; }

std::uint64_t Tensor::byte_count() const {
  return static_cast<std::uint64_t>(size_) * (dl_.dtype.bits / 8u);
}

std::vector<double> Tensor::values() const {
  std::vector<double> out(static_cast<std::size_t>(size_));
  for (std::int64_t i = 0; i < size_; ++i) out[static_cast<std::size_t>(i)] = at(i);
  return out;
}

double Tensor::at(std::int64_t i) const {
  return read_element(dl_.dtype, first() + i * (dl_.dtype.bits / 8));
}

void Tensor::set(std::span<const double> values) {
  if (static_cast<std::int64_t>(values.size()) != size_) {
    throw std::logic_error("Tensor::set: another number of elements");
  }
  for (std::int64_t i = 0; i < size_; ++i) set(i, values[static_cast<std::size_t>(i)]);
}

void Tensor::set(std::int64_t i, double value) {
  write_element(dl_.dtype, first() + i * (dl_.dtype.bits / 8), value);
}

void Tensor::fill(double value) {
  for (std::int64_t i = 0; i < size_; ++i) set(i, value);
}

void Tensor::poison() { std::fill_n(first(), byte_count(), std::byte{0xFF}); }

std::span<const std::byte> Tensor::bytes() const {
  return {first(), static_cast<std::size_t>(byte_count())};
}

bool Tensor::same_bytes(const Tensor& other) const {
  return std::ranges::equal(bytes(), other.bytes());
}

bool Tensor::intact() const {
  if (!there()) return true;
  const std::byte* const end = first() + byte_count();
  const std::size_t rounded = (byte_count() + kAlignment - 1) / kAlignment * kAlignment;
  const auto untouched = [](std::byte b) { return b == kGuardByte; };
  return std::all_of(memory_.get(), first(), untouched) &&
         std::all_of(end, static_cast<const std::byte*>(first() + rounded + kGuard), untouched);
}

std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> out;
  for (const Tensor& tensor : tensors) out.push_back(tensor.copy());
  return out;
}

std::optional<std::int64_t> first_not_finite(const Tensor& tensor) {
  if (!tensor.there() || !tensor.floating()) return std::nullopt;
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    if (!std::isfinite(tensor.at(i))) return i;
  }
  return std::nullopt;
}

Tensor row(const Tensor& tensor, std::int64_t b) {
  std::vector<std::int64_t> shape = tensor.shape();
  const std::int64_t per_row = tensor.size() / shape[0];
  shape[0] = 1;
  Tensor out(tensor.dtype(), shape);
  for (std::int64_t i = 0; i < per_row; ++i) out.set(i, tensor.at(b * per_row + i));
  return out;
}

Tensor tokens(const Tensor& tensor, std::int64_t from, std::int64_t to) {
  std::vector<std::int64_t> shape = tensor.shape();
  const std::int64_t batch = shape[0], all = shape[1];
  const std::int64_t width = batch * all == 0 ? 0 : tensor.size() / (batch * all);
  shape[1] = to - from;
  Tensor out(tensor.dtype(), shape);
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < (to - from) * width; ++i) {
      out.set(b * (to - from) * width + i, tensor.at((b * all + from) * width + i));
    }
  }
  return out;
}

}  // namespace graft::conformance
