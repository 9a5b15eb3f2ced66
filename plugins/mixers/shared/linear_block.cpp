#include "linear_block.h"

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "hedgehog_attention.h"

namespace graft::mixers {
namespace {

// The log of float64's smallest number is -708: a decay below that is 0, and a finite one has
// finite gradients.
constexpr double kLeastLogDecay = -700;

// [B,T,heads*dim] -> [heads,B,T,dim], a view.
at::Tensor heads_first(const at::Tensor& u, int64_t heads) {
  return u.reshape({u.size(0), u.size(1), heads, u.size(2) / heads}).permute({2, 0, 1, 3});
}

at::Tensor rms_norm(const at::Tensor& u, const at::Tensor& weight, double eps) {
  return u * (u.square().mean(-1, true) + eps).rsqrt() * weight;
}

// Everything of one call that its stages share.
struct Call {
  const Tokens& tokens;
  const LinearBlockOptions& o;
  const ParamSource& params;
  at::ScalarType type;
  Rotation rotation;

  at::Tensor inner(std::string_view name) const { return params(name).to(type); }

  // [heads,B,T,head_dim]
  at::Tensor stream(const std::string& name, int64_t heads, const at::Tensor& tail,
                    at::Tensor& tail_out) const {
    at::Tensor u = project(tokens.x, params, name + "_proj", o.qkv_bias).to(type);
    if (o.short_conv > 0) {
      const ConvResult r = causal_conv(u, inner(name + "_conv1d.weight"),
                                       o.conv_bias ? inner(name + "_conv1d.bias") : at::Tensor(),
                                       tail, tokens.pad_mask);
      u = u + r.out;
      tail_out = r.tail;
    }
    return heads_first(u, heads);
  }

  // Queries or keys [heads,B,T,head_dim] as the feature maps read them, [B,T,heads,head_dim].
  at::Tensor positioned(const std::string& name, at::Tensor u) const {
    if (o.qk_norm) u = rms_norm(u, inner(name + "_norm.weight"), o.qk_norm_eps);
    return rotate(u, rotation).permute({1, 2, 0, 3});
  }
};

// How strongly a token is written, and the log decay before it; [B,T,heads], undefined: 1 and 0.
struct Dynamics {
  at::Tensor write, g;
};

Dynamics dynamics(const Call& call) {
  const LinearBlockOptions& o = call.o;
  const at::Tensor& x = call.tokens.x;
  const at::Tensor& mask = call.tokens.pad_mask;
  if (!o.decay) {
    if (!mask.defined()) return {};
    return {mask.to(call.type).unsqueeze(-1).expand({x.size(0), x.size(1), o.heads}), {}};
  }
  const at::Tensor raw = project(x, call.params, "dt_proj", false).to(call.type);
  at::Tensor dt = at::softplus(raw + call.inner("dt_bias"));
  at::Tensor g = (-call.inner("A_log").exp() * dt).clamp_min(kLeastLogDecay);
  if (mask.defined()) {
    const at::Tensor pads = mask.logical_not().unsqueeze(-1);
    dt = dt.masked_fill(pads, 0);
    g = g.masked_fill(pads, 0);
  }
  return {dt, g};
}

// o [B,T,heads,head_dim]
void add_outputs(const Call& call, const at::Tensor& attended, LinearBlockOutput& out) {
  const LinearBlockOptions& o = call.o;
  const Tokens& tokens = call.tokens;
  // At padded tokens outputs are 0, and gradients that come in there go nowhere.
  const auto without = [&](const at::Tensor& u) {
    if (!tokens.pad_mask.defined()) return u;
    std::vector<int64_t> shape(static_cast<std::size_t>(u.dim()), 1);
    shape[0] = u.size(0);
    shape[1] = u.size(1);
    return u.masked_fill(tokens.pad_mask.logical_not().view(shape), 0);
  };
  out.head_output = without(attended);
  at::Tensor gated = out.head_output.flatten(2);
  if (o.output_gate)
    gated = gated * at::silu(project(tokens.x, call.params, "g_proj", true).to(call.type));
  out.pre_output = without(gated);
  out.y =
      without(project(out.pre_output.to(tokens.x.scalar_type()), call.params, "o_proj", o.o_bias));
}

}  // namespace

LinearBlockOutput linear_block(const LinearBlockInput& given, const LinearBlockOptions& o,
                               const ParamSource& params) {
  Tokens tokens = without_pads(given.tokens);
  tokens.next_position = given.state.next_position;
  Call call{tokens, o, params, inner_type(tokens.x), {}};
  LinearBlockOutput out;
  if (o.rope.exists()) {
    const at::Tensor positions = token_positions(tokens);
    call.rotation = make_rotation(positions, o.rope.inv_freq, o.rope.factor, call.type);
    out.state.next_position = next_position(tokens, positions);
  }
  const LinearBlockState& state = given.state;
  const at::Tensor q = call.stream("q", o.heads, state.q_tail, out.state.q_tail);
  const at::Tensor k = call.stream("k", o.kv_heads, state.k_tail, out.state.k_tail);
  const at::Tensor v = call.stream("v", o.kv_heads, state.v_tail, out.state.v_tail);
  const Dynamics d = dynamics(call);
  if (o.decay) {
    out.g = d.g;
    out.dt = d.write;
  }
  const HedgehogAttentionResult r = hedgehog_attention(
      {call.positioned("q", q), call.positioned("k", k), v.permute({1, 2, 0, 3}),
       call.inner("feature_map_q.weight"), call.inner("feature_map_q.bias"),
       call.inner("feature_map_k.weight"), call.inner("feature_map_k.bias"), d.g, d.write,
       state.s.defined() ? state.s.to(call.type) : state.s, o.feature_floor, o.eps, o.chunk});
  out.state.s = r.state;
  add_outputs(call, r.o, out);
  return out;
}

}  // namespace graft::mixers
