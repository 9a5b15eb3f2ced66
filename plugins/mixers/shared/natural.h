// What mixers share of graft.mixer-domain/1: inverses of the gates' functions, checks, writing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "graft/plugin.hpp"

namespace graft::mixers {

// x with log(1 + exp(x)) = y; y > 0.
double softplus_inverse(double y);
// x with 1 / (1 + exp(-x)) = y; 0 < y < 1.
double sigmoid_inverse(double y);
// The larger x with x / (1 + exp(-x)) = y; y >= kSiluMinimum.
double silu_inverse(double y);

// silu's smallest value, which it takes at -1.278.
inline constexpr double kSiluMinimum = -0.27846454276107374;

// Throw sdk::Status with where = "natural:<what>": the mixer cannot hold that value, a value is out
// of range, there is not one value for each head.
[[noreturn]] void impossible(std::string_view what, const std::string& why);
void check_range(std::string_view what, std::span<const double> values, double low, double high);
void check_head_count(std::string_view what, std::span<const double> values, int64_t heads);

bool all_are(std::span<const double> values, double wanted);
void fill(sdk::NaturalParams& params, std::string_view name, double value);
// A silu gate's bias, `width` channels a head, to the head's gate.
void set_silu_bias(sdk::NaturalParams& params, std::string_view name, std::span<const double> gates,
                   int64_t width);

}  // namespace graft::mixers
