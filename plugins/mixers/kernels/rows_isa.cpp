#include "rows-inl.h"

namespace graft::kernels::GRAFT_ISA {

template <class T>
inline constexpr RowKernels<T> kRows = {features<T>, features_backward<T>, gated_norm<T>,
                                        gated_norm_backward<T>};

extern const Rowwise kTable;
const Rowwise kTable = {GRAFT_ISA_NAME, kRows<float>, kRows<double>};

}  // namespace graft::kernels::GRAFT_ISA
