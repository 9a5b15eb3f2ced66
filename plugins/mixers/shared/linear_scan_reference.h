// linear_scan() written as its recurrence, one token at a time, in plain LibTorch operations: slow,
// readable, and what the chunked form is tested against. Gradients come from autograd.
#pragma once

#include "linear_scan.h"

namespace graft::mixers {

LinearScanResult linear_scan_reference(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& x, const at::Tensor& g,
                                       const at::Tensor& state);

}  // namespace graft::mixers
