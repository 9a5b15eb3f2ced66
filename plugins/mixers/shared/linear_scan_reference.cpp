#include "linear_scan_reference.h"

#include <ATen/ATen.h>

#include <vector>

namespace graft::mixers {

LinearScanResult linear_scan_reference(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& x, const at::Tensor& g,
                                       const at::Tensor& state) {
  at::Tensor s =
      state.defined() ? state : at::zeros({q.size(0), q.size(2), x.size(2)}, q.options());
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < q.size(1); ++t) {
    const auto column = [&](const at::Tensor& u) { return u.select(1, t).unsqueeze(-1); };
    if (g.defined()) s = s * column(g).unsqueeze(-1).exp();
    s = s + column(k).matmul(column(x).transpose(1, 2));
    outputs.push_back(s.transpose(1, 2).matmul(column(q)).squeeze(-1));
  }
  const at::Tensor y =
      outputs.empty() ? at::empty({q.size(0), 0, x.size(2)}, x.options()) : at::stack(outputs, 1);
  return {y, s};
}

}  // namespace graft::mixers
