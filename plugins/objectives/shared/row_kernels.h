// Loops over a piece of a row of logits, vectorised for the instruction set of the machine.
#pragma once

#include <cstdint>

namespace graft::objectives {

// out[i] = the number stored as bfloat16 (float16) in in[i].
void from_bfloat16(const std::uint16_t* in, std::int64_t n, float* out);
void from_float16(const std::uint16_t* in, std::int64_t n, float* out);
// Rounded to the nearest, ties to even; beyond float16's range: infinite.
void to_bfloat16(const float* in, std::int64_t n, std::uint16_t* out);
void to_float16(const float* in, std::int64_t n, std::uint16_t* out);

// The largest number, NaN aside; -inf for n = 0.
float largest(const float* x, std::int64_t n);

// out[i] = (x[i] - shift) * factor
void shifted(const float* x, float shift, float factor, std::int64_t n, float* out);

// out[i] = exp(x[i]) for x <= 0, to 2 units in the last place; 0 below -87, where a float runs out
// of exponent; NaN stays NaN. Returns the sum.
double exponentials(const float* x, std::int64_t n, float* out);

// sum of w[i] (a[i] - b[i]); a term whose w is 0 is 0 whatever a and b are, infinities included.
double weighted_difference(const float* w, const float* a, const float* b, std::int64_t n);

// x[i] = floor where x[i] is -inf
void replace_minus_infinity(float* x, float floor, std::int64_t n);

// out[i] = factor x[i]
void scaled(const float* x, float factor, std::int64_t n, float* out);
// out[i] = fa a[i] - fb b[i]
void scaled_difference(const float* a, float fa, const float* b, float fb, std::int64_t n,
                       float* out);
// out[i] = factor w[i] (a[i] - b[i] - mean); 0 where w[i] is 0
void scaled_deviation(const float* w, float factor, const float* a, const float* b, float mean,
                      std::int64_t n, float* out);

}  // namespace graft::objectives
