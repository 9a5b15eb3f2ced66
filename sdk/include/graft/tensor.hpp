// Checked access to the DLTensors that cross the ABI.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "graft/status.hpp"

namespace graft::sdk {

inline constexpr DLDataType float64{kDLFloat, 64, 1};
inline constexpr DLDataType float32{kDLFloat, 32, 1};
inline constexpr DLDataType float16{kDLFloat, 16, 1};
inline constexpr DLDataType bfloat16{kDLBfloat, 16, 1};
inline constexpr DLDataType int64{kDLInt, 64, 1};
inline constexpr DLDataType int32{kDLInt, 32, 1};
inline constexpr DLDataType uint8{kDLUInt, 8, 1};

constexpr bool same_dtype(DLDataType a, DLDataType b) noexcept {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline std::string dtype_name(DLDataType dtype) {
  std::string base;
  switch (dtype.code) {
    case kDLFloat:
      base = "float";
      break;
    case kDLBfloat:
      base = "bfloat";
      break;
    case kDLInt:
      base = "int";
      break;
    case kDLUInt:
      base = "uint";
      break;
    case kDLBool:
      base = "bool";
      break;
    default:
      base = cat("dtype(", static_cast<int>(dtype.code), ")");
      break;
  }
  base += cat(static_cast<int>(dtype.bits));
  return dtype.lanes == 1 ? base : cat(base, "x", dtype.lanes);
}

template <class T>
constexpr DLDataType dtype_of() noexcept {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, double>) {
    return float64;
  } else if constexpr (std::is_same_v<U, float>) {
    return float32;
  } else {
    static_assert(std::is_integral_v<U> && !std::is_same_v<U, bool>,
                  "data<T>(): T is float, double or an integer type");
    return DLDataType{static_cast<uint8_t>(std::is_signed_v<U> ? kDLInt : kDLUInt),
                      static_cast<uint8_t>(8 * sizeof(U)), 1};
  }
}

// Number of elements; 1 for a scalar (ndim 0).
inline int64_t numel(const DLTensor& tensor) noexcept {
  int64_t n = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) n *= tensor.shape[i];
  return n;
}

inline uint64_t byte_size(const DLTensor& tensor) noexcept {
  const uint64_t bits = static_cast<uint64_t>(tensor.dtype.bits) * tensor.dtype.lanes;
  return static_cast<uint64_t>(numel(tensor)) * ((bits + 7) / 8);
}

inline std::string shape_string(std::span<const int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? std::string("?") : cat(shape[i]);
  }
  return text + "]";
}

inline std::span<const int64_t> shape_of(const DLTensor& tensor) noexcept {
  return {tensor.shape, static_cast<std::size_t>(tensor.ndim)};
}

inline std::string shape_string(const DLTensor& tensor) { return shape_string(shape_of(tensor)); }

// Row-major without gaps. Strides of NULL mean that; the stride of an axis of size 1 is free, and
// so are those of an empty tensor.
inline bool is_contiguous(const DLTensor& tensor) noexcept {
  if (tensor.strides == nullptr || numel(tensor) == 0) return true;
  int64_t expected = 1;
  for (int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// The element stride of an axis, also where the producer left `strides` NULL.
inline int64_t stride_of(const DLTensor& tensor, int32_t axis) noexcept {
  if (tensor.strides != nullptr) return tensor.strides[axis];
  int64_t stride = 1;
  for (int32_t i = axis + 1; i < tensor.ndim; ++i) stride *= tensor.shape[i];
  return stride;
}

// The checks below throw a Status whose `where` is "tensor:<name>".

inline const DLTensor& require(const DLTensor* tensor, std::string_view name) {
  if (tensor == nullptr) {
    throw Status(GRAFT_INVALID_ARGUMENT, cat("tensor:", name), "is missing (NULL)");
  }
  return *tensor;
}

inline DLTensor& require(DLTensor* tensor, std::string_view name) {
  return const_cast<DLTensor&>(require(static_cast<const DLTensor*>(tensor), name));
}

// A negative entry of `expected` matches any size.
inline void check_shape(const DLTensor& tensor, std::string_view name,
                        std::span<const int64_t> expected) {
  const auto shape = shape_of(tensor);
  bool equal = shape.size() == expected.size();
  for (std::size_t i = 0; equal && i < expected.size(); ++i) {
    equal = expected[i] < 0 || shape[i] == expected[i];
  }
  if (!equal) {
    throw Status(GRAFT_INVALID_ARGUMENT, cat("tensor:", name),
                 cat("expected shape ", shape_string(expected), ", got ", shape_string(tensor)));
  }
}

inline void check_shape(const DLTensor& tensor, std::string_view name,
                        std::initializer_list<int64_t> expected) {
  check_shape(tensor, name, std::span<const int64_t>(expected.begin(), expected.size()));
}

inline void check_dtype(const DLTensor& tensor, std::string_view name, DLDataType expected) {
  if (!same_dtype(tensor.dtype, expected)) {
    throw Status(GRAFT_INVALID_ARGUMENT, cat("tensor:", name),
                 cat("expected dtype ", dtype_name(expected), ", got ", dtype_name(tensor.dtype)));
  }
}

inline void check_device(const DLTensor& tensor, std::string_view name, DLDeviceType expected) {
  if (tensor.device.device_type != expected) {
    throw Status(GRAFT_INVALID_ARGUMENT, cat("tensor:", name),
                 cat("expected a tensor on device type ", static_cast<int>(expected), ", got ",
                     static_cast<int>(tensor.device.device_type)));
  }
}

inline void check_contiguous(const DLTensor& tensor, std::string_view name) {
  if (!is_contiguous(tensor)) {
    throw Status(GRAFT_INVALID_ARGUMENT, cat("tensor:", name),
                 cat("expected contiguous memory, got strides ",
                     shape_string({tensor.strides, static_cast<std::size_t>(tensor.ndim)}),
                     " for shape ", shape_string(tensor)));
  }
}

inline void* data_address(const DLTensor& tensor) noexcept {
  // An empty tensor has data NULL, to which nothing may be added.
  return tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
}

// The elements of a contiguous CPU tensor of exactly type T (float, double, integers).
template <class T>
std::span<T> data(const DLTensor& tensor, std::string_view name) {
  check_device(tensor, name, kDLCPU);
  check_dtype(tensor, name, dtype_of<T>());
  check_contiguous(tensor, name);
  const int64_t n = numel(tensor);
  if (n > 0 && tensor.data == nullptr) {
    throw Status(GRAFT_INVALID_ARGUMENT, cat("tensor:", name),
                 cat("has no data for shape ", shape_string(tensor)));
  }
  return {static_cast<T*>(data_address(tensor)), static_cast<std::size_t>(n)};
}

}  // namespace graft::sdk
