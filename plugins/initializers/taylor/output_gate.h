#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "plugins/initializers/taylor/least_squares.h"

namespace graft::taylor {

// The gate functions f of graft_param_spec.domain whose raw value can be regressed: gate = f(W x +
// b).
// "" is the identity, "log" exp, "logit" sigmoid, "silu-inv" silu, "softplus-inv" softplus.
bool is_gate_domain(std::string_view domain);

// f(raw).
at::Tensor gate_value(std::string_view domain, const at::Tensor& raw);

// The raw value with f(raw) = gate, for gates in (0, 1) of "logit" and > 0 otherwise. silu is
// inverted on its increasing branch by Newton's method.
at::Tensor gate_raw(std::string_view domain, const at::Tensor& gate);

// The constant value an open gate is held at while it is not known yet: 1, or 0.5 for a sigmoid,
// which has to reach what lies on both sides of it.
double open_gate(std::string_view domain);

struct GateLimits {
  double least = 0.02;
  double most = 4.0;
};

// The output gate of each head as a function of the block's input x, fitted in rounds:
//   1. M_h: ridge from z_h scaled by the current gate (open_gate() at first) to the head's context
//   c_h;
//   2. the best gate s_t = <M z_t, c_t> / |M z_t|^2 of each token, clamped, and ridge of f^-1(s_t)
//   on
//      (x_t, 1) with weights |M z_t|^2.
// A round is two passes over the data: accumulate_map() over every batch, then end_map(), then
// accumulate_gate() over every batch, then end_gate().
class GateRegression {
 public:
  struct Options {
    double map_ridge = 1e-2;   // lambda of step 1
    double gate_ridge = 1e-1;  // lambda of step 2, of the mean diagonal of x's part
    GateLimits limits;
    bool bias = true;  // fit the constant term
  };
  GateRegression(int64_t heads, int64_t model, int64_t z_dim, int64_t context_dim,
                 std::string_view domain, const Options& options);

  // x [N, model], z [heads, N, z_dim] before the gate, c [heads, N, context_dim]; float32.
  void accumulate_map(const at::Tensor& x, const at::Tensor& z, const at::Tensor& c);
  void end_map();
  void accumulate_gate(const at::Tensor& x, const at::Tensor& z, const at::Tensor& c);
  void end_gate();

  const at::Tensor& weight() const { return weight_; }  // [heads, model]
  const at::Tensor& bias() const { return bias_; }      // [heads]

 private:
  at::Tensor gated(const at::Tensor& x, const at::Tensor& z) const;

  std::string domain_;
  Options options_;
  LeastSquares map_;
  at::Tensor maps_;  // M [heads, z_dim, context_dim]
  // Of (x, 1): [heads, model + 1, model + 1] by add_gram(), [heads, model + 1].
  at::Tensor gram_, moment_;
  at::Tensor weight_, bias_;  // undefined before the first end_gate()
};

}  // namespace graft::taylor
