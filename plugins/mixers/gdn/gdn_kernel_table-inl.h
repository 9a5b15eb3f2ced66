// The table of one instruction set; the last include of gdn_kernel_<isa>.cpp.
#pragma once

#include "gdn_kernel-inl.h"
#include "gdn_rows-inl.h"

namespace graft::gdn::GDN_ISA {

#define GDN_STRING_(x) #x
#define GDN_STRING(x) GDN_STRING_(x)

template <class T>
inline constexpr KernelSet<T> kSet = {
    {scratch_size<T>, forward<T>, backward<T>, step<T>},
    {features<T>, features_backward<T>, gated_norm<T>, gated_norm_backward<T>}};

extern const Kernels kKernels;
const Kernels kKernels = {GDN_STRING(GDN_ISA), kSet<float>, kSet<double>};

}  // namespace graft::gdn::GDN_ISA
