// The row kernels of ../kernels/rows.h over all rows of a call, on the host's threads.
#pragma once

#include <cstdint>

#include "rows.h"

namespace graft::mixers {

// Scratch of one pass over rows of `dim`: elements for all lanes, and for the partial sums of the
// norm's gradient.
int64_t row_scratch_size(int64_t rows, int64_t dim);

// out may be in.
template <class T>
void features(const kernels::FeatureRows<T>& op, int64_t rows, const T* in, T* out, T* scratch);
// d_in may be d_out. d_norm_weight (+)= where not nullptr.
template <class T>
void features_backward(const kernels::FeatureRows<T>& op, int64_t rows, const T* in, const T* d_out,
                       T* d_in, bool accumulate, T* d_norm_weight, T* scratch);
// out may be in.
template <class T>
void gated_norm(const kernels::GatedNormRows<T>& op, int64_t rows, const T* in, T* out, T* scratch);
template <class T>
void gated_norm_backward(const kernels::GatedNormRows<T>& op, int64_t rows, const T* in,
                         const T* d_out, T* d_in, T* d_gate, bool accumulate, T* d_norm_weight,
                         T* scratch);

}  // namespace graft::mixers
