#include "gdn_reference.h"

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

namespace graft::gdn {

DeltaRuleResult gated_delta_rule_reference(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const at::Tensor& g,
                                           const at::Tensor& beta, const at::Tensor& state) {
  const auto type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(3)));
  at::Tensor s = state.defined() ? state.to(type)
                                 : at::zeros({q.size(0), q.size(2), q.size(3), v.size(3)},
                                             q.options().dtype(type));
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < q.size(1); ++t) {
    const auto row = [&](const at::Tensor& x) {
      return x.select(1, t).to(type).unsqueeze(-1);
    };  // [B,H,D,1]
    const at::Tensor key = row(k), value = row(v);
    s = s * row(g).exp().unsqueeze(-1);
    const at::Tensor error = value - s.transpose(-1, -2).matmul(key);
    s = s + row(beta).unsqueeze(-1) * key.matmul(error.transpose(-1, -2));
    outputs.push_back((s.transpose(-1, -2).matmul(row(q)) * scale).squeeze(-1));
  }
  at::Tensor o = outputs.empty() ? at::empty({q.size(0), 0, q.size(2), v.size(3)}, v.options())
                                 : at::stack(outputs, 1).to(v.scalar_type());
  return {o, s};
}

}  // namespace graft::gdn
