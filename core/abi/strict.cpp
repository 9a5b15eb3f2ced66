#include "core/abi/strict.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/base/error.h"

namespace graft {
namespace {

constexpr std::uintptr_t kPromisedAlignment = 64;

std::int64_t element_count(const DLTensor& tensor) {
  std::int64_t count = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) count *= tensor.shape[i];
  return count;
}

bool row_major(const DLTensor& tensor) {
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// Calls `use` for each tensor of an array that may be missing.
template <class Tensor, class Use>
void for_each(Tensor* const* tensors, std::uint32_t count, Use&& use) {
  if (tensors == nullptr) return;
  for (std::uint32_t i = 0; i < count; ++i) use(tensors[i], i);
}

}  // namespace

bool strict_mode() {
  static const bool strict = [] {
    const char* const value = std::getenv("GRAFT_HOST_STRICT");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return strict;
}

void check_promised(const DLTensor* tensor, const std::string& what) {
  if (tensor == nullptr) return;
  const auto broken = [&](const char* promise) {
    fail(ErrorKind::internal, what + ": the host passes a tensor " + promise);
  };
  if (tensor->ndim < 0) broken("with a negative number of axes");
  if (tensor->ndim > 0 && (tensor->shape == nullptr || tensor->strides == nullptr)) {
    broken("without shape or strides");
  }
  if (tensor->byte_offset != 0) broken("with a byte_offset");
  if (element_count(*tensor) == 0) return;
  if (tensor->data == nullptr) broken("without data");
  if (reinterpret_cast<std::uintptr_t>(tensor->data) % kPromisedAlignment != 0) {
    broken("that is not aligned to 64 bytes");
  }
}

void check_promised(const graft_mixer_forward& call, const std::string& what) {
  check_promised(call.x, what + ", x");
  check_promised(call.y, what + ", y");
  check_promised(call.positions, what + ", positions");
  check_promised(call.pad_mask, what + ", pad_mask");
  const auto check_all = [&](auto* const* tensors, std::uint32_t count, const char* name) {
    for_each(tensors, count, [&](const DLTensor* tensor, std::uint32_t i) {
      check_promised(tensor, what + ", " + name + " " + std::to_string(i));
    });
  };
  check_all(call.params, call.n_params, "parameter");
  check_all(call.state_in, call.n_state, "state_in");
  check_all(call.state_out, call.n_state, "state_out");
  check_all(call.saved, call.n_saved, "saved");
  check_all(call.taps, call.n_taps, "tap");
}

void poison(void* memory, std::uint64_t bytes) {
  if (memory != nullptr && bytes > 0) std::memset(memory, 0xFF, bytes);
}

void poison(const DLTensor* tensor) {
  if (tensor == nullptr || tensor->device.device_type != kDLCPU || tensor->data == nullptr) return;
  if (tensor->strides != nullptr && !row_major(*tensor)) return;
  const std::uint64_t bits = std::uint64_t{tensor->dtype.bits} * tensor->dtype.lanes;
  poison(tensor->data, static_cast<std::uint64_t>(element_count(*tensor)) * ((bits + 7) / 8));
}

void poison_outputs(const graft_exec& exec, const graft_mixer_forward& call) {
  if (exec.device_type != kDLCPU) return;
  poison(exec.workspace, exec.workspace_bytes);
  poison(call.y);
  for_each(call.saved, call.n_saved, [](const DLTensor* tensor, std::uint32_t) { poison(tensor); });
  for_each(call.taps, call.n_taps, [](const DLTensor* tensor, std::uint32_t) { poison(tensor); });
  for_each(call.state_out, call.n_state, [&](const DLTensor* tensor, std::uint32_t i) {
    const DLTensor* const from = call.state_in == nullptr ? nullptr : call.state_in[i];
    const bool in_place = tensor != nullptr && from != nullptr && from->data == tensor->data;
    if (!in_place) poison(tensor);
  });
}

void poison_outputs(const graft_exec& exec, const graft_mixer_backward& call) {
  if (exec.device_type != kDLCPU) return;
  poison(exec.workspace, exec.workspace_bytes);
  poison(call.dx);
  for_each(call.dstate_in, call.fwd->n_state,
           [](const DLTensor* tensor, std::uint32_t) { poison(tensor); });
  if ((exec.flags & GRAFT_X_ACCUMULATE) != 0) return;
  for_each(call.dparams, call.fwd->n_params,
           [](const DLTensor* tensor, std::uint32_t) { poison(tensor); });
}

void poison_outputs(const graft_exec& exec, const graft_objective_args& call) {
  if (exec.device_type != kDLCPU) return;
  poison(exec.workspace, exec.workspace_bytes);
  poison(call.loss);
  for_each(call.grads, call.n_signals,
           [](const DLTensor* tensor, std::uint32_t) { poison(tensor); });
}

}  // namespace graft
