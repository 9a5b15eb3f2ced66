// The launchers of a build without CUDA.
#include "gdn_cuda.h"
#include "linear_cuda.h"

namespace graft::cuda {
namespace {

std::string no_cuda(const char* call) {
  return std::string(call) +
         ": this build has no CUDA; configure with -DGRAFT_CUDA=ON where nvcc is on PATH";
}

}  // namespace

std::string gdn_forward(const GdnShape&, const GdnForward<float>&, void*) {
  return no_cuda("gdn_forward");
}
std::string gdn_forward(const GdnShape&, const GdnForward<bf16>&, void*) {
  return no_cuda("gdn_forward");
}
std::string gdn_backward(const GdnShape&, const GdnBackward<float>&, void*) {
  return no_cuda("gdn_backward");
}
std::string gdn_backward(const GdnShape&, const GdnBackward<bf16>&, void*) {
  return no_cuda("gdn_backward");
}
std::string gdn_step(const GdnShape&, const GdnStep<float>&, void*) { return no_cuda("gdn_step"); }
std::string gdn_step(const GdnShape&, const GdnStep<bf16>&, void*) { return no_cuda("gdn_step"); }
std::string linear_forward(const LinearShape&, const LinearForward<float>&, void*) {
  return no_cuda("linear_forward");
}
std::string linear_forward(const LinearShape&, const LinearForward<bf16>&, void*) {
  return no_cuda("linear_forward");
}
std::string linear_backward(const LinearShape&, const LinearBackward<float>&, void*) {
  return no_cuda("linear_backward");
}
std::string linear_backward(const LinearShape&, const LinearBackward<bf16>&, void*) {
  return no_cuda("linear_backward");
}
std::string linear_step(const LinearShape&, const LinearStep<float>&, void*) {
  return no_cuda("linear_step");
}
std::string linear_step(const LinearShape&, const LinearStep<bf16>&, void*) {
  return no_cuda("linear_step");
}

}  // namespace graft::cuda
