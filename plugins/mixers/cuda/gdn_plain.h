// The gated delta rule of one head and its gradients, token by token in float64, straight from the
// recurrence: what the kernels are tested against.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace graft::cuda {

using Numbers = std::vector<double>;

struct GdnPlainInput {
  std::size_t tokens = 0, key_dim = 0, value_dim = 0;
  double scale = 1;
  Numbers q, k, v;       // [tokens, dim]
  Numbers g, beta;       // [tokens]
  Numbers state;         // [key_dim, value_dim]
  Numbers d_o, d_state;  // cotangents
};

struct GdnPlain {
  Numbers o, state;
  Numbers dq, dk, dv, dg, dbeta, d_state_in;
};

inline GdnPlain gdn_plain(const GdnPlainInput& x) {
  const std::size_t n = x.tokens, dk = x.key_dim, dv = x.value_dim;
  GdnPlain out;
  out.o.assign(n * dv, 0);
  out.dq.assign(n * dk, 0);
  out.dk.assign(n * dk, 0);
  out.dv.assign(n * dv, 0);
  out.dg.assign(n, 0);
  out.dbeta.assign(n, 0);
  std::vector<Numbers> states = {x.state};
  Numbers err(n * dv);
  for (std::size_t t = 0; t < n; ++t) {
    const double *q = &x.q[t * dk], *k = &x.k[t * dk], e = std::exp(x.g[t]);
    Numbers s = states.back();
    for (double& number : s) number *= e;
    for (std::size_t c = 0; c < dv; ++c) {
      double seen = 0;
      for (std::size_t r = 0; r < dk; ++r) seen += s[r * dv + c] * k[r];
      err[t * dv + c] = x.v[t * dv + c] - seen;
    }
    for (std::size_t r = 0; r < dk; ++r)
      for (std::size_t c = 0; c < dv; ++c) {
        s[r * dv + c] += x.beta[t] * k[r] * err[t * dv + c];
        out.o[t * dv + c] += x.scale * s[r * dv + c] * q[r];
      }
    states.push_back(s);
  }
  out.state = states.back();

  Numbers d = x.d_state;
  for (std::size_t t = n; t-- > 0;) {
    const double *q = &x.q[t * dk], *k = &x.k[t * dk], e = std::exp(x.g[t]), beta = x.beta[t];
    const Numbers &before = states[t], &after = states[t + 1];
    for (std::size_t r = 0; r < dk; ++r)
      for (std::size_t c = 0; c < dv; ++c) {
        out.dq[t * dk + r] += x.scale * after[r * dv + c] * x.d_o[t * dv + c];
        d[r * dv + c] += x.scale * q[r] * x.d_o[t * dv + c];
      }
    for (std::size_t c = 0; c < dv; ++c) {
      double du = 0;
      for (std::size_t r = 0; r < dk; ++r) {
        du += d[r * dv + c] * k[r];
        out.dk[t * dk + r] += d[r * dv + c] * beta * err[t * dv + c];
      }
      out.dbeta[t] += du * err[t * dv + c];
      out.dv[t * dv + c] = beta * du;
    }
    for (std::size_t r = 0; r < dk; ++r)
      for (std::size_t c = 0; c < dv; ++c) {
        const double s = before[r * dv + c], d_err = out.dv[t * dv + c];
        out.dk[t * dk + r] -= e * s * d_err;
        const double d_decayed = d[r * dv + c] - k[r] * d_err;
        out.dg[t] += e * s * d_decayed;
        d[r * dv + c] = e * d_decayed;
      }
  }
  out.d_state_in = d;
  return out;
}

}  // namespace graft::cuda
