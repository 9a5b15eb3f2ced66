#include "gdn_block.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "gdn_chunk.h"
#include "gdn_features.h"

namespace graft::gdn {
namespace {

at::Tensor project(const at::Tensor& x, const BlockParams& params, const std::string& name,
                   bool with_bias) {
  const auto type = x.scalar_type();
  const at::Tensor weight = params(name + ".weight").to(type);
  return with_bias ? at::linear(x, weight, params(name + ".bias").to(type)) : at::linear(x, weight);
}

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

struct ConvResult {
  at::Tensor out, tail;
};

// out_t = bias + sum_w weight_w u_{t - width + 1 + w}, per channel, over `tail` and then u. weight
// [C,1,width].
ConvResult short_conv(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
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

// The convolution of a row whose padded tokens are not there.
ConvResult masked_conv(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& tail, const at::Tensor& mask) {
  const int64_t kept = weight.size(2) - 1;
  if (!mask.defined()) {
    ConvResult r = short_conv(u, weight, bias, tail);
    return {r.out, r.tail.slice(1, u.size(1), u.size(1) + kept)};
  }
  const Packing packing(mask);
  const ConvResult r = short_conv(Packing::pick(u, packing.order), weight, bias, tail);
  const at::Tensor last = packing.count.unsqueeze(1) + at::arange(kept, packing.count.options());
  return {Packing::pick(r.out, packing.back), Packing::pick(r.tail, last)};
}

at::Tensor positions_of(const BlockInput& in) {
  if (in.positions.defined()) return in.positions;
  const int64_t batch = in.x.size(0), tokens = in.x.size(1);
  at::Tensor positions = in.pad_mask.defined()
                             ? (in.pad_mask.to(at::kLong).cumsum(1) - 1).clamp_min(0)
                             : at::arange(tokens, at::kLong).expand({batch, tokens});
  if (in.state.next_position.defined()) positions = positions + in.state.next_position.unsqueeze(1);
  return positions;
}

// One past the last real token's position; as it was where a row has none.
at::Tensor next_position(const BlockInput& in, const at::Tensor& positions) {
  at::Tensor before = in.state.next_position.defined() ? in.state.next_position
                                                       : at::zeros({in.x.size(0)}, at::kLong);
  if (positions.size(1) == 0) return before;
  at::Tensor after = positions + 1;
  if (in.pad_mask.defined()) after = after.masked_fill(in.pad_mask.logical_not(), 0);
  const at::Tensor last = after.amax(1);
  return at::where(last > 0, last, before);
}

// One of the streams q, k, v on its way from projection to the delta rule.
struct Stream {
  const char* name;
  bool silu;
  bool key_like;  // q and k: norms and rotation
};

struct Streams {
  const BlockInput& in;
  const BlockOptions& options;
  const BlockParams& params;
  const Rotation& rotation;

  at::Tensor run(const Stream& stream, const at::Tensor& tail, at::Tensor& tail_out) const {
    const std::string name = stream.name;
    at::Tensor u = project(in.x, params, name + "_proj", options.qkv_bias);
    if (options.short_conv > 0) {
      u = u.scalar_type() == at::kDouble ? u : u.to(at::kFloat);
      const auto type = u.scalar_type();
      const ConvResult r =
          masked_conv(u, params(name + "_conv1d.weight").to(type),
                      options.conv_bias ? params(name + "_conv1d.bias").to(type) : at::Tensor(),
                      tail, in.pad_mask);
      u = r.out;
      tail_out = r.tail;
    }
    FeatureOptions features{.silu = stream.silu};
    if (!stream.key_like) return head_features(u, options.heads, features);
    features.l2norm = options.qk_l2norm;
    features.norm_eps = options.qk_norm_eps;
    const at::Tensor norm = options.qk_norm ? params(name + "_norm.weight") : at::Tensor();
    return head_features(u, options.heads, features, norm, rotation);
  }
};

struct Gates {
  at::Tensor g, beta;  // [B,T,H]
};

Gates gates(const BlockInput& in, const BlockOptions& options, const BlockParams& params) {
  const auto type = in.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor a = project(in.x, params, "a_proj", false).to(type);
  const at::Tensor b = project(in.x, params, "b_proj", options.write_gate_bias).to(type);
  Gates out;
  out.g = -params("A_log").to(type).exp() * at::softplus(a + params("dt_bias").to(type));
  out.beta = b.sigmoid();
  if (in.pad_mask.defined()) {
    const at::Tensor pads = in.pad_mask.logical_not().unsqueeze(-1);
    out.g = out.g.masked_fill(pads, 0);
    out.beta = out.beta.masked_fill(pads, 0);
  }
  return out;
}

DeltaRuleResult recurrence(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const Gates& gates, const at::Tensor& state, int64_t chunk) {
  const bool decoding = q.size(1) == 1 && !at::GradMode::is_enabled();
  return decoding ? gated_delta_rule_step(q, k, v, gates.g, gates.beta, state)
                  : gated_delta_rule(q, k, v, gates.g, gates.beta, state, chunk);
}

// A mask without a padded token is no mask; and what padded tokens hold is never read.
BlockInput without_pads(BlockInput in) {
  if (!in.pad_mask.defined()) return in;
  if (in.pad_mask.all().item<bool>()) {
    in.pad_mask.reset();
  } else {
    in.x = in.x.masked_fill(in.pad_mask.logical_not().unsqueeze(-1), 0);
  }
  return in;
}

}  // namespace

BlockOutput gdn_block(const BlockInput& given, const BlockOptions& options,
                      const BlockParams& params) {
  const BlockInput in = without_pads(given);
  BlockOutput out;
  Rotation rotation;
  if (options.rope) {
    const at::Tensor positions = positions_of(in);
    const auto type = in.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    rotation = make_rotation(positions, options.rope_inv_freq, options.rope_factor, type);
    out.state.next_position = next_position(in, positions);
  }
  const Streams streams{in, options, params, rotation};
  const at::Tensor q = streams.run({"q", options.silu_q, true}, in.state.q_tail, out.state.q_tail);
  const at::Tensor k = streams.run({"k", options.silu_k, true}, in.state.k_tail, out.state.k_tail);
  const at::Tensor v = streams.run({"v", options.silu_v, false}, in.state.v_tail, out.state.v_tail);
  const DeltaRuleResult r =
      recurrence(q, k, v, gates(in, options, params), in.state.s, options.chunk);
  out.state.s = r.state;
  out.head_output = r.o;
  const at::Tensor norm = options.output_norm ? params("o_norm.weight") : at::Tensor();
  const at::Tensor gate = options.output_gate
                              ? project(in.x, params, "g_proj", options.output_gate_bias)
                              : at::Tensor();
  out.pre_output = gated_norm(r.o, norm, options.norm_eps, gate);
  if (in.pad_mask.defined()) {
    const at::Tensor pads = in.pad_mask.logical_not().unsqueeze(-1);
    out.head_output = out.head_output.masked_fill(pads.unsqueeze(-1), 0);
    out.pre_output = out.pre_output.masked_fill(pads, 0);
    out.y = project(out.pre_output.to(in.x.scalar_type()), params, "o_proj", options.o_bias)
                .masked_fill(pads, 0);
  } else {
    out.y = project(out.pre_output.to(in.x.scalar_type()), params, "o_proj", options.o_bias);
  }
  return out;
}

}  // namespace graft::gdn
