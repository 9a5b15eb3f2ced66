// graft.host-blas/1 for plugins without LibTorch, as it is defined and no faster.
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#include "graft/tensor.hpp"
#include "kit/test_host.h"

namespace graft::conformance {
namespace {

double bfloat(const void* data, std::int64_t at) {
  const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(data)[at])
                             << 16;
  return static_cast<double>(std::bit_cast<float>(bits));
}

double get(const DLTensor& t, std::int64_t at) {
  if (t.dtype.code == kDLBfloat) return bfloat(t.data, at);
  if (t.dtype.bits == 64) return static_cast<const double*>(t.data)[at];
  return static_cast<double>(static_cast<const float*>(t.data)[at]);
}

// To the nearest, to even between two.
std::uint16_t to_bfloat(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void put(const DLTensor& t, std::int64_t at, double value) {
  if (t.dtype.code == kDLBfloat) {
    static_cast<std::uint16_t*>(t.data)[at] = to_bfloat(static_cast<float>(value));
  } else if (t.dtype.bits == 64) {
    static_cast<double*>(t.data)[at] = value;
  } else {
    static_cast<float*>(t.data)[at] = static_cast<float>(value);
  }
}

bool is_double(DLDataType type) { return type.code == kDLFloat && type.bits == 64; }
bool is_single(DLDataType type) {
  return (type.code == kDLFloat && type.bits == 32) || (type.code == kDLBfloat && type.bits == 16);
}

// A 2-D tensor, or one of a batch, with op() applied.
struct Matrix {
  const DLTensor* tensor;
  std::int64_t rows, columns, row_stride, column_stride, batch_stride;
  std::int64_t at(std::int64_t b, std::int64_t i, std::int64_t j) const {
    return b * batch_stride + i * row_stride + j * column_stride;
  }
};

Matrix matrix_of(const DLTensor& t, bool transposed) {
  const std::int32_t r = t.ndim - 2, c = t.ndim - 1;
  Matrix m{&t,
           t.shape[r],
           t.shape[c],
           sdk::stride_of(t, r),
           sdk::stride_of(t, c),
           t.ndim == 3 ? sdk::stride_of(t, 0) : 0};
  if (transposed) {
    std::swap(m.rows, m.columns);
    std::swap(m.row_stride, m.column_stride);
  }
  return m;
}

graft_status wrong(graft_error* error, const char* where, const char* message) {
  return sdk::detail::fill_error(error, GRAFT_INVALID_ARGUMENT, where, message);
}

graft_status gemm(const graft_host*, std::int32_t trans_a, std::int32_t trans_b, double alpha,
                  const DLTensor* a, const DLTensor* b, double beta, DLTensor* c, void*,
                  graft_error* error) {
  if (a == nullptr || b == nullptr || c == nullptr)
    return wrong(error, "gemm", "a tensor is missing (NULL)");
  const bool same_axes = (a->ndim == 2 || a->ndim == 3) && a->ndim == b->ndim && a->ndim == c->ndim;
  if (!same_axes) return wrong(error, "gemm", "a, b and c are all 2-D or all 3-D");
  const auto all = [&](bool (*is)(DLDataType)) {
    return is(a->dtype) && is(b->dtype) && is(c->dtype);
  };
  if (!all(is_double) && !all(is_single))
    return wrong(error, "gemm", "a, b and c are all float64, or each is float32 or bfloat16");
  const Matrix left = matrix_of(*a, trans_a != 0), right = matrix_of(*b, trans_b != 0),
               out = matrix_of(*c, false);
  if (left.columns != right.rows || left.rows != out.rows || right.columns != out.columns) {
    return wrong(error, "gemm", "the shapes do not fit");
  }
  const std::int64_t batch = c->ndim == 3 ? c->shape[0] : 1;
  if (c->ndim == 3 && (a->shape[0] != batch || b->shape[0] != batch)) {
    return wrong(error, "gemm", "the batches differ");
  }
  for (std::int64_t n = 0; n < batch; ++n) {
    for (std::int64_t i = 0; i < out.rows; ++i) {
      for (std::int64_t j = 0; j < out.columns; ++j) {
        double sum = 0;
        for (std::int64_t k = 0; k < left.columns; ++k)
          sum += get(*a, left.at(n, i, k)) * get(*b, right.at(n, k, j));
        const std::int64_t at = out.at(n, i, j);
        // beta = 0 overwrites: what stands there may be NaN.
        put(*c, at, alpha * sum + (beta == 0 ? 0 : beta * get(*c, at)));
      }
    }
  }
  return GRAFT_OK;
}

// Cholesky in float64; false where a pivot is not positive.
bool factor(std::vector<double>& l, std::int64_t n) {
  const auto at = [&](std::int64_t i, std::int64_t j) -> double& {
    return l[static_cast<std::size_t>(i * n + j)];
  };
  for (std::int64_t j = 0; j < n; ++j) {
    for (std::int64_t k = 0; k < j; ++k) at(j, j) -= at(j, k) * at(j, k);
    if (!(at(j, j) > 0)) return false;
    at(j, j) = std::sqrt(at(j, j));
    for (std::int64_t i = j + 1; i < n; ++i) {
      for (std::int64_t k = 0; k < j; ++k) at(i, j) -= at(i, k) * at(j, k);
      at(i, j) /= at(j, j);
    }
  }
  return true;
}

graft_status spd_solve(const graft_host*, const DLTensor* a, DLTensor* x, void*,
                       graft_error* error) {
  if (a == nullptr || x == nullptr || a->ndim != 2 || x->ndim != 2 || a->shape[0] != a->shape[1] ||
      x->shape[0] != a->shape[0]) {
    return wrong(error, "spd_solve", "expected a [n,n] and x [n,m]");
  }
  const Matrix from = matrix_of(*a, false), to = matrix_of(*x, false);
  const std::int64_t n = from.rows;
  std::vector<double> l(static_cast<std::size_t>(n * n));
  for (std::int64_t i = 0; i < n * n; ++i)
    l[static_cast<std::size_t>(i)] = get(*a, from.at(0, i / n, i % n));
  if (!factor(l, n)) {
    return sdk::detail::fill_error(error, GRAFT_FAILED_PRECONDITION, "spd_solve",
                                   "a is not positive definite");
  }
  std::vector<double> v(static_cast<std::size_t>(n));
  const auto entry = [&](std::int64_t i, std::int64_t j) {
    return l[static_cast<std::size_t>(i * n + j)];
  };
  for (std::int64_t column = 0; column < to.columns; ++column) {
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = get(*x, to.at(0, i, column));
      for (std::int64_t k = 0; k < i; ++k) sum -= entry(i, k) * v[static_cast<std::size_t>(k)];
      v[static_cast<std::size_t>(i)] = sum / entry(i, i);
    }
    for (std::int64_t i = n; i-- > 0;) {
      for (std::int64_t k = i + 1; k < n; ++k)
        v[static_cast<std::size_t>(i)] -= entry(k, i) * v[static_cast<std::size_t>(k)];
      v[static_cast<std::size_t>(i)] /= entry(i, i);
      put(*x, to.at(0, i, column), v[static_cast<std::size_t>(i)]);
    }
  }
  return GRAFT_OK;
}

}  // namespace

const graft_host_blas kPlainBlas{sizeof(graft_host_blas), 0, &gemm, &spd_solve};

}  // namespace graft::conformance
