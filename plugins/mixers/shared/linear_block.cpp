#include "linear_block.h"

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "feature_map.h"
#include "linear_scan.h"

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

  // [kv_heads,...] -> [heads,...]
  at::Tensor for_each_query_head(const at::Tensor& u) const {
    const int64_t group = o.heads / o.kv_heads;
    return group == 1 ? u : u.repeat_interleave(group, 0);
  }

  // phi of queries or keys [heads,B,T,head_dim]: [heads*B,T,features]
  at::Tensor features(const std::string& name, at::Tensor u, int64_t heads) const {
    if (o.qk_norm) u = rms_norm(u, inner(name + "_norm.weight"), o.qk_norm_eps);
    u = rotate(u, rotation);
    if (heads != o.heads) u = for_each_query_head(u);
    const std::string map = "feature_map_" + name;
    const int64_t batch = tokens.x.size(0), length = tokens.x.size(1);
    return hedgehog_features(u.reshape({o.heads, batch * length, o.head_dim}),
                             inner(map + ".weight"), inner(map + ".bias"), o.feature_floor)
        .view({o.heads * batch, length, o.features()});
  }
};

// How strongly a token is written, and the log decay before it; [heads*B,T], undefined: 1 and 0.
struct Dynamics {
  at::Tensor write, g;
};

Dynamics dynamics(const Call& call) {
  const LinearBlockOptions& o = call.o;
  const at::Tensor& x = call.tokens.x;
  const at::Tensor& mask = call.tokens.pad_mask;
  const int64_t batch = x.size(0), length = x.size(1);
  const auto rows = [&](const at::Tensor& u) {  // [B,T,heads or 1]
    return u.permute({2, 0, 1}).expand({o.heads, batch, length}).reshape({o.heads * batch, length});
  };
  if (!o.decay) return {mask.defined() ? rows(mask.to(call.type).unsqueeze(-1)) : at::Tensor(), {}};
  const at::Tensor raw = project(x, call.params, "dt_proj", false).to(call.type);
  at::Tensor dt = at::softplus(raw + call.inner("dt_bias"));
  at::Tensor g = (-call.inner("A_log").exp() * dt).clamp_min(kLeastLogDecay);
  if (mask.defined()) {
    const at::Tensor pads = mask.logical_not().unsqueeze(-1);
    dt = dt.masked_fill(pads, 0);
    g = g.masked_fill(pads, 0);
  }
  return {rows(dt), rows(g)};
}

// [B,H,...] <-> [H*B,...]
at::Tensor rows_of_state(const at::Tensor& s, at::ScalarType type) {
  return s.defined() ? s.to(type).transpose(0, 1).flatten(0, 1) : s;
}

LinearAttentionResult attend(const Call& call, const Dynamics& d, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, const at::Tensor& state) {
  const bool decoding = q.size(1) == 1 && !at::GradMode::is_enabled();
  return linear_attention(q, k, v, d.write, d.g, state, call.o.eps, [&](const auto&... of) {
    return decoding ? linear_scan_step(of...) : linear_scan(of..., call.o.chunk);
  });
}

void add_outputs(const Call& call, const at::Tensor& o_heads, LinearBlockOutput& out) {
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
  out.head_output = without(o_heads.permute({1, 2, 0, 3}));
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
  const int64_t batch = tokens.x.size(0), length = tokens.x.size(1);
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
  const auto by_token = [&](const at::Tensor& rows) {
    return rows.view({o.heads, batch, length}).permute({1, 2, 0});
  };
  if (o.decay) {
    out.g = by_token(d.g);
    out.dt = by_token(d.write);
  }
  const LinearAttentionResult r =
      attend(call, d, call.features("q", q, o.heads), call.features("k", k, o.kv_heads),
             call.for_each_query_head(v).reshape({o.heads * batch, length, o.head_dim}),
             rows_of_state(state.s, call.type));
  out.state.s = r.state.reshape({o.heads, batch, o.features(), o.head_dim + 1}).transpose(0, 1);
  add_outputs(call, r.o.reshape({o.heads, batch, length, o.head_dim}), out);
  return out;
}

}  // namespace graft::mixers
