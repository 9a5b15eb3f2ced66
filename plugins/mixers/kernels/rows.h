// What stands around a mixer's recurrence, row by row: a row is one head of one token, contiguous,
// `dim` wide.
#pragma once

#include <cstdint>
#include <string_view>

namespace graft::kernels {

// silu, then RMSNorm, then rotation, then L2 normalisation, each where asked for.
template <class T>
struct FeatureRows {
  int64_t dim = 0;
  int64_t heads = 1;  // consecutive rows of one token
  bool silu = false;
  const T* norm_weight = nullptr;  // [dim]; nullptr: no RMSNorm
  T norm_eps = 0;
  // cos and sin [tokens, frequencies]: entry i rotates (x_i, x_{i + frequencies}); nullptr: no
  // rotation
  const T* cos = nullptr;
  const T* sin = nullptr;
  int64_t frequencies = 0;
  bool l2norm = false;  // x / sqrt(sum x^2 + l2_eps)
  T l2_eps = 0;
};

// out = RMSNorm(in) weight silu(gate)
template <class T>
struct GatedNormRows {
  int64_t dim = 0;
  const T* norm_weight = nullptr;  // [dim]; nullptr: no RMSNorm
  T norm_eps = 0;
  const T* gate = nullptr;  // [rows, dim]; nullptr: no gate
};

// Rows [begin, end). The backward forms add to d_norm_weight (where there is a norm) and write the
// rest; `scratch` has 4 * (dim + 64) elements.
template <class T>
struct RowKernels {
  void (*features)(const FeatureRows<T>&, int64_t begin, int64_t end, const T* in, T* out,
                   T* scratch);
  void (*features_backward)(const FeatureRows<T>&, int64_t begin, int64_t end, const T* in,
                            const T* d_out, T* d_in, T* d_norm_weight, T* scratch);
  void (*gated_norm)(const GatedNormRows<T>&, int64_t begin, int64_t end, const T* in, T* out,
                     T* scratch);
  void (*gated_norm_backward)(const GatedNormRows<T>&, int64_t begin, int64_t end, const T* in,
                              const T* d_out, T* d_in, T* d_gate, T* d_norm_weight, T* scratch);
};

struct Rowwise {
  const char* isa;
  RowKernels<float> f32;
  RowKernels<double> f64;

  template <class T>
  const RowKernels<T>& of() const;
};
template <>
inline const RowKernels<float>& Rowwise::of() const {
  return f32;
}
template <>
inline const RowKernels<double>& Rowwise::of() const {
  return f64;
}

// Of the instruction set that isa.h picks.
const Rowwise& rowwise();
// By name, or nullptr when it is unknown or this processor cannot run it.
const Rowwise* find_rowwise(std::string_view isa);

}  // namespace graft::kernels
