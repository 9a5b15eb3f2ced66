// Linear attention of one head with feature maps, and its gradients, token by token in float64,
// straight from the recurrence: what the kernels are tested against.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "gdn_plain.h"

namespace graft::cuda {

struct PlainMap {
  Numbers weight, bias;  // [n, head_dim], [n]; no weight: the rows are the features
};

struct LinearPlainInput {
  std::size_t tokens = 0, head_dim = 0, features = 0, value_dim = 0;
  bool normalise = true;
  double floor = 0, eps = 0;
  Numbers q, k, v;  // [tokens, dim]
  Numbers g, dt;    // [tokens]
  PlainMap map_q, map_k;
  Numbers state;         // [features, value_dim (+ 1)]
  Numbers d_o, d_state;  // cotangents
};

struct LinearPlain {
  Numbers o, state;
  Numbers dq, dk, dv, dg, ddt, d_state_in;
  PlainMap d_map_q, d_map_k;
};

// phi(u) of one row; `soft` gets the softmax before its floor.
inline Numbers plain_features(const PlainMap& map, const double* u, std::size_t head_dim,
                              std::size_t features, double floor, Numbers& soft) {
  soft.assign(u, u + (map.weight.empty() ? head_dim : 0));
  if (map.weight.empty()) return soft;
  const std::size_t n = features / 2;
  soft.assign(features, 0);
  for (std::size_t r = 0; r < n; ++r) {
    double z = map.bias[r];
    for (std::size_t c = 0; c < head_dim; ++c) z += map.weight[r * head_dim + c] * u[c];
    soft[r] = z;
    soft[n + r] = -z;
  }
  const double most = *std::max_element(soft.begin(), soft.end());
  double sum = 0;
  for (double& x : soft) sum += x = std::exp(x - most);
  Numbers phi;
  for (double& x : soft) phi.push_back(std::max(x /= sum, floor));
  return phi;
}

// From the gradient of phi to that of u, at `du`; those of the map are added to.
inline void plain_features_gradient(const PlainMap& map, const double* u, std::size_t head_dim,
                                    double floor, const Numbers& soft, Numbers d_phi, double* du,
                                    PlainMap& d_map) {
  if (map.weight.empty()) {
    std::copy(d_phi.begin(), d_phi.end(), du);
    return;
  }
  double mean = 0;
  for (std::size_t i = 0; i < soft.size(); ++i) {
    if (soft[i] < floor) d_phi[i] = 0;
    mean += soft[i] * d_phi[i];
  }
  const std::size_t n = soft.size() / 2;
  for (std::size_t r = 0; r < n; ++r) {
    const double dz = soft[r] * (d_phi[r] - mean) - soft[n + r] * (d_phi[n + r] - mean);
    d_map.bias[r] += dz;
    for (std::size_t c = 0; c < head_dim; ++c) {
      d_map.weight[r * head_dim + c] += dz * u[c];
      du[c] += dz * map.weight[r * head_dim + c];
    }
  }
}

inline LinearPlain linear_plain(const LinearPlainInput& x) {
  const std::size_t n = x.tokens, hd = x.head_dim, f = x.features, dv = x.value_dim;
  const std::size_t columns = dv + (x.normalise ? 1 : 0);
  LinearPlain out;
  out.o.assign(n * dv, 0);
  out.dq.assign(n * hd, 0);
  out.dk.assign(n * hd, 0);
  out.dv.assign(n * dv, 0);
  out.dg.assign(n, 0);
  out.ddt.assign(n, 0);
  out.d_map_q = {Numbers(x.map_q.weight.size()), Numbers(x.map_q.bias.size())};
  out.d_map_k = {Numbers(x.map_k.weight.size()), Numbers(x.map_k.bias.size())};
  std::vector<Numbers> states = {x.state}, phi_q(n), phi_k(n), soft_q(n), soft_k(n);
  Numbers norm(n, 1);
  const auto value = [&](std::size_t t, std::size_t c) { return c < dv ? x.v[t * dv + c] : 1; };
  for (std::size_t t = 0; t < n; ++t) {
    phi_q[t] = plain_features(x.map_q, &x.q[t * hd], hd, f, x.floor, soft_q[t]);
    phi_k[t] = plain_features(x.map_k, &x.k[t * hd], hd, f, x.floor, soft_k[t]);
    Numbers s = states.back(), sums(columns);
    for (std::size_t i = 0; i < f; ++i)
      for (std::size_t c = 0; c < columns; ++c) {
        double& number = s[i * columns + c];
        number = std::exp(x.g[t]) * number + x.dt[t] * phi_k[t][i] * value(t, c);
        sums[c] += phi_q[t][i] * number;
      }
    if (x.normalise) norm[t] = sums[dv] + x.eps;
    for (std::size_t c = 0; c < dv; ++c) out.o[t * dv + c] = sums[c] / norm[t];
    states.push_back(s);
  }
  out.state = states.back();

  Numbers d = x.d_state;
  for (std::size_t t = n; t-- > 0;) {
    Numbers d_sums(columns), d_phi_q(f), d_phi_k(f);
    for (std::size_t c = 0; c < dv; ++c) {
      d_sums[c] = x.d_o[t * dv + c] / norm[t];
      if (x.normalise) d_sums[dv] -= x.d_o[t * dv + c] * out.o[t * dv + c] / norm[t];
    }
    for (std::size_t i = 0; i < f; ++i)
      for (std::size_t c = 0; c < columns; ++c) {
        const std::size_t at = i * columns + c;
        d_phi_q[i] += states[t + 1][at] * d_sums[c];
        d[at] += phi_q[t][i] * d_sums[c];
        d_phi_k[i] += x.dt[t] * d[at] * value(t, c);
        out.ddt[t] += phi_k[t][i] * d[at] * value(t, c);
        if (c < dv) out.dv[t * dv + c] += x.dt[t] * phi_k[t][i] * d[at];
        out.dg[t] += std::exp(x.g[t]) * states[t][at] * d[at];
        d[at] *= std::exp(x.g[t]);
      }
    plain_features_gradient(x.map_q, &x.q[t * hd], hd, x.floor, soft_q[t], d_phi_q, &out.dq[t * hd],
                            out.d_map_q);
    plain_features_gradient(x.map_k, &x.k[t * hd], hd, x.floor, soft_k[t], d_phi_k, &out.dk[t * hd],
                            out.d_map_k);
  }
  out.d_state_in = d;
  return out;
}

}  // namespace graft::cuda
