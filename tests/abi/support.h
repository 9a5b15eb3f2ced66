#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "graft/graft.h"

namespace graft::testing {

inline std::filesystem::path fixture(const std::string& name) {
  return std::filesystem::path(GRAFT_FIXTURE_DIR) / (name + ".so");
}

// A float tensor as the host passes them: aligned, strides filled.
class CpuTensor {
 public:
  explicit CpuTensor(std::vector<std::int64_t> shape, float fill = 0) : shape_(std::move(shape)) {
    std::size_t n = 1;
    for (const std::int64_t size : shape_) n *= static_cast<std::size_t>(size);
    strides_.assign(shape_.size(), 1);
    for (std::size_t i = shape_.size(); i-- > 1;) strides_[i - 1] = strides_[i] * shape_[i];
    values_ = {static_cast<float*>(::operator new (n * sizeof(float) + 64, std::align_val_t{64})),
               n};
    for (float& value : values_) value = fill;
    dl_ = {n == 0 ? nullptr : values_.data(),
           {kDLCPU, 0},
           static_cast<std::int32_t>(shape_.size()),
           {kDLFloat, 32, 1},
           shape_.data(),
           strides_.data(),
           0};
  }
  CpuTensor(std::vector<std::int64_t> shape, std::initializer_list<float> values)
      : CpuTensor(std::move(shape)) {
    std::copy(values.begin(), values.end(), values_.begin());
  }
  ~CpuTensor() { ::operator delete (values_.data(), std::align_val_t{64}); }
  CpuTensor(const CpuTensor&) = delete;
  CpuTensor& operator=(const CpuTensor&) = delete;

  DLTensor* dl() { return &dl_; }
  std::span<float> values() { return values_; }
  std::vector<float> copy() const { return {values_.begin(), values_.end()}; }

 private:
  std::vector<std::int64_t> shape_, strides_;
  std::span<float> values_;
  DLTensor dl_{};
};

template <class Struct>
Struct sized() {
  Struct s{};
  s.struct_size = sizeof s;
  return s;
}

// A layer of a small model.
inline graft_layer_info small_layer(std::int64_t model_dim = 4) {
  static const double frequencies[] = {1.0, 0.1};
  auto layer = sized<graft_layer_info>();
  layer.n_layers = layer.n_heads = layer.n_kv_heads = 1;
  layer.head_dim = static_cast<std::int32_t>(model_dim);
  layer.model_dim = model_dim;
  layer.rope_scaling = "";
  layer.family = "llama";
  layer.rope_inv_freq = frequencies;
  layer.n_rope_freq = 2;
  layer.rope_attention_factor = 1;
  return layer;
}

inline graft_plan_in plan_for(std::int64_t batch, std::int64_t tokens, std::uint64_t flags = 0) {
  auto in = sized<graft_plan_in>();
  in.device_type = kDLCPU;
  in.dtype = {kDLFloat, 32, 1};
  in.flags = flags;
  in.batch = batch;
  in.tokens = tokens;
  return in;
}

inline graft_exec cpu_exec(std::uint64_t flags = 0) {
  auto exec = sized<graft_exec>();
  exec.device_type = kDLCPU;
  exec.flags = flags;
  return exec;
}

}  // namespace graft::testing
