// The launchers of a build without CUDA.
#include "gdn_cuda.h"

namespace graft::cuda {
namespace {

std::string no_cuda(const char* call) {
  return std::string(call) +
         ": this build has no CUDA; configure with -DGRAFT_CUDA=ON where nvcc is on PATH";
}

}  // namespace

std::string gdn_forward(const GdnShape&, const GdnForward<float>&, void*) { return no_cuda("gdn_forward"); }
std::string gdn_forward(const GdnShape&, const GdnForward<bf16>&, void*) { return no_cuda("gdn_forward"); }
std::string gdn_backward(const GdnShape&, const GdnBackward<float>&, void*) { return no_cuda("gdn_backward"); }
std::string gdn_backward(const GdnShape&, const GdnBackward<bf16>&, void*) { return no_cuda("gdn_backward"); }
std::string gdn_step(const GdnShape&, const GdnStep<float>&, void*) { return no_cuda("gdn_step"); }
std::string gdn_step(const GdnShape&, const GdnStep<bf16>&, void*) { return no_cuda("gdn_step"); }

}  // namespace graft::cuda
