// Runs a call of gdn_cuda.h or linear_cuda.h on a device: its arena is copied there, its pointers
// follow, and what came out is copied back. device_testing.cpp has it with CUDA; without, no test
// that needs a device gets this far.
#pragma once

#include <functional>
#include <string>

#include "cuda_testing.h"

namespace graft::cuda {

// call(shift, stream): launch with all pointers into `arena` moved by `shift` bytes. What went
// wrong, or "".
std::string run_on_device(const Arena& arena,
                          const std::function<std::string(std::ptrdiff_t, void*)>& call);

}  // namespace graft::cuda
