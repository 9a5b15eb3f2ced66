#include "plugins/initializers/taylor/options.h"

namespace graft::taylor {

using sdk::Option;
using sdk::Status;

Options::Options(const sdk::Config& config)
    : variant(config.get<std::string>("variant")),
      decay(config.get<std::string>("decay")),
      statistics_sequences(config.get<int64_t>("statistics_sequences")),
      context_sequences(config.get<int64_t>("context_sequences")),
      half_lives(config.get<std::vector<double>>("half_lives")),
      betas(config.get<std::vector<double>>("betas")),
      grid_sequences(config.get<int64_t>("grid_sequences")),
      grid_ridge(config.get<double>("grid_ridge")),
      beta(config.get<double>("beta")),
      exclude_sink(config.get<bool>("exclude_sink")),
      gate_rounds(config.get<int64_t>("gate_rounds")),
      gate_map_ridge(config.get<double>("gate_map_ridge")),
      gate_ridge(config.get<double>("gate_ridge")),
      gate_least(config.get<double>("gate_least")),
      gate_most(config.get<double>("gate_most")),
      head_prior(config.get<bool>("head_prior")),
      prior_ridge(config.get<double>("prior_ridge")),
      solve_output(config.get<bool>("solve_output")),
      output_ridge(config.get<double>("output_ridge")),
      token_weight(config.get<std::string>("token_weight")),
      position0_weight(config.get<double>("position0_weight")),
      position0_layers(config.get<int64_t>("position0_layers")),
      gate_damping(config.get<double>("gate_damping")) {
  if (half_lives.empty() || betas.empty()) {
    const char* const key = half_lives.empty() ? "half_lives" : "betas";
    throw Status(GRAFT_INVALID_ARGUMENT, sdk::cat("config.", key),
                 "expected at least one value, got an empty list");
  }
  if (gate_least > gate_most) {
    throw Status(GRAFT_INVALID_ARGUMENT, "config.gate_least",
                 sdk::cat("expected at most gate_most = ", gate_most, ", got ", gate_least));
  }
}

std::vector<Option> declare_options() {
  std::vector<Option> options;
  const auto add = [&](Option option) { options.push_back(std::move(option)); };
  add(Option::string("variant", "closed_form",
                     "closed_form (regressions, no gradient) or paper (Phase 1 as published)")
          .one_of({"closed_form", "paper"}));
  add(Option::string(
          "decay", "search",
          "closed_form: half-lives and write gates searched one after the other (search) "
          "or in all pairs (grid), or half-lives from the median or mean distance of "
          "the teacher's attention")
          .one_of({"search", "grid", "median", "mean"}));
  add(Option::integer("statistics_sequences", 16,
                      "sequences whose attention probabilities are read (paper, median, mean); "
                      "0 = all")
          .at_least(0));
  add(Option::integer("context_sequences", 16,
                      "closed_form: sequences that fit the output gate and the head prior; 0 = all")
          .at_least(0));
  add(Option::reals("half_lives", {1, 2, 4, 8, 16, 32, 64, 256},
                    "search, grid: half-lives in tokens")
          .at_least(0.01));
  add(Option::reals("betas", {0.05, 0.15, 0.4, 0.8}, "search, grid: write gates")
          .range(0.001, 0.999));
  add(Option::integer("grid_sequences", 4, "search, grid: sequences it is judged on; 0 = all")
          .at_least(0));
  add(Option::real("grid_ridge", 1e-2,
                   "search, grid: ridge of the map from head output to context, as "
                   "part of the mean diagonal")
          .at_least(0.0));
  add(Option::real("beta", 0.1,
                   "median, mean: write gate of every head; search: while half-lives are searched")
          .range(0.001, 0.999));
  add(Option::boolean("exclude_sink", true,
                      "median, mean: leave out the mass at position 0, the attention sink"));
  add(Option::integer("gate_rounds", 2,
                      "closed_form: rounds of the output gate's regression; 0 = "
                      "the gate stays 1")
          .range(0, 100));
  add(Option::real("gate_map_ridge", 1e-2, "output gate: ridge of the map to the context")
          .at_least(0.0));
  add(Option::real("gate_ridge", 0.1, "output gate: ridge of its weights").at_least(0.0));
  add(Option::real("gate_least", 0.02, "output gate: smallest target").at_least(1e-6));
  add(Option::real("gate_most", 4.0, "output gate: largest target").at_least(1e-6));
  add(Option::boolean("head_prior", true,
                      "closed_form: start the output projection from per-head maps to the "
                      "teacher's contexts"));
  add(Option::real("prior_ridge", 0.1, "ridge of those maps").at_least(0.0));
  add(Option::boolean("solve_output", true,
                      "closed_form: fit the output projection to the teacher's block output"));
  add(Option::real("output_ridge", 0.3, "ridge of that fit toward the prior").at_least(0.0));
  add(Option::string("token_weight", "residual",
                     "weight of a token in that fit: residual (1/|residual stream|^2) or none")
          .one_of({"residual", "none"}));
  add(Option::real("position0_weight", 4,
                   "how much more position 0 weighs in the first layers: x (1 + this)")
          .at_least(0.0));
  add(Option::integer("position0_layers", 12, "how many layers those are").at_least(0));
  add(Option::real("gate_damping", 0.01,
                   "paper: size of the output gate's weights against the "
                   "values'")
          .at_least(0.0));
  return options;
}

}  // namespace graft::taylor
