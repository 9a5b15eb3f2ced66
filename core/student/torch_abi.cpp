#include "core/student/torch_abi.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>

#include "core/base/error.h"

namespace graft {

DLDataType dl_dtype(at::ScalarType type) {
  const auto bits = static_cast<std::uint8_t>(8 * at::elementSize(type));
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
      return {kDLFloat, bits, 1};
    case at::kBFloat16:
      return {kDLBfloat, bits, 1};
    case at::kByte:
      return {kDLUInt, bits, 1};
    case at::kBool:
      return {kDLBool, bits, 1};
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
      return {kDLInt, bits, 1};
    default:
      fail(ErrorKind::internal,
           std::string("a tensor of type ") + at::toString(type) + " cannot cross the plugin ABI");
  }
}

at::ScalarType scalar_type(DLDataType type) {
  if (type.lanes == 1) {
    switch (type.code) {
      case kDLFloat:
        if (type.bits == 16) return at::kHalf;
        if (type.bits == 32) return at::kFloat;
        if (type.bits == 64) return at::kDouble;
        break;
      case kDLBfloat:
        if (type.bits == 16) return at::kBFloat16;
        break;
      case kDLBool:
        return at::kBool;
      case kDLUInt:
        if (type.bits == 8) return at::kByte;
        break;
      case kDLInt:
        if (type.bits == 8) return at::kChar;
        if (type.bits == 16) return at::kShort;
        if (type.bits == 32) return at::kInt;
        if (type.bits == 64) return at::kLong;
        break;
      default:
        break;
    }
  }
  fail(ErrorKind::plugin, "a plugin handed over a tensor of DLPack type code " +
                              std::to_string(type.code) + ", " + std::to_string(type.bits) +
                              " bits, " + std::to_string(type.lanes) + " lanes");
}

BorrowedTensor::BorrowedTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {
  if (!tensor_.defined()) return;
  shape_ = tensor_.sizes().vec();
  strides_ = tensor_.strides().vec();
  dl_.data = tensor_.data_ptr();
  dl_.device = {tensor_.is_cuda() ? kDLCUDA : kDLCPU, tensor_.is_cuda() ? tensor_.get_device() : 0};
  dl_.ndim = static_cast<std::int32_t>(tensor_.dim());
  dl_.dtype = dl_dtype(tensor_.scalar_type());
  dl_.shape = shape_.data();
  dl_.strides = strides_.data();
}

BorrowedTensors::BorrowedTensors(const std::vector<at::Tensor>& tensors) {
  tensors_.reserve(tensors.size());
  pointers_.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    tensors_.push_back(std::make_unique<BorrowedTensor>(tensor));
    pointers_.push_back(tensors_.back()->get());
  }
}

at::Tensor aligned(const at::Tensor& tensor) {
  constexpr std::uintptr_t kPromised = 64;
  if (!tensor.defined() || tensor.numel() == 0) return tensor;
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return address % kPromised == 0 ? tensor : tensor.clone();
}

at::Tensor view_of(const DLTensor& tensor) {
  const auto options = at::TensorOptions()
                           .dtype(scalar_type(tensor.dtype))
                           .device(tensor.device.device_type == kDLCUDA ? at::kCUDA : at::kCPU);
  const at::IntArrayRef shape(tensor.shape, static_cast<std::size_t>(tensor.ndim));
  auto* data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  if (tensor.strides == nullptr) return at::from_blob(data, shape, options);
  return at::from_blob(
      data, shape, at::IntArrayRef(tensor.strides, static_cast<std::size_t>(tensor.ndim)), options);
}

void* Workspace::reserve(std::uint64_t bytes) {
  constexpr std::uint64_t kAlignment = 256;
  if (bytes == 0) return nullptr;
  if (bytes > bytes_) {
    storage_ = at::empty({static_cast<std::int64_t>(bytes + kAlignment)}, at::kByte);
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data_ptr());
    base_ = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
    bytes_ = bytes;
  }
  return base_;
}

namespace {

graft_status report(graft_error* error, graft_status code, const char* where, const char* message) {
  if (error != nullptr) {
    error->code = code;
    std::snprintf(error->where, sizeof error->where, "%s", where);
    std::snprintf(error->message, sizeof error->message, "%s", message);
  }
  return code;
}

at::Tensor transposed(const DLTensor* tensor, std::int32_t transpose) {
  const at::Tensor view = view_of(*tensor);
  return transpose != 0 ? view.transpose(-1, -2) : view;
}

// Why graft.host-blas/1 does not take these; "" when it does.
std::string gemm_problem(const DLTensor& a, const DLTensor& b, const DLTensor& c) {
  const auto three = [&](auto&& text_of) {
    return "a, b and c are " + text_of(a) + ", " + text_of(b) + " and " + text_of(c);
  };
  const auto axes = [](const DLTensor& t) { return std::to_string(t.ndim) + "-D"; };
  if ((c.ndim != 2 && c.ndim != 3) || a.ndim != c.ndim || b.ndim != c.ndim)
    return three(axes) + "; expected all 2-D or all 3-D";
  const auto batch = [](const DLTensor& t) { return std::to_string(t.shape[0]); };
  if (c.ndim == 3 && (a.shape[0] != c.shape[0] || b.shape[0] != c.shape[0]))
    return "the batches of " + three(batch) + "; expected equal ones: nothing is broadcast";
  const at::ScalarType types[] = {scalar_type(a.dtype), scalar_type(b.dtype), scalar_type(c.dtype)};
  const auto all = [&](auto&& is) { return std::all_of(std::begin(types), std::end(types), is); };
  if (!all([](at::ScalarType t) { return t == at::kDouble; }) &&
      !all([](at::ScalarType t) { return t == at::kFloat || t == at::kBFloat16; }))
    return three(
               [](const DLTensor& t) { return std::string(at::toString(scalar_type(t.dtype))); }) +
           "; expected all float64, or each of them float32 or bfloat16";
  return "";
}

graft_status GRAFT_CALL gemm(const graft_host*, std::int32_t trans_a, std::int32_t trans_b,
                             double alpha, const DLTensor* a, const DLTensor* b, double beta,
                             DLTensor* c, void*, graft_error* error) {
  try {
    c10::InferenceMode no_grad;
    if (a == nullptr || b == nullptr || c == nullptr)
      return report(error, GRAFT_INVALID_ARGUMENT, "host-blas.gemm", "a, b and c must be given");
    if (const std::string problem = gemm_problem(*a, *b, *c); !problem.empty())
      return report(error, GRAFT_INVALID_ARGUMENT, "host-blas.gemm", problem.c_str());
    at::Tensor out = view_of(*c);
    const at::Tensor left = transposed(a, trans_a), right = transposed(b, trans_b);
    const auto accumulate = out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const bool fits = left.size(-1) == right.size(-2) && out.size(-2) == left.size(-2) &&
                      out.size(-1) == right.size(-1);
    if (!fits)
      return report(error, GRAFT_INVALID_ARGUMENT, "host-blas.gemm",
                    "the shapes of a, b and c do not fit");
    // Straight into c where that has the type of the sums. beta 0: c is not read, it may hold NaN.
    const bool in_place = out.scalar_type() == accumulate;
    at::Tensor sum = in_place    ? out
                     : beta == 0 ? at::empty(out.sizes(), accumulate)
                                 : out.to(accumulate);
    const at::Tensor l = left.to(accumulate), r = right.to(accumulate);
    if (out.dim() == 2) {
      at::addmm_out(sum, sum, l, r, beta, alpha);
    } else {
      at::baddbmm_out(sum, sum, l, r, beta, alpha);
    }
    if (!in_place) out.copy_(sum);
    return GRAFT_OK;
  } catch (const std::exception& e) {
    return report(error, GRAFT_INVALID_ARGUMENT, "host-blas.gemm", e.what());
  }
}

graft_status GRAFT_CALL spd_solve(const graft_host*, const DLTensor* a, DLTensor* x, void*,
                                  graft_error* error) {
  try {
    c10::InferenceMode no_grad;
    if (a == nullptr || x == nullptr)
      return report(error, GRAFT_INVALID_ARGUMENT, "host-blas.spd_solve", "a and x must be given");
    at::Tensor solution = view_of(*x);
    const auto [factor, info] = at::linalg_cholesky_ex(view_of(*a).to(at::kDouble));
    if (info.item<int>() != 0)
      return report(error, GRAFT_FAILED_PRECONDITION, "host-blas.spd_solve",
                    "the matrix is not positive definite");
    solution.copy_(at::cholesky_solve(solution.to(at::kDouble), factor));
    return GRAFT_OK;
  } catch (const std::exception& e) {
    return report(error, GRAFT_INVALID_ARGUMENT, "host-blas.spd_solve", e.what());
  }
}

std::int32_t GRAFT_CALL num_threads(const graft_host*) { return at::get_num_threads(); }

void GRAFT_CALL parallel_for(const graft_host*, std::int64_t begin, std::int64_t end,
                             std::int64_t grain,
                             void(GRAFT_CALL* fn)(void*, std::int64_t, std::int64_t, std::int32_t),
                             void* arg) {
  at::parallel_for(begin, end, grain, [&](std::int64_t from, std::int64_t to) {
    fn(arg, from, to, at::get_thread_num());
  });
}

}  // namespace

const graft_host_blas* torch_host_blas() {
  static const graft_host_blas table{sizeof(graft_host_blas), 0, gemm, spd_solve};
  return &table;
}

const graft_host_parallel* torch_host_parallel() {
  static const graft_host_parallel table{sizeof(graft_host_parallel), 0, num_threads, parallel_for};
  return &table;
}

HostServices::Settings torch_host_settings() {
  HostServices::Settings settings;
  settings.blas = torch_host_blas();
  settings.parallel = torch_host_parallel();
  return settings;
}

}  // namespace graft
