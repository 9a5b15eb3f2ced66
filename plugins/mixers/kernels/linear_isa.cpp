#include "linear-inl.h"

namespace graft::linear::GRAFT_ISA {

template <class T, class E>
inline constexpr HeadKernels<T, E> kHead = {scratch_size<T>, forward<T, E>, backward<T, E>,
                                            step<T, E>};

extern const Kernels kTable;
const Kernels kTable = {GRAFT_ISA_NAME, kHead<float, float>, kHead<double, double>,
                        kHead<float, bf16>};

}  // namespace graft::linear::GRAFT_ISA
