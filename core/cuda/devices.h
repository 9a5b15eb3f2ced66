#pragma once

#include <string>
#include <vector>

namespace graft::cuda {

struct Device {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int processors = 0;
  double memory_gib = 0;
};

// The CUDA devices of this machine that this build can use. Which implementation this is, core/cuda
// or core/no_cuda, is chosen when the build is configured (GRAFT_CUDA).
std::vector<Device> devices();

// "" where there is a device, else why there is none and what to do.
std::string why_no_device();

}  // namespace graft::cuda
