#include "gdn_kernel-inl.h"

namespace graft::gdn::GRAFT_ISA {

template <class T>
inline constexpr HeadKernels<T> kHead = {scratch_size<T>, forward<T>, backward<T>, step<T>};

extern const Kernels kTable;
const Kernels kTable = {GRAFT_ISA_NAME, kHead<float>, kHead<double>};

}  // namespace graft::gdn::GRAFT_ISA
