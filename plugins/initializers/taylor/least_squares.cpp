#include "plugins/initializers/taylor/least_squares.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>

namespace graft::taylor {

namespace {
constexpr int64_t kGramBlock = 144;
}  // namespace

void add_gram(at::Tensor& gram, const at::Tensor& z) {
  const int64_t n = z.size(-1);
  const at::Tensor transposed = z.transpose(-1, -2);
  for (int64_t first = 0; first < n; first += kGramBlock) {
    const int64_t rows = std::min(kGramBlock, n - first);
    gram.narrow(-2, first, rows)
        .narrow(-1, first, n - first)
        .add_(at::matmul(transposed.narrow(-2, first, rows), z.narrow(-1, first, n - first)));
  }
}

at::Tensor symmetric(const at::Tensor& gram) {
  return gram.triu() + gram.triu(1).transpose(-1, -2);
}

at::Tensor spd_solve(const at::Tensor& a, const at::Tensor& b) {
  if (!at::isfinite(a).all().item<bool>() || !at::isfinite(b).all().item<bool>()) {
    throw Unsolvable("the regression's inputs or targets are not finite");
  }
  const auto [factor, info] = at::linalg_cholesky_ex(a);
  if (info.ne(0).any().item<bool>()) {
    throw Unsolvable("the Gram matrix is not positive definite: a larger ridge is needed");
  }
  return at::cholesky_solve(b, factor);
}

LeastSquares::LeastSquares(int64_t groups, int64_t inputs, int64_t outputs, at::ScalarType sums)
    : gram_(at::zeros({groups, inputs, inputs}, sums)),
      moment_(at::zeros({groups, inputs, outputs}, sums)),
      energy_(at::zeros({groups}, at::kDouble)) {}

void LeastSquares::clear() {
  gram_.zero_();
  moment_.zero_();
  energy_.zero_();
}

void LeastSquares::add(const at::Tensor& z, const at::Tensor& y, const at::Tensor& w) {
  at::Tensor weighted_z = z, weighted_y = y;
  if (w.defined()) {
    const at::Tensor root = w.sqrt().unsqueeze(-1);
    weighted_z = z * root;
    weighted_y = y * root;
  }
  add_gram(gram_, weighted_z);
  moment_.add_(at::bmm(weighted_z.transpose(1, 2), weighted_y));
  energy_.add_(weighted_y.square().sum({1, 2}, false, at::kDouble));
}

at::Tensor LeastSquares::solve(double lambda, const at::Tensor& prior) const {
  at::Tensor gram = symmetric(gram_).to(at::kDouble);
  at::Tensor moment = moment_.to(at::kDouble);
  const at::Tensor mean = gram.diagonal(0, 1, 2).mean(-1);
  // A group of zeros would be singular: the unit diagonal makes it give the prior exactly.
  const at::Tensor empty = mean.eq(0);
  const at::Tensor ridge = at::where(empty, at::ones_like(mean), mean * lambda).unsqueeze(-1);
  gram.diagonal(0, 1, 2).add_(ridge);
  if (prior.defined()) moment = moment + ridge.unsqueeze(-1) * prior.to(at::kDouble);
  return spd_solve(gram, moment);
}

at::Tensor LeastSquares::relative_residual(const at::Tensor& m) const {
  const at::Tensor m64 = m.to(at::kDouble);
  const at::Tensor explained = (m64 * moment_.to(at::kDouble)).sum({1, 2});
  const at::Tensor fitted = (m64 * at::bmm(symmetric(gram_).to(at::kDouble), m64)).sum({1, 2});
  const at::Tensor residual = energy_ - 2 * explained + fitted;
  return at::where(energy_.gt(0), residual / energy_, at::ones_like(energy_));
}

}  // namespace graft::taylor
