#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/abi/host_services.h"
#include "graft/graft.h"

namespace graft {

// A DLTensor that borrows an at::Tensor for the length of a call across the ABI: strides always
// filled, byte_offset 0. Keeps the tensor alive; not to be moved while a plugin may hold the
// pointer.
class BorrowedTensor {
 public:
  BorrowedTensor() = default;
  explicit BorrowedTensor(at::Tensor tensor);
  BorrowedTensor(const BorrowedTensor&) = delete;
  BorrowedTensor& operator=(const BorrowedTensor&) = delete;

  DLTensor* get() { return tensor_.defined() ? &dl_ : nullptr; }
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
  std::vector<std::int64_t> shape_, strides_;
  DLTensor dl_{};
};

// Several of them, as the arrays of pointers the ABI wants. An undefined tensor becomes a NULL
// entry.
class BorrowedTensors {
 public:
  BorrowedTensors() = default;
  explicit BorrowedTensors(const std::vector<at::Tensor>& tensors);

  DLTensor* const* data() { return pointers_.empty() ? nullptr : pointers_.data(); }
  const DLTensor* const* const_data() { return data(); }
  std::uint32_t size() const { return static_cast<std::uint32_t>(pointers_.size()); }

 private:
  std::vector<std::unique_ptr<BorrowedTensor>> tensors_;
  std::vector<DLTensor*> pointers_;
};

// The tensor itself where its data is aligned as the ABI promises of what plugins read (a part of
// another often is not), else a copy.
at::Tensor aligned(const at::Tensor& tensor);

// The tensor behind a plugin's DLTensor, without a copy. Valid as long as the plugin says its
// memory is.
at::Tensor view_of(const DLTensor& tensor);

DLDataType dl_dtype(at::ScalarType type);
at::ScalarType scalar_type(DLDataType type);

// Memory a plugin may use during one call: 256-aligned, contents undefined. Grows, never shrinks.
class Workspace {
 public:
  void* reserve(std::uint64_t bytes);
  std::uint64_t size() const { return bytes_; }

 private:
  at::Tensor storage_;
  void* base_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// graft.host-blas/1 and graft.host-parallel/1 on LibTorch's GEMM and thread pool.
const graft_host_blas* torch_host_blas();
const graft_host_parallel* torch_host_parallel();
// Host services with both of them.
HostServices::Settings torch_host_settings();

}  // namespace graft
