#pragma once

#include <ATen/core/Tensor.h>
#include <graft/plugin.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plugins/initializers/taylor/calibration.h"
#include "plugins/initializers/taylor/options.h"

namespace graft::taylor {

// A half-life and a write gate for each head.
struct Dynamics {
  std::vector<double> half_lives, write_gates;
};

// The start that needs no gradient: every unknown is the solution of a small linear regression of
// the mixer's own intermediate outputs on the teacher's. README.md has the formulas.
//
// Works with any mixer that has the four projections by role and the taps "head_output" and
// "pre_output"; what else it lacks (decay, write gate, output gate) is named in the log and left
// out.
class ClosedForm {
 public:
  ClosedForm(const Options& options, sdk::InitArgs& args);
  void run();

 private:
  // How the mixer's output without the output gate can be seen.
  enum class Ungated { pre_output, normalised_head_output };

  struct Choice {
    Dynamics dynamics;
    std::vector<double> residuals;  // of each head
  };
  void choose_dynamics();
  void set_dynamics(const Dynamics& dynamics);
  void improve(const std::vector<Dynamics>& points, Choice& best);
  void search_dynamics(bool has_decay, bool has_write_gate);
  void set_from_attention(bool has_decay, bool has_write_gate);
  void open_output_gate();
  void regress_gate();
  // Parts of the gate's weight [heads, model] and bias [heads], head group by head group.
  struct GateRows {
    std::vector<at::Tensor> weights, biases;
  };
  // What the gate's regression reads of one batch.
  struct GateInputs {
    at::Tensor x, z, c;  // [N, model], [heads, N, d], [heads, N, d_v]
  };
  void for_gate_inputs(const std::function<void(const GateInputs&)>& body);
  void fit_gate(int64_t first_head, int64_t n_heads, std::string_view domain, GateRows& out);
  void solve_output();

  at::Tensor normalised_head_output(const BatchView& batch, bool with_norm_weight);  // [H, N, d]
  at::Tensor ungated(const BatchView& batch);                                        // [H, N, d]
  at::Tensor token_weights(const BatchView& batch) const;  // [B * T], or undefined
  at::Tensor folded_prior(const at::Tensor& maps) const;   // [H, d, d_v] -> [H * d, model]
  at::Tensor output_target(const BatchView& batch) const;  // [B * T, model]
  void set_all_heads(const char* what, double value);
  void note(int32_t level, const std::string& text) const;
  void report(const std::string& figure);  // in the layer's one line of results

  const Options& options_;
  sdk::InitArgs& args_;
  int64_t heads_, model_;
  Ungated ungated_ = Ungated::pre_output;
  double open_gate_ = 1;
  std::vector<GateInputs> gate_inputs_;
  std::string summary_;
};

}  // namespace graft::taylor
