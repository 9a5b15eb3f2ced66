#include "plugins/initializers/taylor/output_gate.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>

namespace graft::taylor {
namespace {

// Converges to float32 rounding in fewer; the count is fixed so that the result does not depend on
// data.
constexpr int kNewtonSteps = 20;
// silu is flat near its minimum (u = -1.28): a slope below this would throw Newton far off.
constexpr double kLeastSlope = 0.2;
constexpr double kLeastEnergy = 1e-9;

at::Tensor silu_inverse(const at::Tensor& gate) {
  at::Tensor u = gate + 0.3;
  for (int i = 0; i < kNewtonSteps; ++i) {
    const at::Tensor sigmoid = u.sigmoid();
    const at::Tensor slope = (sigmoid * (1 + u * (1 - sigmoid))).clamp_min(kLeastSlope);
    u = u - (u * sigmoid - gate) / slope;
  }
  return u;
}

}  // namespace

bool is_gate_domain(std::string_view domain) {
  return domain.empty() || domain == "log" || domain == "logit" || domain == "silu-inv" ||
         domain == "softplus-inv";
}

double open_gate(std::string_view domain) { return domain == "logit" ? 0.5 : 1.0; }

at::Tensor gate_value(std::string_view domain, const at::Tensor& raw) {
  if (domain == "log") return raw.exp();
  if (domain == "logit") return raw.sigmoid();
  if (domain == "silu-inv") return at::silu(raw);
  if (domain == "softplus-inv") return at::softplus(raw);
  return raw;
}

at::Tensor gate_raw(std::string_view domain, const at::Tensor& gate) {
  if (domain == "log") return gate.log();
  if (domain == "logit") return gate.logit();
  if (domain == "silu-inv") return silu_inverse(gate);
  if (domain == "softplus-inv") return gate + (-(-gate).expm1()).log();
  return gate;
}

GateRegression::GateRegression(int64_t heads, int64_t model, int64_t z_dim, int64_t context_dim,
                               std::string_view domain, const Options& options)
    : domain_(domain),
      options_(options),
      map_(heads, z_dim, context_dim),
      gram_(at::zeros({heads, model + options.bias, model + options.bias}, at::kFloat)),
      moment_(at::zeros({heads, model + options.bias}, at::kFloat)) {
  // A sigmoid cannot reach 1: its raw value would grow without bound.
  if (domain_ == "logit") options_.limits.most = std::min(options_.limits.most, 0.98);
}

at::Tensor GateRegression::gated(const at::Tensor& x, const at::Tensor& z) const {
  if (!weight_.defined()) return z * open_gate(domain_);
  const at::Tensor raw = at::addmm(bias_.unsqueeze(1), weight_, x.t());
  return z * gate_value(domain_, raw).unsqueeze(-1);
}

void GateRegression::accumulate_map(const at::Tensor& x, const at::Tensor& z, const at::Tensor& c) {
  map_.add(gated(x, z), c);
}

void GateRegression::end_map() {
  maps_ = map_.solve(options_.map_ridge).to(at::kFloat);
  map_.clear();
}

void GateRegression::accumulate_gate(const at::Tensor& x, const at::Tensor& z,
                                     const at::Tensor& c) {
  const at::Tensor mapped = at::bmm(z, maps_);
  const at::Tensor energy = mapped.square().sum(-1);
  const at::Tensor best = ((mapped * c).sum(-1) / energy.clamp_min(kLeastEnergy))
                              .clamp(options_.limits.least, options_.limits.most);
  const at::Tensor raw = gate_raw(domain_, best);
  const at::Tensor inputs = options_.bias ? at::cat({x, at::ones({x.size(0), 1})}, 1) : x;
  const at::Tensor root = energy.sqrt();
  for (int64_t h = 0; h < z.size(0); ++h) {  // one head at a time: [N, model] is the largest buffer
    const at::Tensor weighted = inputs * root[h].unsqueeze(1);
    at::Tensor gram = gram_[h];
    add_gram(gram, weighted);
    moment_[h].addmv_(weighted.t(), raw[h] * root[h]);
  }
}

void GateRegression::end_gate() {
  const int64_t heads = gram_.size(0), model = gram_.size(1) - options_.bias;
  weight_ = at::zeros({heads, model}, at::kFloat);
  bias_ = at::zeros({heads}, at::kFloat);
  for (int64_t h = 0; h < heads; ++h) {
    at::Tensor gram = symmetric(gram_[h]).to(at::kDouble);
    const double mean = gram.diagonal().narrow(0, 0, model).mean().item<double>();
    if (mean == 0) continue;  // a head without output: its gate is left at f(0)
    gram.diagonal().add_(mean * options_.gate_ridge);
    const at::Tensor solution = spd_solve(gram, moment_[h].to(at::kDouble).unsqueeze(1)).squeeze(1);
    weight_[h].copy_(solution.narrow(0, 0, model));
    if (options_.bias) bias_[h].fill_(solution[model]);
  }
  gram_.zero_();
  moment_.zero_();
}

}  // namespace graft::taylor
