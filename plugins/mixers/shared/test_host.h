// A host for plugins under test: GEMM and threads of LibTorch, straight.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>
#include <cstring>

#include "graft/graft.h"

namespace graft::mixers {

inline at::Tensor matrix_of(const DLTensor& t) {
  const auto type = t.dtype.code == kDLBfloat ? at::kBFloat16
                    : t.dtype.bits == 64      ? at::kDouble
                                              : at::kFloat;
  const auto axes = static_cast<size_t>(t.ndim);
  return at::from_blob(t.data, at::IntArrayRef(t.shape, axes), at::IntArrayRef(t.strides, axes),
                       at::TensorOptions(type));
}

inline graft_status GRAFT_CALL test_gemm(const graft_host*, int32_t trans_a, int32_t trans_b,
                                         double alpha, const DLTensor* a, const DLTensor* b,
                                         double beta, DLTensor* c, void*, graft_error*) {
  const at::NoGradGuard no_grad;
  const at::Tensor left = matrix_of(*a), right = matrix_of(*b);
  at::Tensor out = matrix_of(*c);
  at::addmm_out(out, out, trans_a != 0 ? left.t() : left, trans_b != 0 ? right.t() : right, beta,
                alpha);
  return GRAFT_OK;
}

inline void GRAFT_CALL test_parallel_for(const graft_host*, int64_t begin, int64_t end,
                                         int64_t grain,
                                         void(GRAFT_CALL* fn)(void*, int64_t, int64_t, int32_t),
                                         void* arg) {
  at::parallel_for(begin, end, grain < 1 ? 1 : grain, [&](int64_t from, int64_t to) {
    fn(arg, from, to, static_cast<int32_t>(at::get_thread_num()));
  });
}

// Offers graft.host-blas/1 (gemm on float32 and float64) and graft.host-parallel/1.
inline const graft_host& test_host() {
  static const graft_host_blas blas{sizeof blas, 0, test_gemm, nullptr};
  static const graft_host_parallel parallel{
      sizeof parallel, 0, [](const graft_host*) -> int32_t { return at::get_num_threads(); },
      test_parallel_for};
  static const graft_host host{sizeof host,
                               GRAFT_ABI_CURRENT,
                               "test",
                               "0",
                               nullptr,
                               [](const graft_host*, int32_t, const char* message) {
                                 std::fprintf(stderr, "%s\n", message);
                               },
                               [](const graft_host*) -> int32_t { return 0; },
                               [](const graft_host*, const char* id) -> const void* {
                                 if (std::strcmp(id, GRAFT_HOST_EXT_BLAS) == 0) return &blas;
                                 return std::strcmp(id, GRAFT_HOST_EXT_PARALLEL) == 0 ? &parallel
                                                                                      : nullptr;
                               }};
  return host;
}

}  // namespace graft::mixers
