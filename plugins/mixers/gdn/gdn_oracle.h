// The Gated DeltaNet block written straight from its formulas, token by token, for the tests:
// shares no code with the plugin. Slow; for float64.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

namespace graft::gdn {

struct OracleOptions {
  int64_t heads = 1, key_dim = 1, value_dim = 1;
  bool silu_q = true, silu_k = true, silu_v = true, l2norm = true;
  double qk_norm_eps = 0, norm_eps = 1e-5;
  std::vector<double> inv_freq;  // empty = no RoPE
  double rope_factor = 1;
};

// Parameters by name; a stage exists where its parameter does.
using OracleParams = std::map<std::string, at::Tensor>;

struct OracleState {
  at::Tensor s;                     // [H,dk,dv]; undefined = zero
  std::vector<at::Tensor> q, k, v;  // the projections seen so far, [channels] each
};

struct OracleOutput {
  at::Tensor y, head_output, pre_output;  // [T,model], [T,H,dv], [T,H*dv]
  at::Tensor g, beta;                     // [T,H] log decay, write gate
};

// One sequence: x [T,model], positions [T].
class Oracle {
 public:
  Oracle(const OracleOptions& options, const OracleParams& params) : o_(options), p_(params) {}

  OracleOutput run(const at::Tensor& x, const std::vector<int64_t>& positions,
                   OracleState& state) const {
    std::vector<at::Tensor> ys, heads, pres, gs, betas;
    for (int64_t t = 0; t < x.size(0); ++t) {
      const at::Tensor q =
          stream(x[t], "q", o_.silu_q, positions[static_cast<std::size_t>(t)], state.q);
      const at::Tensor k =
          stream(x[t], "k", o_.silu_k, positions[static_cast<std::size_t>(t)], state.k);
      const at::Tensor v = stream(x[t], "v", o_.silu_v, 0, state.v);
      gs.push_back(log_decay(x[t]));
      betas.push_back(1 / (1 + (-linear(x[t], "b_proj")).exp()));
      const at::Tensor head = recur(gs.back().exp(), betas.back(), q, k, v, state);
      heads.push_back(head);
      at::Tensor z = head;
      if (has("o_norm.weight")) z = rms(z, at("o_norm.weight"), o_.norm_eps);
      z = z.reshape({-1});
      if (has("g_proj.weight")) {
        const at::Tensor gate = linear(x[t], "g_proj");
        z = z * gate * gate.sigmoid();
      }
      pres.push_back(z);
      ys.push_back(linear(z, "o_proj"));
    }
    return {at::stack(ys), at::stack(heads), at::stack(pres), at::stack(gs), at::stack(betas)};
  }

 private:
  bool has(const std::string& name) const { return p_.contains(name); }
  const at::Tensor& at(const std::string& name) const { return p_.at(name); }

  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    const at::Tensor y = at(name + ".weight").matmul(x);
    return has(name + ".bias") ? y + at(name + ".bias") : y;
  }
  static at::Tensor rms(const at::Tensor& x, const at::Tensor& weight, double eps) {
    return x / ((x * x).mean(-1, true) + eps).sqrt() * weight;
  }

  // q, k or v of one token: [H, dim].
  at::Tensor stream(const at::Tensor& x, const std::string& name, bool silu, int64_t position,
                    std::vector<at::Tensor>& seen) const {
    at::Tensor u = linear(x, name + "_proj");
    seen.push_back(u);
    if (has(name + "_conv1d.weight")) {
      const at::Tensor& w = at(name + "_conv1d.weight");
      const auto width = static_cast<std::size_t>(w.size(2));
      u = has(name + "_conv1d.bias") ? at(name + "_conv1d.bias") : at::zeros_like(u);
      for (std::size_t back = 0; back < width && back < seen.size(); ++back) {
        u = u + w.select(1, 0).select(1, static_cast<int64_t>(width - 1 - back)) *
                    seen[seen.size() - 1 - back];
      }
    }
    if (silu) u = u / (1 + (-u).exp());
    u = u.reshape({o_.heads, -1});
    if (name == "v") return u;
    if (has(name + "_norm.weight")) u = rms(u, at(name + "_norm.weight"), o_.qk_norm_eps);
    if (!o_.inv_freq.empty()) u = rotate(u, position);
    if (o_.l2norm) u = u / ((u * u).sum(-1, true) + 1e-6).sqrt();
    return u;
  }

  at::Tensor rotate(const at::Tensor& u, int64_t position) const {
    const auto n = static_cast<int64_t>(o_.inv_freq.size());
    std::vector<at::Tensor> columns(u.unbind(1));
    const std::vector<at::Tensor> before = columns;
    for (int64_t i = 0; i < n; ++i) {
      const auto a = static_cast<std::size_t>(i), b = static_cast<std::size_t>(i + n);
      const double angle = static_cast<double>(position) * o_.inv_freq[a];
      const double c = std::cos(angle) * o_.rope_factor, s = std::sin(angle) * o_.rope_factor;
      columns[a] = before[a] * c - before[b] * s;
      columns[b] = before[b] * c + before[a] * s;
    }
    return at::stack(columns, 1);
  }

  at::Tensor log_decay(const at::Tensor& x) const {
    const at::Tensor dt = (1 + (linear(x, "a_proj") + at("dt_bias")).exp()).log();
    return -at("A_log").exp() * dt;
  }

  // decay, beta [H]
  at::Tensor recur(const at::Tensor& decay, const at::Tensor& beta, const at::Tensor& q,
                   const at::Tensor& k, const at::Tensor& v, OracleState& state) const {
    std::vector<at::Tensor> states, outputs;
    for (int64_t h = 0; h < o_.heads; ++h) {
      at::Tensor s =
          state.s.defined() ? state.s[h] : at::zeros({o_.key_dim, o_.value_dim}, k.options());
      s = decay[h] * s;
      s = s + beta[h] * at::outer(k[h], v[h] - s.t().matmul(k[h]));
      states.push_back(s);
      outputs.push_back(s.t().matmul(q[h]) / std::sqrt(static_cast<double>(o_.key_dim)));
    }
    state.s = at::stack(states);
    return at::stack(outputs);
  }

  const OracleOptions& o_;
  const OracleParams& p_;
};

}  // namespace graft::gdn
