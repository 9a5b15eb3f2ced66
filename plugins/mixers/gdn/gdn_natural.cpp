#include <algorithm>
#include <cmath>
#include <limits>

#include "gdn_mixer.h"
#include "natural.h"

namespace graft::gdn {

using mixers::kSiluMinimum;
using sdk::cat;
using sdk::Status;

namespace {

[[noreturn]] void impossible(std::string_view what, const std::string& why) {
  throw Status(GRAFT_UNIMPLEMENTED, cat("natural:", what), why);
}
void check_range(std::string_view what, double value, double low, double high) {
  if (value >= low && value <= high) return;
  throw Status(GRAFT_OUT_OF_RANGE, cat("natural:", what),
               cat("expected a value from ", low, " to ", high, ", got ", value));
}

void zero(sdk::NaturalParams& params, std::string_view name) {
  const auto values = params.write(name);
  std::fill(values.begin(), values.end(), 0.0f);
}

bool all_are(std::span<const double> values, double wanted) {
  return std::all_of(values.begin(), values.end(), [&](double v) { return v == wanted; });
}

// sigmoid and softplus reach their limits only at infinity; at 30 they are there to 1e-13.
constexpr double kFarOut = 30;

}  // namespace

// exp(g) = 2^{-1/half-life} with g = -exp(A_log) softplus(dt_bias): A_log = 0, a_proj = 0.
void GatedDeltaNet::set_half_life(std::span<const double> values,
                                  sdk::NaturalParams& params) const {
  for (const double value : values) {
    check_range(GRAFT_NATURAL_HALF_LIFE, value, 1e-3, std::numeric_limits<double>::infinity());
  }
  zero(params, "a_proj.weight");
  zero(params, "A_log");
  const auto raw = params.write("dt_bias");
  for (std::size_t h = 0; h < values.size(); ++h) {
    const double decay = std::log(2.0) / values[h];
    raw[h] = static_cast<float>(decay > 0 ? std::max(-kFarOut, mixers::softplus_inverse(decay))
                                          : -kFarOut);
  }
}

void GatedDeltaNet::set_write_gate(std::span<const double> values,
                                   sdk::NaturalParams& params) const {
  for (const double value : values) check_range(GRAFT_NATURAL_WRITE_GATE, value, 0, 1);
  if (!options_.write_gate_bias && !all_are(values, 0.5)) {
    impossible(GRAFT_NATURAL_WRITE_GATE,
               "without a bias the write gate can be constant at 0.5 only; set the option "
               "write_gate_bias");
  }
  zero(params, "b_proj.weight");
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
  for (const double value : values)
    check_range(GRAFT_NATURAL_OUTPUT_GATE, value, kSiluMinimum, 1e4);
  if (!options_.output_gate_bias && !all_are(values, 0)) {
    impossible(GRAFT_NATURAL_OUTPUT_GATE,
               "without a bias the output gate can be constant at 0 only; set the option "
               "output_gate_bias");
  }
  zero(params, "g_proj.weight");
  if (!options_.output_gate_bias) return;
  const auto raw = params.write("g_proj.bias");
  const auto width = static_cast<std::size_t>(options_.value_dim);
  for (std::size_t h = 0; h < values.size(); ++h) {
    const auto value = static_cast<float>(mixers::silu_inverse(values[h]));
    std::fill_n(raw.begin() + static_cast<std::ptrdiff_t>(h * width), width, value);
  }
}

void GatedDeltaNet::set_natural(std::string_view what, std::span<const double> values,
                                sdk::NaturalParams& params) {
  if (values.size() != static_cast<std::size_t>(options_.heads)) {
    throw Status(GRAFT_INVALID_ARGUMENT, cat("natural:", what),
                 cat("expected ", options_.heads, " values, one a head, got ", values.size()));
  }
  if (what == GRAFT_NATURAL_HALF_LIFE) {
    set_half_life(values, params);
  } else if (what == GRAFT_NATURAL_WRITE_GATE) {
    set_write_gate(values, params);
  } else if (what == GRAFT_NATURAL_OUTPUT_GATE) {
    set_output_gate(values, params);
  } else {
    TorchMixer::set_natural(what, values, params);
  }
}

}  // namespace graft::gdn
