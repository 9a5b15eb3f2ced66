// Vectors of one instruction set. Everything in files called *-inl.h is compiled once per set, by
// files called *_isa.cpp, with these macros from CMake (graft_add_kernels):
//   GRAFT_ISA           the set and the namespace its code lies in: baseline, avx2, avx512
//   GRAFT_VECTOR_BYTES  its vector width
// Nothing of the standard library is used in them: an inline function compiled for a wide
// instruction set could be the copy that the linker keeps for the whole program.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace graft::kernels::GRAFT_ISA {
namespace {

template <class T>
inline constexpr int64_t kLanes = GRAFT_VECTOR_BYTES / static_cast<int64_t>(sizeof(T));

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef int32_t Lane;
  typedef float type __attribute__((vector_size(GRAFT_VECTOR_BYTES), aligned(4), may_alias));
  static constexpr float kSmallestNormal = __FLT_MIN__;
  static float exp(float x) { return __builtin_expf(x); }
};
template <>
struct VectorOf<double> {
  typedef int64_t Lane;
  typedef double type __attribute__((vector_size(GRAFT_VECTOR_BYTES), aligned(8), may_alias));
  static constexpr double kSmallestNormal = __DBL_MIN__;
  static double exp(double x) { return __builtin_exp(x); }
};
template <class T>
using Vector = typename VectorOf<T>::type;

// Whether the rows of such a matrix, or the numbers of such a row, are of type T themselves.
template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;

// ---- numbers as rows store them

template <class T>
inline T number(T x) {
  return x;
}
template <class T>
inline T number(bf16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}
template <class E, class T>
inline E stored(T x) {
  if constexpr (kSame<E, bf16>) {  // to the nearest, ties to even
    const auto bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded)};
  } else {
    return x;
  }
}

template <class T>
inline Vector<T>& vec(T* p) {
  return *reinterpret_cast<Vector<T>*>(p);
}
template <class T>
inline const Vector<T>& vec(const T* p) {
  return *reinterpret_cast<const Vector<T>*>(p);
}

// The lanes by `combine`, in halves: every lane ends up with all of them.
template <class T, class Combine>
[[gnu::always_inline]] inline Vector<T> folded(Vector<T> v, const Combine& combine) {
  typedef typename VectorOf<T>::Lane Lane;
  typedef Lane Lanes __attribute__((vector_size(GRAFT_VECTOR_BYTES)));
#pragma GCC unroll 4
  for (int64_t d = kLanes<T> / 2; d > 0; d /= 2) {
    Lanes partner;
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) partner[lane] = static_cast<Lane>(lane ^ d);
    v = combine(v, __builtin_shuffle(v, partner));
  }
  return v;
}
template <class T>
[[gnu::always_inline]] inline T sum(const Vector<T>& v) {
  return folded<T>(
      v, [](const Vector<T>& a, const Vector<T>& b)
             __attribute__((always_inline)) { return Vector<T>(a + b); })[0];
}
template <class T>
[[gnu::always_inline]] inline T largest(const Vector<T>& v) {
  return folded<T>(
      v, [](const Vector<T>& a, const Vector<T>& b)
             __attribute__((always_inline)) { return Vector<T>(a > b ? a : b); })[0];
}

// Rows are padded by zeros to whole vectors.
template <class T>
inline int64_t padded(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

template <class T>
inline T dot(int64_t n_padded, const T* a, const T* b) {
  Vector<T> total = {};
  for (int64_t c = 0; c < n_padded; c += kLanes<T>) total += vec(a + c) * vec(b + c);
  return sum<T>(total);
}

inline Vector<double> exp(const Vector<double>& x) {
  Vector<double> y;
  for (int64_t lane = 0; lane < kLanes<double>; ++lane) y[lane] = __builtin_exp(x[lane]);
  return y;
}

// exp(x) = 2^n exp(r), |r| <= ln(2)/2, with the polynomial of the Cephes library (expf): within 2
// units in the last place. Arguments are held inside [-87.3, 88], where 2^n and the result are
// normal numbers.
inline Vector<float> exp(const Vector<float>& given) {
  typedef int32_t Ints __attribute__((vector_size(GRAFT_VECTOR_BYTES)));
  constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  Vector<float> x = given > 88.0f ? Vector<float>{} + 88.0f : given;
  x = x < -87.3f ? Vector<float>{} - 87.3f : x;
  const Vector<float> shifted = x * 1.44269504088896341f + kRound;
  const Vector<float> n = shifted - kRound;
  const Vector<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector<float> p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints power = (reinterpret_cast<Ints>(shifted) << 23) + (127 << 23);
  return p * reinterpret_cast<Vector<float>>(power);
}

template <class T>
inline Vector<T> sigmoid(const Vector<T>& x) {
  return T(1) / (T(1) + exp(-x));
}

}  // namespace
}  // namespace graft::kernels::GRAFT_ISA
