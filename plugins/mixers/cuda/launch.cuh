// A `launch` of the kernels' lists on the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "block.h"

namespace graft::cuda {

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 1) run(const __grid_constant__ Kernel kernel) {
  DeviceBlock block;
  kernel(block);
}

// After the first failure nothing more is launched.
class DeviceLaunch {
 public:
  explicit DeviceLaunch(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    attribute(device, cudaDevAttrMultiProcessorCount, processors_);
    attribute(device, cudaDevAttrMaxSharedMemoryPerBlockOptin, shared_);
  }
  DeviceLimits limits() const { return {processors_, shared_}; }

  template <class Kernel>
  void operator()(const Kernel& kernel) {
    const Grid grid = kernel.grid();
    const int bytes = kernel.shared() * static_cast<int>(sizeof(float));
    if (!problem_.empty() || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    if (bytes > shared_) {
      problem_ = "a block needs " + std::to_string(bytes) +
                 " bytes of shared memory and this device has " + std::to_string(shared_) +
                 ": run heads of this size on the CPU";
      return;
    }
    if (!check(
            cudaFuncSetAttribute(run<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "cudaFuncSetAttribute"))
      return;
    run<Kernel><<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                       static_cast<unsigned>(grid.z)),
                  kThreads, static_cast<size_t>(bytes), stream_>>>(kernel);
    check(cudaGetLastError(), "a kernel's launch");
  }
  const std::string& problem() const { return problem_; }

 private:
  void attribute(int device, cudaDeviceAttr which, int& value) {
    if (problem_.empty())
      check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  }
  bool check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return true;
    problem_ =
        std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
    return false;
  }

  cudaStream_t stream_;
  int processors_ = 1, shared_ = 0;
  std::string problem_;
};

}  // namespace graft::cuda
