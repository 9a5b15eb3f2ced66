#include "hedgehog_attention_reference.h"

#include <ATen/ATen.h>

#include <vector>

namespace graft::mixers {

at::Tensor hedgehog_features(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                             double floor) {
  const at::Tensor z = at::einsum("bthd,hed->bthe", {u, weight}) + bias;
  const at::Tensor phi = at::cat({z, z.neg()}, -1).softmax(-1);
  return floor > 0 ? phi.clamp_min(floor) : phi;
}

HedgehogAttentionResult hedgehog_attention_reference(const HedgehogAttention& in) {
  const int64_t heads = in.q.size(2), group = heads / in.k.size(2), batch = in.q.size(0);
  const auto for_each_query_head = [&](const at::Tensor& u) {
    return u.repeat_interleave(group, 2);
  };
  const at::Tensor q = hedgehog_features(in.q, in.weight_q, in.bias_q, in.floor);
  const at::Tensor k =
      hedgehog_features(for_each_query_head(in.k), in.weight_k, in.bias_k, in.floor);
  const at::Tensor values = for_each_query_head(in.v);
  const at::Tensor v = at::cat({values, at::ones_like(values.narrow(-1, 0, 1))}, -1);
  at::Tensor s =
      in.state.defined() ? in.state : at::zeros({batch, heads, q.size(3), v.size(3)}, q.options());
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < in.q.size(1); ++t) {
    const auto at_t = [&](const at::Tensor& u) { return u.select(1, t); };
    if (in.g.defined()) s = s * at_t(in.g).exp().unsqueeze(-1).unsqueeze(-1);
    at::Tensor written = at_t(v);
    if (in.write.defined()) written = written * at_t(in.write).unsqueeze(-1);
    s = s + at_t(k).unsqueeze(-1) * written.unsqueeze(-2);
    const at::Tensor y = at::einsum("bhfv,bhf->bhv", {s, at_t(q)});
    outputs.push_back(y.narrow(-1, 0, values.size(3)) / (y.narrow(-1, values.size(3), 1) + in.eps));
  }
  const at::Tensor o = outputs.empty() ? at::empty({batch, 0, heads, values.size(3)}, q.options())
                                       : at::stack(outputs, 1);
  return {o, s};
}

}  // namespace graft::mixers
