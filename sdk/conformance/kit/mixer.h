// A mixer under test, with everything the host owns for it. Every call checks what holds of any
// call: no byte around an output or the workspace was written, no input changed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kit/context.h"
#include "kit/random.h"
#include "kit/tensor.h"

namespace graft::conformance {

// A block of some teacher, small.
struct Layer {
  std::string name;
  std::vector<double> inv_freq;
  graft_layer_info info{};
  const graft_layer_info* c() const { return &info; }
};
// Model 12, 2 heads of 8, 1 key-value head, RoPE on 6 of 8 entries.
const Layer& small_layer();
// The small one; one with biases, parallel residual and no GQA (Pythia); with q/k norms (Qwen3);
// one head; without RoPE.
const std::vector<Layer>& all_layers();

struct MixerInputs {
  Tensor x;                                 // [B,T,model]
  std::vector<Tensor> params;               // in param_specs order
  std::vector<Tensor> state;                // empty: NULL, the zero state
  Tensor positions, pad_mask, seq_offsets;  // not there: NULL
  std::uint64_t flags = 0;                  // GRAFT_X_*
  bool want_state = true, want_taps = true;
  const DLTensor* x_view = nullptr;  // x's numbers with other strides, shown to the plugin instead

  std::int64_t batch() const { return x.shape()[0]; }
  std::int64_t tokens() const { return x.shape()[1]; }
  MixerInputs copy() const;
};
struct MixerOutputs {
  Tensor y;
  std::vector<Tensor> state, taps, saved;
};
struct Cotangents {
  Tensor dy;
  std::vector<Tensor> dstate, dtaps;    // empty: NULL
  std::vector<bool> frozen;             // per parameter; empty: none
  std::vector<Tensor> accumulate_onto;  // dparams before the call; empty: they are overwritten
  bool want_dx = true, want_dstate = true;
  bool want_dparams = true;           // false: the list is NULL
  const DLTensor* dy_view = nullptr;  // as x_view
};
struct Gradients {
  Tensor dx;
  std::vector<Tensor> dparams, dstate;  // not there: was not wanted
};

struct Plan {
  struct Spec {
    std::string name, axes;
    DLDataType dtype;
    std::vector<std::int64_t> shape;
  };
  std::vector<Spec> saved, state, taps;
  std::uint64_t workspace_forward = 0, workspace_backward = 0, workspace_step = 0;
};

class Mixer {
 public:
  // With the settings' options, and `more` over them. Skips where the mixer refuses this layer,
  // unless it is the small one.
  explicit Mixer(Context& context, const Layer& layer = small_layer(), const Options& more = {});
  // One that lies in no library.
  Mixer(Context& context, const graft_mixer_factory& factory, const Layer& layer,
        const Options& more = {});
  ~Mixer();
  Mixer(const Mixer&) = delete;
  Mixer& operator=(const Mixer&) = delete;

  graft_mixer* get() const { return handle_; }
  const Layer& layer() const { return layer_; }
  const std::vector<const graft_param_spec*>& specs() const { return specs_; }
  std::uint32_t n_params() const { return static_cast<std::uint32_t>(specs_.size()); }

  // Parameters are float64 where x is, float32 otherwise. Trainable ones at a random point near
  // their start.
  std::vector<Tensor> random_params(DLDataType x_dtype, Random& random) const;
  std::vector<Tensor> default_params(DLDataType x_dtype, Random& random) const;
  // Random x and parameters.
  MixerInputs random_inputs(std::int64_t batch, std::int64_t tokens, DLDataType dtype,
                            Random& random) const;

  // States of zero bytes: the start of a sequence.
  std::vector<Tensor> zero_state(std::int64_t batch, DLDataType dtype);

  // Fails where the plugin does. try_ gives the answer.
  Plan plan(std::int64_t batch, std::int64_t tokens, DLDataType dtype, std::uint64_t flags = 0);
  Outcome try_plan(std::int64_t batch, std::int64_t tokens, DLDataType dtype, std::uint64_t flags,
                   Plan* out);

  // Plans, allocates outputs (poisoned), calls, checks. The mixer has the state of a call of its
  // sizes afterwards.
  MixerOutputs forward(const MixerInputs& in);
  MixerOutputs step(const MixerInputs& in);
  // `kept`: what forward() of the same inputs (with GRAFT_X_TRAINING) gave.
  Gradients backward(const MixerInputs& in, const MixerOutputs& kept, const Cotangents& from);

  // For tests of wrong calls: the arguments of a right one, to be broken, then called.
  struct Call {
    std::vector<const DLTensor*> params, state_in;
    std::vector<DLTensor*> state_out, saved, taps;
    Tensor workspace;
    graft_exec exec{};
    graft_mixer_forward args{};
  };
  // `in` and `out` outlive the call; `workspace` bytes as the plan says.
  void fill(Call& call, const MixerInputs& in, MixerOutputs& out, const Plan& sizes,
            std::uint64_t workspace) const;
  MixerOutputs allocate(const MixerInputs& in, const Plan& sizes) const;
  Outcome try_forward(Call& call);

 private:
  MixerOutputs run(const MixerInputs& in, bool step);

  Context& context_;
  const Layer& layer_;
  graft_mixer* handle_ = nullptr;
  std::vector<const graft_param_spec*> specs_;
};

// The most exact type the component computes in: float64, else float32; skips without either.
DLDataType exact_dtype(const Context& context);
bool offers(const Context& context, DLDataType dtype);
// float64 and float32, or the one of them that it offers: what must hold to rounding is asked of
// both, since each may have code of its own. Skips without either.
std::vector<DLDataType> exact_dtypes(const Context& context);

}  // namespace graft::conformance
