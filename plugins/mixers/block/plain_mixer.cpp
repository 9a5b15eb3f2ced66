#include "plain_mixer.h"

#include <algorithm>
#include <string>
#include <string_view>

namespace graft::mixers {

using sdk::cat;
using sdk::check_contiguous;
using sdk::check_device;
using sdk::check_dtype;
using sdk::check_shape;
using sdk::require;
using sdk::Status;

namespace {

using Specs = std::vector<const graft_tensor_spec*>;

Specs listed(sdk::TensorSpecs& specs) {
  const auto list = specs.c();
  return {list.begin(), list.end()};
}

void check_tensor(const DLTensor& tensor, std::string_view name, std::span<const int64_t> shape,
                  DLDataType dtype) {
  check_shape(tensor, name, shape);
  check_dtype(tensor, name, dtype);
  check_device(tensor, name, kDLCPU);
  check_contiguous(tensor, name);
}

// Names are put together only for an error.
bool fits(const DLTensor* tensor, std::span<const int64_t> shape, DLDataType dtype) {
  return tensor != nullptr && std::ranges::equal(sdk::shape_of(*tensor), shape) &&
         sdk::same_dtype(tensor->dtype, dtype) && tensor->device.device_type == kDLCPU &&
         sdk::is_contiguous(*tensor);
}

void check_list(const DLTensor* const* tensors, const Specs& specs, std::string_view prefix,
                bool all) {
  if (tensors == nullptr) return;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const graft_tensor_spec& spec = *specs[i];
    const std::span<const int64_t> shape(spec.shape, static_cast<std::size_t>(spec.ndim));
    if ((tensors[i] == nullptr && !all) || fits(tensors[i], shape, spec.dtype)) continue;
    const std::string name = cat(prefix, spec.name);
    check_tensor(require(tensors[i], name), name, shape, spec.dtype);
  }
}

// dx, dparams, ...: of the shape and type of what it belongs to.
void check_as(const DLTensor* gradient, const DLTensor& of, std::string_view prefix,
              std::string_view name) {
  if (gradient == nullptr || fits(gradient, sdk::shape_of(of), of.dtype)) return;
  check_tensor(*gradient, cat(prefix, name), sdk::shape_of(of), of.dtype);
}

void check_cpu(int32_t device_type, const char* where) {
  if (device_type == kDLCPU) return;
  throw Status(GRAFT_UNIMPLEMENTED, where,
               cat("this mixer runs on the CPU, not on device type ", device_type));
}

void check_workspace(const graft_exec& exec, uint64_t wanted) {
  if (exec.workspace_bytes >= wanted && (exec.workspace != nullptr || wanted == 0)) return;
  throw Status(GRAFT_INVALID_ARGUMENT, "exec.workspace",
               cat("expected the ", wanted, " bytes of the plan, got ",
                   exec.workspace == nullptr ? 0 : exec.workspace_bytes));
}

}  // namespace

void PlainMixer::plan(const graft_plan_in& in, sdk::Plan& out) {
  check_cpu(in.device_type, "plan.device_type");
  planned_for_ = in;
  planned_ = sdk::Plan{};
  sizes(in, planned_);
  state_specs_ = listed(planned_.state);
  tap_specs_ = listed(planned_.taps);
  saved_specs_ = listed(planned_.saved);
  out = planned_;
}

bool PlainMixer::keeps(const graft_exec& exec, const graft_mixer_forward& call) const {
  return (exec.flags & GRAFT_X_TRAINING) != 0 && call.saved != nullptr && !saved_specs_.empty();
}

void PlainMixer::check_inputs(const graft_exec& exec, const graft_mixer_forward& call,
                              int64_t model_dim) const {
  check_cpu(exec.device_type, "exec.device_type");
  if (call.seq_offsets != nullptr)
    throw Status(GRAFT_UNIMPLEMENTED, "tensor:seq_offsets", "packed sequences are not supported");
  const int64_t batch = planned_for_.batch, tokens = planned_for_.tokens;
  const DLTensor& x = require(call.x, "x");
  check_shape(x, "x", {batch, tokens, model_dim});
  check_dtype(x, "x", planned_for_.dtype);
  check_device(x, "x", kDLCPU);
  const int64_t places[] = {batch, tokens};
  if (call.positions != nullptr) check_tensor(*call.positions, "positions", places, sdk::int64);
  if (call.pad_mask != nullptr) check_tensor(*call.pad_mask, "pad_mask", places, sdk::uint8);
  const DLDataType dtype =
      sdk::same_dtype(planned_for_.dtype, sdk::float64) ? sdk::float64 : sdk::float32;
  for (std::size_t i = 0; i < specs().size(); ++i) {
    const sdk::ParamSpec& spec = specs()[i];
    check_tensor(require(call.params[i], spec.name()), spec.name(), spec.shape(), dtype);
  }
  check_list(call.state_in, state_specs_, "", true);
}

void PlainMixer::check_forward(const graft_exec& exec, const graft_mixer_forward& call,
                               int64_t model_dim, uint64_t workspace) const {
  check_inputs(exec, call, model_dim);
  check_as(call.y, *call.x, "", "y");
  check_list(call.state_out, state_specs_, "", false);
  check_list(call.taps, tap_specs_, "tap ", false);
  if (keeps(exec, call)) check_list(call.saved, saved_specs_, "saved ", true);
  check_workspace(exec, workspace);
}

void PlainMixer::check_gradients(const graft_mixer_backward& call) const {
  const graft_mixer_forward& fwd = *call.fwd;
  const DLTensor& dy = require(call.dy, "dy");
  check_shape(dy, "dy", sdk::shape_of(*fwd.x));
  check_dtype(dy, "dy", fwd.x->dtype);
  check_device(dy, "dy", kDLCPU);
  check_as(call.dx, *fwd.x, "d", "x");
  for (std::size_t i = 0; i < specs().size(); ++i)
    check_as(entry(call.dparams, i), *fwd.params[i], "d", specs()[i].name());
  check_list(call.dstate_in, state_specs_, "d", false);
  check_list(call.dstate_out, state_specs_, "d", false);
  check_list(call.dtaps, tap_specs_, "dtap ", false);
}

void PlainMixer::check_backward(const graft_exec& exec, const graft_mixer_backward& call,
                                int64_t model_dim) const {
  check_inputs(exec, *call.fwd, model_dim);
  check_gradients(call);
  if (!saved_specs_.empty() && call.fwd->saved == nullptr)
    throw Status(GRAFT_INVALID_ARGUMENT, "saved",
                 "backward needs what its forward saved, but fwd has no saved tensors");
  check_list(call.fwd->saved, saved_specs_, "saved ", true);
  check_workspace(exec, planned_.workspace_backward);
}

}  // namespace graft::mixers
