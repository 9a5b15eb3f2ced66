#include "device_testing.h"

#include <cuda_runtime_api.h>

namespace graft::cuda {
namespace {

std::string text(cudaError_t error, const char* what) {
  return error == cudaSuccess ? "" : std::string(what) + ": " + cudaGetErrorString(error);
}

}  // namespace

std::string run_on_device(const Arena& arena,
                          const std::function<std::string(std::ptrdiff_t, void*)>& call) {
  void* device = nullptr;
  std::string problem = text(cudaMalloc(&device, arena.used()), "cudaMalloc");
  cudaStream_t stream = nullptr;
  if (problem.empty()) problem = text(cudaStreamCreate(&stream), "cudaStreamCreate");
  if (problem.empty())
    problem =
        text(cudaMemcpyAsync(device, arena.data(), arena.used(), cudaMemcpyHostToDevice, stream),
             "copy to the device");
  if (problem.empty()) problem = call(static_cast<std::byte*>(device) - arena.data(), stream);
  if (problem.empty())
    problem =
        text(cudaMemcpyAsync(arena.data(), device, arena.used(), cudaMemcpyDeviceToHost, stream),
             "copy from the device");
  if (problem.empty()) problem = text(cudaStreamSynchronize(stream), "the kernels");
  if (stream != nullptr) cudaStreamDestroy(stream);
  cudaFree(device);
  return problem;
}

}  // namespace graft::cuda
