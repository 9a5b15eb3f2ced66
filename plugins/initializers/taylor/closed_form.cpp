#include "plugins/initializers/taylor/closed_form.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "plugins/initializers/projection_copy/projections.h"
#include "plugins/initializers/taylor/attention_statistics.h"
#include "plugins/initializers/taylor/least_squares.h"
#include "plugins/initializers/taylor/output_gate.h"

namespace graft::taylor {
namespace {

using sdk::cat;
using sdk::Status;
using sdk::StudentParam;

// What the Gram matrices of the gate's regression may take, one [model + 1, model + 1] per head:
// beyond it, the heads go in groups, each with its own passes over the text.
constexpr int64_t kGateGramBytes = int64_t{1} << 30;
// What may be kept of that regression's inputs between its passes.
constexpr int64_t kGateInputBytes = int64_t{256} << 20;
// Keeps the weight of a residual that is (nearly) zero finite.
constexpr double kLeastResidual = 1e-12;

// Runs one step and says which it was when its regression cannot be solved.
template <class Step>
auto solving(const char* step, const char* option, Step&& solve) {
  try {
    return solve();
  } catch (const Unsolvable& error) {
    throw Status(GRAFT_FAILED_PRECONDITION, cat("step:", step),
                 cat(error.what(), " (option ", option, ")"));
  }
}

std::string span_of(const std::vector<double>& values) {
  std::vector<double> sorted = values;
  std::ranges::sort(sorted);
  return cat(sorted.front(), "..", sorted.back(), " (median ", sorted[sorted.size() / 2], ")");
}

void write(const StudentParam& param, const at::Tensor& value) {
  borrow(param.tensor(), param.name()).copy_(value);
  param.mark_written();
}

// Every pair of the two lists, the same for all heads.
std::vector<Dynamics> pairs(const std::vector<double>& lives, const std::vector<double>& betas,
                            std::size_t heads) {
  std::vector<Dynamics> points;
  for (const double life : lives) {
    for (const double beta : betas) {
      points.push_back({std::vector(heads, life), std::vector(heads, beta)});
    }
  }
  return points;
}

// The half-life `steps` further in the ascending list than `life`, as far as there is one.
double neighbour(const std::vector<double>& ascending, double life, std::ptrdiff_t steps) {
  const auto at = std::ranges::lower_bound(ascending, life) - ascending.begin();
  const auto last = static_cast<std::ptrdiff_t>(ascending.size()) - 1;
  return ascending[static_cast<std::size_t>(std::clamp<std::ptrdiff_t>(at + steps, 0, last))];
}

}  // namespace

ClosedForm::ClosedForm(const Options& options, sdk::InitArgs& args)
    : options_(options),
      args_(args),
      heads_(args.student(GRAFT_ROLE_OUTPUT).heads()),
      model_(args.student(GRAFT_ROLE_OUTPUT).shape()[0]) {}

void ClosedForm::run() {
  projections::copy_projections(args_);
  open_output_gate();
  choose_dynamics();
  regress_gate();
  solve_output();
  if (!summary_.empty()) note(GRAFT_LOG_INFO, summary_);
}

void ClosedForm::report(const std::string& figure) {
  summary_ += cat(summary_.empty() ? "" : ", ", figure);
}

void ClosedForm::note(int32_t level, const std::string& text) const {
  sdk::log(level, cat("layer ", args_.layer().layer, ": ", text));
}

void ClosedForm::set_all_heads(const char* what, double value) {
  args_.set_natural(what, std::vector<double>(static_cast<std::size_t>(heads_), value));
}

// A constant gate for the regressions before its own.
void ClosedForm::open_output_gate() {
  const StudentParam* const weight = args_.find_student(GRAFT_ROLE_OUTPUT_GATE);
  open_gate_ = open_gate(weight == nullptr ? "" : weight->domain());
  const std::vector<double> open(static_cast<std::size_t>(heads_), open_gate_);
  if (args_.set_natural(GRAFT_NATURAL_OUTPUT_GATE, open) || weight == nullptr) return;
  ungated_ = Ungated::normalised_head_output;
  note(GRAFT_LOG_INFO,
       "the mixer cannot hold its output gate constant; its output is read before the gate");
}

at::Tensor ClosedForm::normalised_head_output(const BatchView& batch, bool with_norm_weight) {
  at::Tensor o = by_head(batch.cut(args_.probe(GRAFT_TAP_HEAD_OUTPUT), GRAFT_TAP_HEAD_OUTPUT));
  const StudentParam* const norm = args_.find_student(GRAFT_ROLE_NORM);
  if (norm == nullptr) return o;
  o = o * (o.square().mean(-1, true) + args_.layer().norm_eps).rsqrt();
  if (!with_norm_weight) return o;
  const at::Tensor weight = borrow(norm->tensor(), norm->name()).reshape({-1, 1, o.size(2)});
  return o * weight;  // [1 or heads, 1, dim]
}

at::Tensor ClosedForm::ungated(const BatchView& batch) {
  if (ungated_ == Ungated::normalised_head_output) return normalised_head_output(batch, true);
  const at::Tensor z = batch.cut(args_.probe(GRAFT_TAP_PRE_OUTPUT), GRAFT_TAP_PRE_OUTPUT);
  return by_head(z.reshape({z.size(0), z.size(1), heads_, -1})) / open_gate_;
}

// ---------------------------------------------------------------- decay and write gate

void ClosedForm::choose_dynamics() {
  const std::vector<double> lives(static_cast<std::size_t>(heads_), options_.half_lives.front());
  const std::vector<double> betas(static_cast<std::size_t>(heads_), options_.betas.front());
  const bool has_decay = args_.set_natural(GRAFT_NATURAL_HALF_LIFE, lives);
  const bool has_write_gate = args_.set_natural(GRAFT_NATURAL_WRITE_GATE, betas);
  if (!has_decay) note(GRAFT_LOG_INFO, "the mixer has no constant decay to set: left as it is");
  if (!has_write_gate) {
    note(GRAFT_LOG_INFO, "the mixer has no constant write gate to set: left as it is");
  }
  if (!has_decay && !has_write_gate) return;
  if (options_.searches()) {
    search_dynamics(has_decay, has_write_gate);
  } else {
    set_from_attention(has_decay, has_write_gate);
  }
}

void ClosedForm::set_dynamics(const Dynamics& dynamics) {
  // A mixer that lacks one of them has said so already.
  args_.set_natural(GRAFT_NATURAL_HALF_LIFE, dynamics.half_lives);
  args_.set_natural(GRAFT_NATURAL_WRITE_GATE, dynamics.write_gates);
}

// Runs every point through the mixer; each head keeps the one with the smallest residual of its
// context, the present best included; the earlier one where several tie.
void ClosedForm::improve(const std::vector<Dynamics>& points, Choice& best) {
  std::vector<LeastSquares> fits;
  for_sequences(args_, options_.grid_sequences, GRAFT_SIGNAL_HEAD_CONTEXT,
                [&](const BatchView& batch) {
                  const at::Tensor context = by_head(batch.signal(GRAFT_SIGNAL_HEAD_CONTEXT));
                  for (std::size_t c = 0; c < points.size(); ++c) {
                    set_dynamics(points[c]);
                    const at::Tensor z = normalised_head_output(batch, false);
                    // float32: one set of Gram matrices for each point is the largest thing here.
                    if (fits.size() <= c)
                      fits.emplace_back(heads_, z.size(2), context.size(2), at::kFloat);
                    fits[c].add(z, context);
                  }
                });
  for (std::size_t c = 0; c < fits.size(); ++c) {
    const at::Tensor residual = solving("grid", "grid_ridge", [&] {
      return fits[c].relative_residual(fits[c].solve(options_.grid_ridge));
    });
    const auto values = residual.accessor<double, 1>();
    for (std::size_t h = 0; h < best.residuals.size(); ++h) {
      const double value = values[static_cast<int64_t>(h)];
      if (value >= best.residuals[h] || !std::isfinite(value)) continue;
      best.residuals[h] = value;
      best.dynamics.half_lives[h] = points[c].half_lives[h];
      best.dynamics.write_gates[h] = points[c].write_gates[h];
    }
  }
}

void ClosedForm::search_dynamics(bool has_decay, bool has_write_gate) {
  const auto heads = static_cast<std::size_t>(heads_);
  std::vector<double> lives = options_.half_lives, betas = options_.betas;
  std::ranges::sort(lives);
  if (!has_decay) lives.resize(1);
  if (!has_write_gate) betas.resize(1);
  Choice best{{std::vector(heads, lives.front()), std::vector(heads, betas.front())},
              std::vector(heads, std::numeric_limits<double>::infinity())};
  if (options_.decay == "grid") {
    improve(pairs(lives, betas, heads), best);
  } else {
    improve(pairs(lives, {has_write_gate ? options_.beta : betas.front()}, heads), best);
    if (betas.size() > 1) {
      std::vector<Dynamics> points;
      for (const double beta : betas)
        points.push_back({best.dynamics.half_lives, std::vector(heads, beta)});
      improve(points, best);
    }
    if (betas.size() > 1 && lives.size() > 1) {
      std::vector<Dynamics> points(2, best.dynamics);
      for (std::size_t h = 0; h < heads; ++h) {
        points[0].half_lives[h] = neighbour(lives, best.dynamics.half_lives[h], -1);
        points[1].half_lives[h] = neighbour(lives, best.dynamics.half_lives[h], +1);
      }
      improve(points, best);
    }
  }
  set_dynamics(best.dynamics);
  if (has_decay) report(cat("half-life ", span_of(best.dynamics.half_lives)));
  if (has_write_gate) report(cat("write gate ", span_of(best.dynamics.write_gates)));
  report(cat("context error ", span_of(best.residuals)));
}

void ClosedForm::set_from_attention(bool has_decay, bool has_write_gate) {
  if (has_write_gate) set_all_heads(GRAFT_NATURAL_WRITE_GATE, options_.beta);
  if (!has_decay) return;
  AttentionStatistics statistics(heads_);
  for_sequences(args_, options_.statistics_sequences, GRAFT_SIGNAL_ATTENTION_PROBS,
                [&](const BatchView& batch) { add_attention(batch, heads_, statistics); });
  const std::vector<double> lives =
      options_.decay == "median"
          ? (options_.exclude_sink ? statistics.median_distance_without_sink()
                                   : statistics.median_distance())
          : (options_.exclude_sink ? statistics.mean_distance_without_sink()
                                   : statistics.mean_distance());
  args_.set_natural(GRAFT_NATURAL_HALF_LIFE, lives);
  report(cat("half-life ", span_of(lives)));
}

// ---------------------------------------------------------------- output gate

void ClosedForm::regress_gate() {
  const StudentParam* const weight = args_.find_student(GRAFT_ROLE_OUTPUT_GATE);
  const StudentParam* const bias = args_.find_student(GRAFT_ROLE_OUTPUT_GATE_BIAS);
  if (weight == nullptr || options_.gate_rounds == 0) return;
  const auto shape = weight->shape();
  if (!is_gate_domain(weight->domain()) || shape.size() != 2 || shape[0] % heads_ != 0 ||
      shape[1] != model_) {
    note(GRAFT_LOG_WARN, cat("the output gate ", weight->name(), " (domain '", weight->domain(),
                             "', shape ", sdk::shape_string(shape),
                             ") is no function of the block's input that can be regressed: "
                             "left as it is"));
    return;
  }
  const int64_t group =
      std::clamp<int64_t>(kGateGramBytes / (4 * (model_ + 1) * (model_ + 1)), 1, heads_);
  // Written only when all groups are done: a pass must see the gate at 1.
  GateRows fitted;
  for (int64_t first = 0; first < heads_; first += group) {
    fit_gate(first, std::min(group, heads_ - first), weight->domain(), fitted);
  }
  const auto per_row = [&](const std::vector<at::Tensor>& parts) {
    return at::cat(parts).repeat_interleave(shape[0] / heads_, 0);
  };
  gate_inputs_.clear();
  write(*weight, per_row(fitted.weights));
  if (bias != nullptr) write(*bias, per_row(fitted.biases).reshape(bias->shape()));
}

// The gate's regression reads the same inputs several times: they are kept from the first pass when
// they are small, and probed anew in each pass when they are not.
void ClosedForm::for_gate_inputs(const std::function<void(const GateInputs&)>& body) {
  if (!gate_inputs_.empty()) {
    for (const GateInputs& inputs : gate_inputs_) body(inputs);
    return;
  }
  int64_t bytes = 0;
  std::vector<GateInputs> kept;
  for_sequences(
      args_, options_.context_sequences, GRAFT_SIGNAL_HEAD_CONTEXT, [&](const BatchView& batch) {
        const GateInputs inputs{batch.signal(GRAFT_SIGNAL_BLOCK_INPUT).reshape({-1, model_}),
                                ungated(batch), by_head(batch.signal(GRAFT_SIGNAL_HEAD_CONTEXT))};
        body(inputs);
        bytes += 4 * (inputs.x.numel() + inputs.z.numel() + inputs.c.numel());
        // The batch is the host's and ends with the callback; any of these may be a view of it.
        if (bytes <= kGateInputBytes)
          kept.push_back({inputs.x.clone(), inputs.z.clone(), inputs.c.clone()});
      });
  if (bytes <= kGateInputBytes) gate_inputs_ = std::move(kept);
}

void ClosedForm::fit_gate(int64_t first, int64_t count, std::string_view domain, GateRows& out) {
  GateRegression::Options options{options_.gate_map_ridge,
                                  options_.gate_ridge,
                                  {options_.gate_least, options_.gate_most},
                                  args_.find_student(GRAFT_ROLE_OUTPUT_GATE_BIAS) != nullptr};
  std::optional<GateRegression> regression;
  const auto pass = [&](auto accumulate) {
    for_gate_inputs([&](const GateInputs& inputs) {
      const at::Tensor z = inputs.z.narrow(0, first, count), c = inputs.c.narrow(0, first, count);
      if (!regression) regression.emplace(count, model_, z.size(2), c.size(2), domain, options);
      accumulate(inputs.x, z, c);
    });
  };
  for (int64_t round = 0; round < options_.gate_rounds; ++round) {
    pass([&](const auto& x, const auto& z, const auto& c) { regression->accumulate_map(x, z, c); });
    solving("output gate's map", "gate_map_ridge", [&] { regression->end_map(); });
    pass(
        [&](const auto& x, const auto& z, const auto& c) { regression->accumulate_gate(x, z, c); });
    solving("output gate", "gate_ridge", [&] { regression->end_gate(); });
  }
  out.weights.push_back(regression->weight());
  out.biases.push_back(regression->bias());
}

// ---------------------------------------------------------------- output projection

at::Tensor ClosedForm::token_weights(const BatchView& batch) const {
  if (options_.token_weight == "none" || !batch.has(GRAFT_SIGNAL_RESIDUAL)) return {};
  const at::Tensor residual = batch.signal(GRAFT_SIGNAL_RESIDUAL);
  at::Tensor weight = residual.square().sum(-1).clamp_min(kLeastResidual).reciprocal();
  if (args_.layer().layer < options_.position0_layers && weight.size(1) > 0) {
    weight.select(1, 0).mul_(1 + options_.position0_weight);
  }
  return weight.reshape({-1});
}

at::Tensor ClosedForm::output_target(const BatchView& batch) const {
  const at::Tensor y = batch.signal(GRAFT_SIGNAL_BLOCK_OUTPUT).reshape({-1, model_});
  const StudentParam* const bias = args_.find_student(GRAFT_ROLE_OUTPUT_BIAS);
  return bias == nullptr ? y : y - borrow(bias->tensor(), bias->name());
}

at::Tensor ClosedForm::folded_prior(const at::Tensor& maps) const {
  const sdk::NamedTensor& teacher = args_.teacher(GRAFT_ROLE_OUTPUT);
  const at::Tensor projection = borrow(teacher.tensor(), teacher.name()).to(at::kDouble);
  const at::Tensor by_heads =
      projection.t().reshape({heads_, -1, model_});  // [H, d_v, model], W_o of each head transposed
  return at::bmm(maps, by_heads).reshape({-1, model_});
}

void ClosedForm::solve_output() {
  if (!options_.head_prior && !options_.solve_output) return;
  std::optional<LeastSquares> prior, output;
  int64_t context_left = options_.context_sequences == 0 ? std::numeric_limits<int64_t>::max()
                                                         : options_.context_sequences;
  const int64_t limit = options_.solve_output ? 0 : options_.context_sequences;
  const char* const limited =
      options_.solve_output ? GRAFT_SIGNAL_BLOCK_OUTPUT : GRAFT_SIGNAL_HEAD_CONTEXT;
  for_sequences(args_, limit, limited, [&](const BatchView& batch) {
    const at::Tensor z = batch.cut(args_.probe(GRAFT_TAP_PRE_OUTPUT), GRAFT_TAP_PRE_OUTPUT);
    const bool has_context = batch.has(GRAFT_SIGNAL_HEAD_CONTEXT) || !prior;
    const int64_t with_context = has_context ? std::min(context_left, batch.sequences()) : 0;
    if (options_.head_prior && with_context > 0) {
      context_left -= with_context;
      const at::Tensor c = by_head(batch.first(with_context).signal(GRAFT_SIGNAL_HEAD_CONTEXT));
      const at::Tensor z_heads =
          by_head(z.narrow(0, 0, with_context).reshape({with_context, z.size(1), heads_, -1}));
      if (!prior) prior.emplace(heads_, z_heads.size(2), c.size(2));
      prior->add(z_heads, c);
    }
    if (options_.solve_output) {
      if (!output) output.emplace(1, z.size(2), model_);
      output->add(z.reshape({1, -1, z.size(2)}), output_target(batch).unsqueeze(0),
                  token_weights(batch));
    }
  });
  at::Tensor solution;  // [H * d, model]
  if (prior) {
    solution = solving("head prior", "prior_ridge",
                       [&] { return folded_prior(prior->solve(options_.prior_ridge)); });
  }
  if (output) {
    const at::Tensor toward = solution.defined() ? solution.unsqueeze(0) : at::Tensor();
    solution = solving("output projection", "output_ridge",
                       [&] { return output->solve(options_.output_ridge, toward); });
    report(cat("output error ", output->relative_residual(solution).item<double>()));
    solution = solution.squeeze(0);
  }
  const StudentParam& projection = args_.student(GRAFT_ROLE_OUTPUT);
  write(projection, solution.t());
}

}  // namespace graft::taylor
