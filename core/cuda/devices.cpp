#include "core/cuda/devices.h"

#include <cuda_runtime_api.h>

namespace graft::cuda {
namespace {

// The kernels are built for compute capability 8.0 and later.
constexpr int kLeastMajor = 8;

cudaError_t count_devices(int& count) {
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) count = 0;
  return error;
}

}  // namespace

std::vector<Device> devices() {
  int count = 0;
  count_devices(count);
  std::vector<Device> out;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, i) != cudaSuccess || p.major < kLeastMajor) continue;
    constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
    out.push_back({p.name, p.major, p.minor, p.multiProcessorCount,
                   static_cast<double>(p.totalGlobalMem) / kGib});
  }
  return out;
}

std::string why_no_device() {
  if (!devices().empty()) return "";
  int count = 0;
  const cudaError_t error = count_devices(count);
  if (error != cudaSuccess)
    return std::string("no CUDA device: ") + cudaGetErrorString(error) + " (" +
           cudaGetErrorName(error) + "); nvidia-smi says what the driver sees";
  if (count == 0) return "no CUDA device: the driver lists none";
  return "no CUDA device of compute capability 8.0 or later among the " + std::to_string(count) +
         " there are";
}

}  // namespace graft::cuda
