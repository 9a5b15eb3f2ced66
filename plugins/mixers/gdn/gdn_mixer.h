// The Gated DeltaNet block as a graft mixer.
#pragma once

#include <string_view>

#include "gdn_block.h"
#include "plain_mixer.h"

namespace graft::gdn {

class GatedDeltaNet final : public mixers::PlainMixer {
 public:
  GatedDeltaNet(const sdk::LayerInfo& layer, const sdk::Config& config);

  static sdk::Description describe();

  void param_specs(sdk::ParamSpecs& specs) override;
  void forward(const graft_exec& exec, const graft_mixer_forward& call) override;
  void backward(const graft_exec& exec, const graft_mixer_backward& call) override;
  void step(const graft_exec& exec, const graft_mixer_forward& call) override;
  void set_natural(std::string_view what, std::span<const double> values,
                   sdk::NaturalParams& params) override;

 private:
  void set_half_life(std::span<const double> values, sdk::NaturalParams& params) const;
  void set_write_gate(std::span<const double> values, sdk::NaturalParams& params) const;
  void set_output_gate(std::span<const double> values, sdk::NaturalParams& params) const;

  void sizes(const graft_plan_in& in, sdk::Plan& plan) override;
  template <class T>
  BlockForward<T> block_call(const graft_mixer_forward& call, bool keep) const;
  template <class T>
  BlockBackward<T> block_call(const graft_exec& exec, const graft_mixer_backward& call) const;
  template <class T>
  BlockState<T> state_of(DLTensor* const* tensors) const;
  bool is_double() const { return sdk::same_dtype(planned_for().dtype, sdk::float64); }

  const BlockOptions options_;
  const bool recompute_;
  std::array<int64_t, kParams> param_index_{};  // in param_specs order; -1: there is none
};

}  // namespace graft::gdn
