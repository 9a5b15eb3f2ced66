#pragma once

#include <string>

#include "graft/graft.h"

namespace graft {

// GRAFT_HOST_STRICT=1 in the environment: checks that cost time, for the authors of plugins and of
// this host.
bool strict_mode();

// Checks that a tensor passed to a plugin is as the ABI promises (strides filled, byte_offset 0,
// 64-byte alignment). Throws Error(internal): the fault is ours.
void check_promised(const DLTensor* tensor, const std::string& what);

// Fills a CPU buffer, or the elements of a contiguous CPU tensor, with 0xFF: NaN in each float
// format, so that a result nobody wrote is seen.
void poison(void* memory, std::uint64_t bytes);
void poison(const DLTensor* tensor);

// The same for all tensors of a call.
void check_promised(const graft_mixer_forward& call, const std::string& what);
void poison_outputs(const graft_exec& exec, const graft_mixer_forward& call);
void poison_outputs(const graft_exec& exec, const graft_mixer_backward& call);
void poison_outputs(const graft_exec& exec, const graft_objective_args& call);

}  // namespace graft
