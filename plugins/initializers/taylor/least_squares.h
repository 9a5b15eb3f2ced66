#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <stdexcept>

namespace graft::taylor {

// A system that cannot be solved: inputs that are not finite, or a Gram matrix that is not positive
// definite because lambda is too small for it.
class Unsolvable : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// a^-1 b for symmetric positive definite a [..., n, n] and b [..., n, m], both float64. Throws
// Unsolvable when a is not that, or not finite.
at::Tensor spd_solve(const at::Tensor& a, const at::Tensor& b);

// gram += z^T z for z [..., N, n], gram [..., n, n]: block columns on and above the diagonal only,
// which is all that symmetric() reads, and for a wide z little more than half of the work.
void add_gram(at::Tensor& gram, const at::Tensor& z);
// The whole symmetric matrix of which add_gram() made the upper triangle.
at::Tensor symmetric(const at::Tensor& gram);

// Groups of independent ridge regressions z -> y, accumulated batch by batch as Gram matrices:
//
//   M = argmin sum_t w_t |y_t - M^T z_t|^2 + s |M - prior|^2,   s = lambda * mean(diag(Z^T W Z))
//     = (Z^T W Z + s I)^-1 (Z^T W Y + s prior)
//
// The scale of the weights drops out. Products are taken in float32, or in float64 when the inputs
// are; sums are kept in `sums`, and the solve is float64.
class LeastSquares {
 public:
  LeastSquares(int64_t groups, int64_t inputs, int64_t outputs, at::ScalarType sums = at::kDouble);

  void clear();  // as after construction

  // z [groups, N, inputs], y [groups, N, outputs]; w, if defined, [N] or [groups, N], >= 0.
  void add(const at::Tensor& z, const at::Tensor& y, const at::Tensor& w = {});

  // [groups, inputs, outputs] float64. prior: the same shape, none = 0. A group that has seen
  // nothing but zeros gives the prior. Throws Unsolvable.
  at::Tensor solve(double lambda, const at::Tensor& prior = {}) const;

  // sum w |y - M^T z|^2 / sum w |y|^2 for each group, [groups] float64; 1 where y is all zeros.
  at::Tensor relative_residual(const at::Tensor& m) const;

 private:
  at::Tensor gram_;    // Z^T W Z [groups, inputs, inputs], of add_gram()
  at::Tensor moment_;  // Z^T W Y [groups, inputs, outputs]
  at::Tensor energy_;  // sum w |y|^2 [groups], float64
};

}  // namespace graft::taylor
