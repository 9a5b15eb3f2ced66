#include "gdn_cuda.h"

#include "gdn_kernels.h"
#include "launch.cuh"
#include "problems.h"

namespace graft::cuda {
namespace {

template <class E>
std::string forward(const GdnShape& shape, const GdnForward<E>& io, void* stream) {
  if (const std::string problem = problem_of(shape, io); !problem.empty()) return problem;
  DeviceLaunch launch(stream);
  gdn_forward_steps(shape, io, launch.limits(), launch);
  return launch.problem();
}
template <class E>
std::string backward(const GdnShape& shape, const GdnBackward<E>& io, void* stream) {
  if (const std::string problem = problem_of(shape, io); !problem.empty()) return problem;
  DeviceLaunch launch(stream);
  gdn_backward_steps(shape, io, launch.limits(), launch);
  return launch.problem();
}
template <class E>
std::string step(const GdnShape& shape, const GdnStep<E>& io, void* stream) {
  if (const std::string problem = problem_of(shape, io); !problem.empty()) return problem;
  DeviceLaunch launch(stream);
  gdn_step_steps(shape, io, launch.limits(), launch);
  return launch.problem();
}

}  // namespace

std::string gdn_forward(const GdnShape& shape, const GdnForward<float>& io, void* stream) {
  return forward(shape, io, stream);
}
std::string gdn_forward(const GdnShape& shape, const GdnForward<bf16>& io, void* stream) {
  return forward(shape, io, stream);
}
std::string gdn_backward(const GdnShape& shape, const GdnBackward<float>& io, void* stream) {
  return backward(shape, io, stream);
}
std::string gdn_backward(const GdnShape& shape, const GdnBackward<bf16>& io, void* stream) {
  return backward(shape, io, stream);
}
std::string gdn_step(const GdnShape& shape, const GdnStep<float>& io, void* stream) {
  return step(shape, io, stream);
}
std::string gdn_step(const GdnShape& shape, const GdnStep<bf16>& io, void* stream) {
  return step(shape, io, stream);
}

}  // namespace graft::cuda
