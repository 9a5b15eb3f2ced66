// Tensors the kit hands to plugins: aligned as the ABI promises, with guard zones on both sides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graft/tensor.hpp"

namespace graft::conformance {

class Tensor {
 public:
  Tensor() = default;  // no tensor: c() is NULL
  // Filled with 0xFF: NaN in every floating type.
  Tensor(DLDataType dtype, std::vector<std::int64_t> shape);
  Tensor(DLDataType dtype, std::vector<std::int64_t> shape, std::span<const double> values);
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor&&) noexcept = default;
  Tensor copy() const;

  bool there() const { return memory_ != nullptr; }
  DLTensor* c() { return there() ? &dl_ : nullptr; }
  const DLTensor* c() const { return there() ? &dl_ : nullptr; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  DLDataType dtype() const { return dl_.dtype; }
  bool floating() const { return dl_.dtype.code == kDLFloat || dl_.dtype.code == kDLBfloat; }
  std::int64_t size() const { return size_; }

  // Elements in row-major order, each as a double, and back (rounded to the type).
  std::vector<double> values() const;
  double at(std::int64_t i) const;
  void set(std::span<const double> values);
  void set(std::int64_t i, double value);
  void fill(double value);
  void poison();  // 0xFF in every byte

  std::span<const std::byte> bytes() const;
  bool same_bytes(const Tensor& other) const;
  // The bytes around the elements are as they were.
  bool intact() const;

 private:
  std::byte* first() const;
  std::uint64_t byte_count() const;

  std::vector<std::int64_t> shape_, strides_;
  std::int64_t size_ = 0;
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  DLTensor dl_{};
};

std::vector<Tensor> copies(const std::vector<Tensor>& tensors);

// Every element finite; else the index of the first that is not.
std::optional<std::int64_t> first_not_finite(const Tensor& tensor);

// rows [b] of a tensor whose first axis is the batch; [b, from:to) of one with a token axis behind
// it.
Tensor row(const Tensor& tensor, std::int64_t b);
Tensor tokens(const Tensor& tensor, std::int64_t from, std::int64_t to);

}  // namespace graft::conformance
