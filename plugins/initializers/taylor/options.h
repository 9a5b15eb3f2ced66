#pragma once

#include <graft/plugin.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace graft::taylor {

// The resolved options; declared, with defaults and documentation, by declare_options().
struct Options {
  explicit Options(const sdk::Config& config);

  std::string variant, decay;
  int64_t statistics_sequences, context_sequences;

  std::vector<double> half_lives, betas;
  int64_t grid_sequences;
  double grid_ridge;
  double beta;
  bool exclude_sink;

  int64_t gate_rounds;
  double gate_map_ridge, gate_ridge, gate_least, gate_most;

  bool head_prior;
  double prior_ridge;
  bool solve_output;
  double output_ridge;
  std::string token_weight;
  double position0_weight;
  int64_t position0_layers;

  double gate_damping;

  bool paper() const { return variant == "paper"; }
  // The mixer itself is tried at several gates.
  bool searches() const { return decay == "search" || decay == "grid"; }
  bool wants_attention() const { return paper() || !searches(); }
};

std::vector<sdk::Option> declare_options();

}  // namespace graft::taylor
