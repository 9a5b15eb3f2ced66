#include "core/cuda/devices.h"

namespace graft::cuda {

std::vector<Device> devices() { return {}; }

std::string why_no_device() {
  return "this build has no CUDA: configure with -DGRAFT_CUDA=ON where nvcc is on PATH";
}

}  // namespace graft::cuda
