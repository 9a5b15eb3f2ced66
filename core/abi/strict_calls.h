#pragma once

#include <functional>
#include <span>
#include <string>

#include "graft/graft.h"

namespace graft {

// Calls into a plugin as strict mode makes them: the host's side of the contract is checked, then
// `call` is made on guarded copies, then the plugin's side is checked. What `call` throws goes
// through. `who` as in blame_plugin().

// What the tensors of a mixer's call must be like: its parameters and the plan in force.
struct MixerShapes {
  std::uint64_t caps;
  std::span<const graft_param_spec* const> params;
  std::span<const graft_tensor_spec*const> saved, state, taps;
};
using ForwardCall = std::function<void(const graft_exec&, const graft_mixer_forward&)>;
void strict_forward(const std::string& who, const MixerShapes& shapes, const graft_exec& exec,
                    const graft_mixer_forward& args, const ForwardCall& call);
using BackwardCall = std::function<void(const graft_exec&, const graft_mixer_backward&)>;
void strict_backward(const std::string& who, const MixerShapes& shapes, const graft_exec& exec,
                     const graft_mixer_backward& args, const BackwardCall& call);

// `params` in the order of their specs; all of them may be changed.
using ParamsCall = std::function<void(std::span<DLTensor* const>)>;
void strict_params(const std::string& who, std::span<const graft_param_spec* const> specs,
                   std::span<DLTensor* const> params, const ParamsCall& call);

using InitCall = std::function<void(const graft_exec&, const graft_init_args&)>;
void strict_initializer(const std::string& who, const graft_exec& exec, const graft_init_args& args,
                        const InitCall& call);

using ObjectiveCall = std::function<void(const graft_exec&, const graft_objective_args&)>;
void strict_objective(const std::string& who, std::span<const graft_signal_need> needs,
                      const graft_exec& exec, const graft_objective_args& args,
                      const ObjectiveCall& call);

}  // namespace graft
