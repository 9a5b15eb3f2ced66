#include <algorithm>
#include <cmath>
#include <limits>

#include "gdn_mixer.h"
#include "natural.h"

namespace graft::gdn {

using mixers::all_are;
using mixers::check_head_count;
using mixers::check_range;
using mixers::fill;
using mixers::impossible;
using mixers::kSiluMinimum;
using mixers::set_silu_bias;

namespace {

// sigmoid and softplus reach their limits only at infinity; at 30 they are there to 1e-13.
constexpr double kFarOut = 30;

}  // namespace

// exp(g) = 2^{-1/half-life} with g = -exp(A_log) softplus(dt_bias): A_log = 0, a_proj = 0.
void GatedDeltaNet::set_half_life(std::span<const double> values,
                                  sdk::NaturalParams& params) const {
  check_range(GRAFT_NATURAL_HALF_LIFE, values, 1e-3, std::numeric_limits<double>::infinity());
  fill(params, "a_proj.weight", 0);
  fill(params, "A_log", 0);
  const auto raw = params.write("dt_bias");
  for (std::size_t h = 0; h < values.size(); ++h) {
    const double decay = std::log(2.0) / values[h];
    raw[h] = static_cast<float>(decay > 0 ? std::max(-kFarOut, mixers::softplus_inverse(decay))
                                          : -kFarOut);
  }
}

void GatedDeltaNet::set_write_gate(std::span<const double> values,
                                   sdk::NaturalParams& params) const {
  check_range(GRAFT_NATURAL_WRITE_GATE, values, 0, 1);
  if (!options_.write_gate_bias && !all_are(values, 0.5)) {
    impossible(GRAFT_NATURAL_WRITE_GATE,
               "without a bias the write gate can be constant at 0.5 only; set the option "
               "write_gate_bias");
  }
  fill(params, "b_proj.weight", 0);
  if (!options_.write_gate_bias) return;
  const auto raw = params.write("b_proj.bias");
  for (std::size_t h = 0; h < values.size(); ++h) {
    raw[h] = static_cast<float>(std::clamp(mixers::sigmoid_inverse(values[h]), -kFarOut, kFarOut));
  }
}

void GatedDeltaNet::set_output_gate(std::span<const double> values,
                                    sdk::NaturalParams& params) const {
  if (!options_.output_gate) {
    if (all_are(values, 1)) return;
    impossible(GRAFT_NATURAL_OUTPUT_GATE,
               "without an output gate the factor is 1 and stays so; set the option output_gate");
  }
  check_range(GRAFT_NATURAL_OUTPUT_GATE, values, kSiluMinimum, 1e4);
  if (!options_.output_gate_bias && !all_are(values, 0)) {
    impossible(GRAFT_NATURAL_OUTPUT_GATE,
               "without a bias the output gate can be constant at 0 only; set the option "
               "output_gate_bias");
  }
  fill(params, "g_proj.weight", 0);
  if (!options_.output_gate_bias) return;
  set_silu_bias(params, "g_proj.bias", values, options_.value_dim);
}

void GatedDeltaNet::set_natural(std::string_view what, std::span<const double> values,
                                sdk::NaturalParams& params) {
  check_head_count(what, values, options_.heads);
  if (what == GRAFT_NATURAL_HALF_LIFE) {
    set_half_life(values, params);
  } else if (what == GRAFT_NATURAL_WRITE_GATE) {
    set_write_gate(values, params);
  } else if (what == GRAFT_NATURAL_OUTPUT_GATE) {
    set_output_gate(values, params);
  } else {
    PlainMixer::set_natural(what, values, params);
  }
}

}  // namespace graft::gdn
