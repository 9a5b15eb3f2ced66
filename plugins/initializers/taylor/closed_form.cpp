#include "plugins/initializers/taylor/closed_form.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
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

// One point of the grid; nothing where the mixer has no such quantity.
struct Candidate {
  std::optional<double> half_life, write_gate;
};

std::vector<Candidate> grid(const Options& options, bool has_decay, bool has_write_gate) {
  std::vector<Candidate> points;
  const std::size_t n_lives = has_decay ? options.half_lives.size() : 1;
  const std::size_t n_betas = has_write_gate ? options.betas.size() : 1;
  for (std::size_t i = 0; i < n_lives; ++i) {
    for (std::size_t j = 0; j < n_betas; ++j) {
      Candidate point;
      if (has_decay) point.half_life = options.half_lives[i];
      if (has_write_gate) point.write_gate = options.betas[j];
      points.push_back(point);
    }
  }
  return points;
}

// Of each head, the index of the candidate with the smallest residual; the first one where several
// tie or none is a number.
std::vector<std::size_t> best_candidates(const std::vector<LeastSquares>& fits, double ridge,
                                         std::vector<double>& residuals) {
  std::vector<std::size_t> best(residuals.size(), 0);
  std::ranges::fill(residuals, std::numeric_limits<double>::infinity());
  for (std::size_t c = 0; c < fits.size(); ++c) {
    const at::Tensor residual = fits[c].relative_residual(fits[c].solve(ridge));
    const auto values = residual.accessor<double, 1>();
    for (std::size_t h = 0; h < best.size(); ++h) {
      const double value = values[static_cast<int64_t>(h)];
      if (value < residuals[h]) {
        residuals[h] = value;
        best[h] = c;
      }
    }
  }
  return best;
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
  if (options_.decay == "grid") {
    search_grid(has_decay, has_write_gate);
  } else {
    set_from_attention(has_decay, has_write_gate);
  }
}

void ClosedForm::search_grid(bool has_decay, bool has_write_gate) {
  const std::vector<Candidate> points = grid(options_, has_decay, has_write_gate);
  std::vector<LeastSquares> fits;
  for_sequences(args_, options_.grid_sequences, GRAFT_SIGNAL_HEAD_CONTEXT,
                [&](const BatchView& batch) {
                  const at::Tensor context = by_head(batch.signal(GRAFT_SIGNAL_HEAD_CONTEXT));
                  for (std::size_t c = 0; c < points.size(); ++c) {
                    if (points[c].half_life)
                      set_all_heads(GRAFT_NATURAL_HALF_LIFE, *points[c].half_life);
                    if (points[c].write_gate)
                      set_all_heads(GRAFT_NATURAL_WRITE_GATE, *points[c].write_gate);
                    const at::Tensor z = normalised_head_output(batch, false);
                    // float32: one set of Gram matrices for each point is the largest thing here.
                    if (fits.size() <= c)
                      fits.emplace_back(heads_, z.size(2), context.size(2), at::kFloat);
                    fits[c].add(z, context);
                  }
                });
  std::vector<double> residuals(static_cast<std::size_t>(heads_));
  const auto best = solving("grid", "grid_ridge",
                            [&] { return best_candidates(fits, options_.grid_ridge, residuals); });
  std::vector<double> lives, betas;
  for (const std::size_t c : best) {
    lives.push_back(points[c].half_life.value_or(0));
    betas.push_back(points[c].write_gate.value_or(0));
  }
  if (has_decay) {
    args_.set_natural(GRAFT_NATURAL_HALF_LIFE, lives);
    report(cat("half-life ", span_of(lives)));
  }
  if (has_write_gate) {
    args_.set_natural(GRAFT_NATURAL_WRITE_GATE, betas);
    report(cat("write gate ", span_of(betas)));
  }
  report(cat("context error ", span_of(residuals)));
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
  write(*weight, per_row(fitted.weights));
  if (bias != nullptr) write(*bias, per_row(fitted.biases).reshape(bias->shape()));
}

void ClosedForm::fit_gate(int64_t first, int64_t count, std::string_view domain, GateRows& out) {
  GateRegression::Options options{options_.gate_map_ridge,
                                  options_.gate_ridge,
                                  {options_.gate_least, options_.gate_most},
                                  args_.find_student(GRAFT_ROLE_OUTPUT_GATE_BIAS) != nullptr};
  std::optional<GateRegression> regression;
  const auto pass = [&](auto accumulate) {
    for_sequences(
        args_, options_.context_sequences, GRAFT_SIGNAL_HEAD_CONTEXT, [&](const BatchView& batch) {
          const at::Tensor x = batch.signal(GRAFT_SIGNAL_BLOCK_INPUT).reshape({-1, model_});
          const at::Tensor z = ungated(batch).narrow(0, first, count);
          const at::Tensor c =
              by_head(batch.signal(GRAFT_SIGNAL_HEAD_CONTEXT)).narrow(0, first, count);
          if (!regression) regression.emplace(count, model_, z.size(2), c.size(2), domain, options);
          accumulate(x, z, c);
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
