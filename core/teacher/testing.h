#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/json.h"
#include "core/base/testing.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/safetensors.h"

// For tests only: checkpoints as maps of tensors that can be changed and written again.

namespace graft {

inline const std::filesystem::path kModels = std::filesystem::path(GRAFT_TEST_DATA) / "models";

inline at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::F64:
      return at::kDouble;
    case DType::F32:
      return at::kFloat;
    case DType::F16:
      return at::kHalf;
    case DType::BF16:
      return at::kBFloat16;
    case DType::I64:
      return at::kLong;
    default:
      throw std::invalid_argument(name(dtype));
  }
}

inline DType dtype_of(at::ScalarType type) {
  for (const DType dtype : {DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64}) {
    if (scalar_type_of(dtype) == type) return dtype;
  }
  throw std::invalid_argument(c10::toString(type));
}

inline at::Tensor to_tensor(const TensorView& view) {
  at::Tensor out = at::empty(view.shape, scalar_type_of(view.dtype));
  std::memcpy(out.mutable_data_ptr(), view.data, view.bytes);
  return out;
}

using TensorMap = std::map<std::string, at::Tensor>;

inline TensorMap read_tensors(const Checkpoint& checkpoint) {
  TensorMap out;
  for (const std::string& name : checkpoint.names()) out[name] = to_tensor(checkpoint.at(name));
  return out;
}

inline TensorMap read_tensors(const std::filesystem::path& file) {
  const SafetensorsFile opened = SafetensorsFile::open(file);
  TensorMap out;
  for (const TensorView& view : opened.tensors()) out[view.name] = to_tensor(view);
  return out;
}

// A model folder in memory: config.json and tensors, from a golden model or made here.
struct ModelFiles {
  nlohmann::json config;
  TensorMap tensors;

  static ModelFiles golden(const std::string& model) {
    return {read_json(kModels / model / "config.json"),
            read_tensors(Checkpoint::open(kModels / model))};
  }

  void write(const std::filesystem::path& folder) const {
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "config.json") << config.dump();
    std::vector<TensorView> views;
    std::vector<at::Tensor> kept;
    for (const auto& [name, tensor] : tensors) {
      kept.push_back(tensor.contiguous());
      views.push_back({name, dtype_of(tensor.scalar_type()), tensor.sizes().vec(),
                       static_cast<const std::byte*>(kept.back().const_data_ptr()),
                       kept.back().nbytes(), nullptr});
    }
    write_safetensors(folder / "model.safetensors", views);
  }
};

inline double max_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

}  // namespace graft
