#include "gdn_torch_block.h"

#include <ATen/ATen.h>

#include <string>

#include "gdn_chunk.h"
#include "gdn_features.h"

namespace graft::gdn::torch_block {
namespace {

using mixers::causal_conv;
using mixers::ConvResult;
using mixers::inner_type;
using mixers::project;
using mixers::Tokens;

// One of the streams q, k, v on its way from projection to the delta rule.
struct Stream {
  const char* name;
  bool silu;
  bool key_like;  // q and k: norms and rotation
};

struct Streams {
  const Tokens& in;
  const BlockOptions& options;
  const BlockParams& params;
  const Rotation& rotation;

  at::Tensor run(const Stream& stream, const at::Tensor& tail, at::Tensor& tail_out) const {
    const std::string name = stream.name;
    at::Tensor u = project(in.x, params, name + "_proj", options.qkv_bias);
    if (options.short_conv > 0) {
      const auto type = inner_type(u);
      u = u.to(type);
      const ConvResult r =
          causal_conv(u, params(name + "_conv1d.weight").to(type),
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

Gates gates(const Tokens& in, const BlockOptions& options, const BlockParams& params) {
  const auto type = inner_type(in.x);
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

// From the recurrence's output to y, or as far as is wanted.
void finish(const BlockInput& given, const Tokens& in, const BlockOptions& options,
            const BlockParams& params, const at::Tensor& o, BlockOutput& out) {
  const at::Tensor norm = options.output_norm ? params("o_norm.weight") : at::Tensor();
  const at::Tensor gate = options.output_gate
                              ? project(in.x, params, "g_proj", options.output_gate_bias)
                              : at::Tensor();
  out.pre_output = gated_norm(o, norm, options.norm_eps, gate);
  at::Tensor pads;
  if (in.pad_mask.defined()) {
    pads = in.pad_mask.logical_not().unsqueeze(-1);
    out.pre_output = out.pre_output.masked_fill(pads, 0);
  }
  if (!given.want_y) return;
  out.y = project(out.pre_output.to(in.x.scalar_type()), params, "o_proj", options.o_bias);
  if (pads.defined()) out.y = out.y.masked_fill(pads, 0);
}

}  // namespace

BlockOutput gdn_block(const BlockInput& given, const BlockOptions& options,
                      const BlockParams& params) {
  Tokens in = mixers::without_pads({given.x, given.positions, given.pad_mask, {}});
  in.next_position = given.state.next_position;
  const BlockState& before = given.state;
  BlockOutput out;
  Rotation rotation;
  if (options.rope.exists()) {
    const at::Tensor positions = mixers::token_positions(in);
    rotation =
        make_rotation(positions, options.rope.inv_freq, options.rope.factor, inner_type(in.x));
    out.state.next_position = mixers::next_position(in, positions);
  }
  const Streams streams{in, options, params, rotation};
  const at::Tensor q = streams.run({"q", options.silu_q, true}, before.q_tail, out.state.q_tail);
  const at::Tensor k = streams.run({"k", options.silu_k, true}, before.k_tail, out.state.k_tail);
  const at::Tensor v = streams.run({"v", options.silu_v, false}, before.v_tail, out.state.v_tail);
  const Gates of = gates(in, options, params);
  const DeltaRuleResult r = recurrence(q, k, v, of, before.s, options.chunk);
  out.g = of.g;
  out.beta = of.beta;
  out.state.s = r.state;
  out.head_output = r.o;
  if (in.pad_mask.defined()) {
    const at::Tensor pads = in.pad_mask.logical_not().unsqueeze(-1).unsqueeze(-1);
    out.head_output = out.head_output.masked_fill(pads, 0);
  }
  if (given.want_y || given.want_pre_output) finish(given, in, options, params, r.o, out);
  return out;
}

}  // namespace graft::gdn::torch_block
