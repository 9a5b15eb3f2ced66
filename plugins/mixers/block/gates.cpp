#include "gates.h"

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace graft::mixers {
namespace {

constexpr int64_t kGateCost = 60;  // of a gate, in multiply-adds: exponentials and a logarithm

template <class T>
T softplus(T x) {
  return std::max(x, T(0)) + std::log1p(std::exp(-std::abs(x)));
}
template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

}  // namespace

template <class T>
void delta_gates(const DeltaGates<T>& gates, const Tokens& tokens, T* g, T* beta) {
  const int64_t heads = gates.heads;
  for_each_piece(
      tokens.count(), kGateCost * heads, [&](int64_t, int64_t begin, int64_t end, int64_t) {
        for (int64_t i = begin * heads; i < end * heads; ++i) {
          const int64_t h = i % heads;
          const bool real = tokens.real(i / heads);
          g[i] = real ? -std::exp(gates.A_log[h]) * softplus(gates.a[i] + gates.dt_bias[h]) : T(0);
          beta[i] = real ? sigmoid(gates.b[i]) : T(0);
        }
      });
}

template <class T>
void delta_gates_backward(const DeltaGates<T>& gates, const Tokens& tokens,
                          const DeltaGatesGradient<T>& d) {
  for_each_unit(gates.heads, kGateCost * tokens.count(), [&](int64_t h, int64_t) {
    const T factor = -std::exp(gates.A_log[h]);
    T d_scale = 0, d_bias = 0;
    for (int64_t n = 0; n < tokens.count(); ++n) {
      const int64_t i = n * gates.heads + h;
      if (!tokens.real(n)) {
        d.a[i] = d.b[i] = 0;
        continue;
      }
      const T before = gates.a[i] + gates.dt_bias[h], beta = sigmoid(gates.b[i]), d_g = d.g[i];
      d_scale += d_g * factor * softplus(before);
      d.a[i] = d_g * factor * sigmoid(before);
      d_bias += d.a[i];
      d.b[i] = d.beta[i] * beta * (T(1) - beta);
    }
    if (d.A_log != nullptr) d.A_log[h] = d_scale + (d.accumulate ? d.A_log[h] : T(0));
    if (d.dt_bias != nullptr) d.dt_bias[h] = d_bias + (d.accumulate ? d.dt_bias[h] : T(0));
  });
}

#define GRAFT_FOR_TYPE(T)                                                    \
  template void delta_gates<T>(const DeltaGates<T>&, const Tokens&, T*, T*); \
  template void delta_gates_backward<T>(const DeltaGates<T>&, const Tokens&, \
                                        const DeltaGatesGradient<T>&);
GRAFT_FOR_TYPE(float)
GRAFT_FOR_TYPE(double)
#undef GRAFT_FOR_TYPE

}  // namespace graft::mixers
