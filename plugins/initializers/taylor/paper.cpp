#include "plugins/initializers/taylor/paper.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "plugins/initializers/projection_copy/projections.h"
#include "plugins/initializers/taylor/attention_statistics.h"
#include "plugins/initializers/taylor/calibration.h"

namespace graft::taylor {
namespace {

using sdk::cat;
using sdk::Status;
using sdk::StudentParam;

// The published constants.
constexpr double kLeastDecay = 1e-3, kMostDecay = 5.0;
constexpr double kLeastBeta = 0.3, kBetaRange = 0.4;
constexpr double kLeastEntropyRange = 1e-3;
constexpr double kLeastScale = 0.1, kMostScale = 10.0;
constexpr double kTiny = 1e-8;

const StudentParam& param_of_domain(const sdk::InitArgs& args, const char* role,
                                    std::initializer_list<std::string_view> domains) {
  const StudentParam& param = args.student(role);
  if (std::ranges::find(domains, param.domain()) != domains.end()) return param;
  std::string known;
  for (const auto domain : domains) known += cat(known.empty() ? "'" : " or '", domain, "'");
  throw Status(GRAFT_FAILED_PRECONDITION, cat("role:", role),
               cat("variant = paper expects the mixer's ", param.name(), " to be of domain ", known,
                   ", got '", param.domain(), "'; variant = closed_form works with any"));
}

at::Tensor view(const StudentParam& param) { return borrow(param.tensor(), param.name()); }

// One value for each head, repeated over the head's rows.
at::Tensor per_head_rows(const StudentParam& param, const at::Tensor& by_head_values) {
  const int64_t heads = by_head_values.size(0);
  const at::Tensor tensor = view(param);
  const bool of_these_heads =
      param.heads() == heads || (param.heads() == 0 && tensor.size(0) == heads);
  if (!of_these_heads || tensor.size(0) % heads != 0) {
    throw Status(GRAFT_FAILED_PRECONDITION, cat("role:", param.role()),
                 cat("variant = paper expects rows for ", heads, " heads, got ", param.heads(),
                     " heads and shape ", sdk::shape_string(param.shape()), " in the mixer's ",
                     param.name()));
  }
  return by_head_values.repeat_interleave(tensor.size(0) / heads);
}

// A = -1, and softplus(dt_bias) = ln 2 / distance: the state halves over the mean attention
// distance.
void set_decay(const sdk::InitArgs& args, const std::vector<double>& distance) {
  const StudentParam& scale = param_of_domain(args, GRAFT_ROLE_DECAY_SCALE, {"log", "neg-log"});
  const StudentParam& bias = param_of_domain(args, GRAFT_ROLE_DECAY_GATE_BIAS, {"softplus-inv"});
  std::vector<double> raw;
  for (const double d : distance) {
    const double decay = std::clamp(std::log(2.0) / d, kLeastDecay, kMostDecay);
    raw.push_back(decay + std::log(-std::expm1(-decay)));
  }
  view(scale).zero_();
  scale.mark_written();
  view(bias).copy_(per_head_rows(bias, at::tensor(raw, at::kDouble)));
  bias.mark_written();
}

// beta* = 0.3 for the head whose attention is widest, 0.7 for the most concentrated.
std::vector<double> write_gate_logits(const std::vector<double>& entropy) {
  const auto [least, most] = std::ranges::minmax(entropy);
  const double range = std::max(most - least, kLeastEntropyRange);
  std::vector<double> logits;
  for (const double e : entropy) {
    const double beta = kLeastBeta + kBetaRange * (1 - (e - least) / range);
    logits.push_back(std::log(beta / (1 - beta)));
  }
  return logits;
}

// Rows of the random projection scaled so that their mean |weight| is |logit| / sqrt(model). The
// sign of each weight stays random, so the gate's mean is not beta*: the published code does this.
void set_write_gate(const sdk::InitArgs& args, const std::vector<double>& entropy) {
  const StudentParam& gate = param_of_domain(args, GRAFT_ROLE_WRITE_GATE, {"logit"});
  const at::Tensor weight = view(gate);
  const at::Tensor logits =
      per_head_rows(gate, at::tensor(write_gate_logits(entropy), at::kDouble)).to(at::kFloat);
  const at::Tensor size = weight.abs().mean(1, true).clamp_min(kTiny);
  const double root = std::sqrt(static_cast<double>(weight.size(1)));
  weight.copy_((logits / root).unsqueeze(1) * weight / size);
  gate.mark_written();
}

struct Scales {
  at::Tensor inner, energy;  // <c, o> and <o, o> by head
  double context_rms_sum = 0;
  int64_t context_rows = 0;
};

// The head outputs are compared without the d_k^-1/2 of the mixer's query scale, as published.
Scales compare_outputs(const Options& options, sdk::InitArgs& args) {
  const int64_t heads = args.student(GRAFT_ROLE_OUTPUT).heads();
  const double unscale = std::sqrt(static_cast<double>(args.student(GRAFT_ROLE_QUERY).head_dim()));
  Scales scales{at::zeros({heads}, at::kDouble), at::zeros({heads}, at::kDouble)};
  for_sequences(args, options.statistics_sequences, GRAFT_SIGNAL_HEAD_CONTEXT,
                [&](const BatchView& batch) {
                  const at::Tensor context = batch.signal(GRAFT_SIGNAL_HEAD_CONTEXT);
                  const at::Tensor output =
                      batch.cut(args.probe(GRAFT_TAP_HEAD_OUTPUT), GRAFT_TAP_HEAD_OUTPUT) * unscale;
                  scales.inner += (context * output).sum({0, 1, 3}, false, at::kDouble);
                  scales.energy += output.square().sum({0, 1, 3}, false, at::kDouble);
                  const at::Tensor rms = context.square().mean(-1).sqrt();
                  scales.context_rms_sum += rms.sum(at::kDouble).item<double>();
                  scales.context_rows += rms.numel();
                });
  return scales;
}

// Least-squares factor of each head's values.
void scale_values(const sdk::InitArgs& args, const Scales& scales) {
  const StudentParam& value = args.student(GRAFT_ROLE_VALUE);
  const at::Tensor sigma =
      (scales.inner / scales.energy.clamp_min(kTiny)).clamp(kLeastScale, kMostScale);
  view(value).mul_(per_head_rows(value, sigma).to(at::kFloat).unsqueeze(1));
  value.mark_written();
}

double rms_of_silu_values(const Options& options, sdk::InitArgs& args) {
  const at::Tensor weight = view(args.student(GRAFT_ROLE_VALUE));
  double sum = 0;
  int64_t count = 0;
  for_sequences(
      args, options.statistics_sequences, GRAFT_SIGNAL_BLOCK_INPUT, [&](const BatchView& batch) {
        const at::Tensor x = batch.signal(GRAFT_SIGNAL_BLOCK_INPUT).reshape({-1, weight.size(1)});
        const at::Tensor v = at::silu(at::matmul(x, weight.t()));
        sum += v.square().sum(at::kDouble).item<double>();
        count += v.numel();
      });
  return std::sqrt(sum / static_cast<double>(count));
}

// g_proj = alpha v_proj, so that the gate is small but points where the values do.
void set_output_gate(const Options& options, sdk::InitArgs& args, const Scales& scales) {
  const StudentParam& gate = args.student(GRAFT_ROLE_OUTPUT_GATE);
  const StudentParam& value = args.student(GRAFT_ROLE_VALUE);
  if (!std::ranges::equal(gate.shape(), value.shape())) {
    throw Status(GRAFT_FAILED_PRECONDITION, cat("role:", gate.role()),
                 cat("variant = paper expects the shape of ", value.name(), ", ",
                     sdk::shape_string(value.shape()), ", got ", sdk::shape_string(gate.shape()),
                     " in the mixer's ", gate.name()));
  }
  const double context_rms = scales.context_rms_sum / static_cast<double>(scales.context_rows);
  const double value_rms = rms_of_silu_values(options, args);
  const double alpha = options.gate_damping * context_rms / std::max(value_rms, kTiny);
  view(gate).copy_(view(value) * alpha);
  gate.mark_written();
}

}  // namespace

void need_paper_roles(sdk::RoleNeeds& needs) {
  for (const char* role : {GRAFT_ROLE_DECAY_SCALE, GRAFT_ROLE_DECAY_GATE_BIAS,
                           GRAFT_ROLE_WRITE_GATE, GRAFT_ROLE_OUTPUT_GATE}) {
    needs.student(role);
  }
}

void run_paper(const Options& options, sdk::InitArgs& args) {
  projections::copy_projections(args);
  AttentionStatistics statistics(args.student(GRAFT_ROLE_OUTPUT).heads());
  for_sequences(args, options.statistics_sequences, GRAFT_SIGNAL_ATTENTION_PROBS,
                [&](const BatchView& batch) {
                  add_attention(batch, args.student(GRAFT_ROLE_OUTPUT).heads(), statistics);
                });
  set_decay(args, statistics.mean_distance());
  set_write_gate(args, statistics.entropy());
  const Scales scales = compare_outputs(options, args);
  scale_values(args, scales);
  set_output_gate(options, args, scales);
}

}  // namespace graft::taylor
