#include "sequence.h"

#include <ATen/ATen.h>

#include <utility>

namespace graft::mixers {
namespace {

// Where the real tokens of each row are, for the stages that look at neighbours.
struct Packing {
  at::Tensor order;  // [B,T] real tokens first, in their order
  at::Tensor back;   // the inverse permutation
  at::Tensor count;  // [B] real tokens

  explicit Packing(const at::Tensor& mask)
      : order(mask.logical_not().to(at::kByte).argsort(/*stable=*/true, 1)),
        back(order.argsort(/*stable=*/true, 1)),
        count(mask.sum(1)) {}

  static at::Tensor pick(const at::Tensor& u, const at::Tensor& index) {
    return u.gather(1, index.unsqueeze(-1).expand({-1, -1, u.size(2)}));
  }
};

struct Convolved {
  at::Tensor out;   // [B,T,channels]
  at::Tensor seen;  // [B,width-1+T,channels]: tail and u
};

Convolved convolve(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                   const at::Tensor& tail) {
  const int64_t width = weight.size(2), tokens = u.size(1);
  const at::Tensor before = tail.defined()
                                ? tail.to(u.scalar_type())
                                : at::zeros({u.size(0), width - 1, u.size(2)}, u.options());
  const at::Tensor seen = at::cat({before, u}, 1);
  at::Tensor out = bias.defined() ? bias.expand_as(u) : at::zeros_like(u);
  for (int64_t w = 0; w < width; ++w) {
    out = at::addcmul(out, seen.slice(1, w, w + tokens), weight.select(2, w).squeeze(1));
  }
  return {out, seen};
}

}  // namespace

at::ScalarType inner_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor project(const at::Tensor& x, const ParamSource& params, const std::string& name,
                   bool with_bias) {
  const auto type = x.scalar_type();
  const at::Tensor weight = params(name + ".weight").to(type);
  return with_bias ? at::linear(x, weight, params(name + ".bias").to(type)) : at::linear(x, weight);
}

Tokens without_pads(Tokens tokens) {
  if (!tokens.pad_mask.defined()) return tokens;
  if (tokens.pad_mask.all().item<bool>()) {
    tokens.pad_mask.reset();
  } else {
    tokens.x = tokens.x.masked_fill(tokens.pad_mask.logical_not().unsqueeze(-1), 0);
  }
  return tokens;
}

at::Tensor token_positions(const Tokens& tokens) {
  if (tokens.positions.defined()) return tokens.positions;
  const int64_t batch = tokens.x.size(0), length = tokens.x.size(1);
  at::Tensor positions = tokens.pad_mask.defined()
                             ? (tokens.pad_mask.to(at::kLong).cumsum(1) - 1).clamp_min(0)
                             : at::arange(length, at::kLong).expand({batch, length});
  if (tokens.next_position.defined()) positions = positions + tokens.next_position.unsqueeze(1);
  return positions;
}

at::Tensor next_position(const Tokens& tokens, const at::Tensor& positions) {
  at::Tensor before = tokens.next_position.defined() ? tokens.next_position
                                                     : at::zeros({tokens.x.size(0)}, at::kLong);
  if (positions.size(1) == 0) return before;
  at::Tensor after = positions + 1;
  if (tokens.pad_mask.defined()) after = after.masked_fill(tokens.pad_mask.logical_not(), 0);
  const at::Tensor last = after.amax(1);
  return at::where(last > 0, last, before);
}

Rotation make_rotation(const at::Tensor& positions, const std::vector<double>& inv_freq,
                       double factor, at::ScalarType type) {
  if (inv_freq.empty()) return {};
  const at::NoGradGuard no_grad;
  const at::Tensor angles = positions.to(at::kDouble).unsqueeze(-1) *
                            at::tensor(inv_freq, at::TensorOptions(at::kDouble));
  return {(angles.cos() * factor).to(type), (angles.sin() * factor).to(type)};
}

at::Tensor rotate(const at::Tensor& u, const Rotation& rotation) {
  if (!rotation.cos.defined()) return u;
  const int64_t pairs = rotation.cos.size(-1), dim = u.size(-1);
  const at::Tensor a = u.narrow(-1, 0, pairs), b = u.narrow(-1, pairs, pairs);
  return at::cat({a * rotation.cos - b * rotation.sin, b * rotation.cos + a * rotation.sin,
                  u.narrow(-1, 2 * pairs, dim - 2 * pairs)},
                 -1);
}

ConvResult causal_conv(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& tail, const at::Tensor& mask) {
  const int64_t kept = weight.size(2) - 1;
  if (!mask.defined()) {
    const Convolved r = convolve(u, weight, bias, tail);
    return {r.out, r.seen.slice(1, u.size(1), u.size(1) + kept)};
  }
  // The convolution of a row whose padded tokens are not there.
  const Packing packing(mask);
  const Convolved r = convolve(Packing::pick(u, packing.order), weight, bias, tail);
  const at::Tensor last = packing.count.unsqueeze(1) + at::arange(kept, packing.count.options());
  return {Packing::pick(r.out, packing.back), Packing::pick(r.seen, last)};
}

}  // namespace graft::mixers
