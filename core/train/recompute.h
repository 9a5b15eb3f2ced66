#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace graft {

// Activation checkpointing: fn(x) of which only x is kept; backward() computes fn(x) again, with
// its graph. fn must give the same result both times, and may use parameters that require a
// gradient: they receive it. The result requires a gradient in any case.
at::Tensor recompute(std::function<at::Tensor(const at::Tensor& x)> fn, const at::Tensor& x);

}  // namespace graft
