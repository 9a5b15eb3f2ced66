#include "linear_cuda.h"

#include "launch.cuh"
#include "linear_kernels.h"
#include "problems.h"

namespace graft::cuda {
namespace {

template <class E>
std::string forward(const LinearShape& shape, const LinearForward<E>& io, void* stream) {
  if (const std::string problem = problem_of(shape, io); !problem.empty()) return problem;
  DeviceLaunch launch(stream);
  linear_forward_steps(shape, io, launch);
  return launch.problem();
}
template <class E>
std::string backward(const LinearShape& shape, const LinearBackward<E>& io, void* stream) {
  if (const std::string problem = problem_of(shape, io); !problem.empty()) return problem;
  DeviceLaunch launch(stream);
  linear_backward_steps(shape, io, launch);
  return launch.problem();
}
template <class E>
std::string step(const LinearShape& shape, const LinearStep<E>& io, void* stream) {
  if (const std::string problem = problem_of(shape, io); !problem.empty()) return problem;
  DeviceLaunch launch(stream);
  linear_step_steps(shape, io, launch);
  return launch.problem();
}

}  // namespace

std::string linear_forward(const LinearShape& shape, const LinearForward<float>& io, void* stream) {
  return forward(shape, io, stream);
}
std::string linear_forward(const LinearShape& shape, const LinearForward<bf16>& io, void* stream) {
  return forward(shape, io, stream);
}
std::string linear_backward(const LinearShape& shape, const LinearBackward<float>& io,
                            void* stream) {
  return backward(shape, io, stream);
}
std::string linear_backward(const LinearShape& shape, const LinearBackward<bf16>& io,
                            void* stream) {
  return backward(shape, io, stream);
}
std::string linear_step(const LinearShape& shape, const LinearStep<float>& io, void* stream) {
  return step(shape, io, stream);
}
std::string linear_step(const LinearShape& shape, const LinearStep<bf16>& io, void* stream) {
  return step(shape, io, stream);
}

}  // namespace graft::cuda
