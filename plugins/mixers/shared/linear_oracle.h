// The block of hedgehog and hedgemamba written straight from its formulas, token by token, for the
// tests: shares no code with the plugins. Slow; for float64.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

namespace graft::mixers {

struct LinearOracleOptions {
  int64_t heads = 1, kv_heads = 1, head_dim = 1;
  double qk_norm_eps = 0, floor = 0, eps = 0;
  std::vector<double> inv_freq;  // empty = no RoPE
  double rope_factor = 1;
};

// Parameters by name; a stage exists where its parameter does.
using OracleParams = std::map<std::string, at::Tensor>;

struct LinearOracleState {
  at::Tensor s;                     // [H,features,head_dim+1]; undefined = zero
  std::vector<at::Tensor> q, k, v;  // the projections seen so far, [channels] each
};

struct LinearOracleOutput {
  at::Tensor y, head_output, pre_output;  // [T,model], [T,H,head_dim], [T,H*head_dim]
  at::Tensor g, dt;                       // [T,H] log decay, write gate; 0 and 1 without decay
};

// One sequence: x [T,model], positions [T].
class LinearOracle {
 public:
  LinearOracle(const LinearOracleOptions& options, const OracleParams& params)
      : o_(options), p_(params) {}

  LinearOracleOutput run(const at::Tensor& x, const std::vector<int64_t>& positions,
                         LinearOracleState& state) const {
    std::vector<at::Tensor> ys, heads, pres, gs, dts;
    for (int64_t t = 0; t < x.size(0); ++t) {
      const int64_t position = positions[static_cast<std::size_t>(t)];
      const at::Tensor q = stream(x[t], "q", o_.heads, position, state.q);
      const at::Tensor k = stream(x[t], "k", o_.kv_heads, position, state.k);
      const at::Tensor v = stream(x[t], "v", o_.kv_heads, 0, state.v);
      dts.push_back(at::ones({o_.heads}, x.options()));
      gs.push_back(at::zeros({o_.heads}, x.options()));
      if (has("A_log")) {
        dts.back() = (1 + (linear(x[t], "dt_proj") + at("dt_bias")).exp()).log();
        gs.back() = -at("A_log").exp() * dts.back();
      }
      const at::Tensor head = recur(gs.back().exp(), dts.back(), q, k, v, state);
      heads.push_back(head);
      at::Tensor z = head.reshape({-1});
      if (has("g_proj.weight")) {
        const at::Tensor gate = linear(x[t], "g_proj");
        z = z * gate * gate.sigmoid();
      }
      pres.push_back(z);
      ys.push_back(linear(z, "o_proj"));
    }
    return {at::stack(ys), at::stack(heads), at::stack(pres), at::stack(gs), at::stack(dts)};
  }

 private:
  bool has(const std::string& name) const { return p_.contains(name); }
  const at::Tensor& at(const std::string& name) const { return p_.at(name); }

  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    const at::Tensor y = at(name + ".weight").matmul(x);
    return has(name + ".bias") ? y + at(name + ".bias") : y;
  }

  // q, k or v of one token: [heads, head_dim].
  at::Tensor stream(const at::Tensor& x, const std::string& name, int64_t heads, int64_t position,
                    std::vector<at::Tensor>& seen) const {
    const at::Tensor projected = linear(x, name + "_proj");
    at::Tensor u = projected;
    seen.push_back(projected);
    if (has(name + "_conv1d.weight")) {
      const at::Tensor& w = at(name + "_conv1d.weight");
      const auto width = static_cast<std::size_t>(w.size(2));
      for (std::size_t back = 0; back < width && back < seen.size(); ++back) {
        u = u + w.select(1, 0).select(1, static_cast<int64_t>(width - 1 - back)) *
                    seen[seen.size() - 1 - back];
      }
      if (has(name + "_conv1d.bias")) u = u + at(name + "_conv1d.bias");
    }
    u = u.reshape({heads, -1});
    if (name == "v") return u;
    if (has(name + "_norm.weight"))
      u = u / ((u * u).mean(-1, true) + o_.qk_norm_eps).sqrt() * at(name + "_norm.weight");
    return o_.inv_freq.empty() ? u : rotate(u, position);
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

  // [features] of one head.
  at::Tensor features(const at::Tensor& u, const std::string& name, int64_t head) const {
    const std::string map = "feature_map_" + name;
    const at::Tensor z = at(map + ".weight")[head].matmul(u) + at(map + ".bias")[head];
    const at::Tensor both = at::cat({z, -z});
    const at::Tensor e = (both - both.max()).exp();
    return (e / e.sum()).clamp_min(o_.floor);
  }

  // decay, dt [H]
  at::Tensor recur(const at::Tensor& decay, const at::Tensor& dt, const at::Tensor& q,
                   const at::Tensor& k, const at::Tensor& v, LinearOracleState& state) const {
    std::vector<at::Tensor> states, outputs;
    for (int64_t h = 0; h < o_.heads; ++h) {
      const int64_t of = h / (o_.heads / o_.kv_heads);
      const at::Tensor c = features(q[h], "q", h), b = features(k[of], "k", h);
      const at::Tensor written = dt[h] * at::outer(b, at::cat({v[of], at::ones({1}, v.options())}));
      const at::Tensor s = state.s.defined() ? decay[h] * state.s[h] + written : written;
      const at::Tensor sums = s.t().matmul(c);
      states.push_back(s);
      outputs.push_back(sums.slice(0, 0, o_.head_dim) / (sums[o_.head_dim] + o_.eps));
    }
    state.s = at::stack(states);
    return at::stack(outputs);
  }

  const LinearOracleOptions& o_;
  const OracleParams& p_;
};

}  // namespace graft::mixers
