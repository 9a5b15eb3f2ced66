#include "feature_map.h"

#include <ATen/ATen.h>

namespace graft::mixers {

at::Tensor hedgehog_features(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                             double floor) {
  TORCH_CHECK(u.dim() == 3, "hedgehog_features: u has shape ", u.sizes(), ", expected [H, N, d]");
  const int64_t heads = u.size(0), dim = u.size(2);
  TORCH_CHECK(weight.dim() == 3 && weight.size(0) == heads && weight.size(2) == dim,
              "hedgehog_features: weight has shape ", weight.sizes(), ", expected [", heads,
              ", e, ", dim, "]");
  TORCH_CHECK(bias.sizes() == at::IntArrayRef({heads, weight.size(1)}),
              "hedgehog_features: bias has shape ", bias.sizes(), ", expected [", heads, ", ",
              weight.size(1), "]");
  const at::Tensor z = at::baddbmm(bias.unsqueeze(1), u, weight.transpose(1, 2));
  const at::Tensor phi = at::cat({z, z.neg()}, -1).softmax(-1);
  return floor > 0 ? phi.clamp_min(floor) : phi;
}

}  // namespace graft::mixers
