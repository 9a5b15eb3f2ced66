#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/abi/component.h"
#include "core/student/torch_abi.h"

namespace graft {

// A parameter of a mixer: what the plugin declared, and the tensor the host owns for it.
struct MixerParameter {
  std::string name;  // the checkpoint key below the layer, e.g. "q_proj.weight"
  std::string role;
  const graft_param_spec* spec;  // the plugin's; lives as long as the mixer
  at::Tensor tensor;             // float32, contiguous
};

// A mixer's recurrent state for a batch, in plan order. Its size does not depend on the tokens
// seen.
using MixerState = std::vector<at::Tensor>;

struct MixerOutput {
  at::Tensor y;                  // [B,T,model]
  std::vector<at::Tensor> taps;  // in the order they were asked for
};

// A mixer plugin's instance with everything the host owns for it: parameters, states, workspace.
// Not thread-safe.
class TokenMixer {
 public:
  // Parameters start as the plugin's specs say, drawn from `seed`; the same seed gives the same
  // bytes.
  TokenMixer(std::shared_ptr<Mixer> plugin, std::uint64_t seed);

  // Own parameters, the same plugin instance.
  std::shared_ptr<TokenMixer> clone() const;
  // The same parameters, a plugin instance of its own: for a second thread.
  std::shared_ptr<TokenMixer> replica() const;

  Mixer& plugin() const { return *plugin_; }
  const std::vector<MixerParameter>& parameters() const { return parameters_; }
  std::vector<at::Tensor> parameter_tensors() const;
  // Throws Error(input) naming parameter, expected and got shape.
  void load_parameter(const std::string& name, const at::Tensor& value);

  std::vector<std::string> tap_names();

  // x [B,T,model] -> y, under autograd when x or a parameter requires it. pad_mask [B,T] u8 (1 =
  // real) and positions [B,T] i64 may be undefined. Taps by name; Error(plugin) names an unknown
  // one and those there are.
  MixerOutput forward(const at::Tensor& x, const at::Tensor& positions = {},
                      const at::Tensor& pad_mask = {}, const std::vector<std::string>& taps = {});

  // The taps alone, in the order they were asked for, without a graph: a mixer that can
  // (GRAFT_CAP_TAPS_ONLY) leaves out what only y needs.
  std::vector<at::Tensor> taps(const at::Tensor& x, const std::vector<std::string>& names);

  // Inference over x [B,T,model] that starts from `state` (empty = zero state) and leaves the new
  // state in it. T == 1 after a prefill runs the plugin's step().
  at::Tensor advance(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& pad_mask,
                     MixerState& state);

 private:
  friend class MixerFunction;
  friend struct MixerCall;
  struct Plan {
    std::uint64_t workspace_forward = 0, workspace_backward = 0, workspace_step = 0;
    struct Tensor {
      std::string name;
      std::vector<std::int64_t> shape;
      at::ScalarType dtype;
      at::Tensor allocate() const;
    };
    std::vector<Tensor> saved, state, taps;
  };
  TokenMixer() = default;
  // Plans the plugin for these sizes; forward, backward and step must follow the plan of their
  // sizes. Not cached: clones share the instance, so another's plan may stand between.
  Plan plan(std::int64_t batch, std::int64_t tokens, at::ScalarType dtype, bool training);
  MixerOutput infer(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& pad_mask,
                    const Plan& sizes, const std::vector<std::size_t>& wanted, bool want_y);
  graft_exec exec(std::uint64_t workspace_bytes, bool training);
  // The mask for a mixer that takes one; for another nothing, where all tokens are real.
  // Error(plugin) where some are not.
  at::Tensor usable_mask(const at::Tensor& pad_mask) const;
  std::vector<std::size_t> tap_indices(const Plan& plan,
                                       const std::vector<std::string>& names) const;

  std::shared_ptr<Mixer> plugin_;
  std::vector<MixerParameter> parameters_;
  Workspace workspace_;
};

// Fills a tensor as a parameter's spec says (GRAFT_INIT_*).
void fill_default(at::Tensor& tensor, const graft_param_spec& spec, std::uint64_t seed);

}  // namespace graft
