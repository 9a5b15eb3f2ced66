// The Gated DeltaNet block as a graft mixer.
#pragma once

#include <string_view>

#include "gdn_block.h"
#include "graft/torch_mixer.hpp"

namespace graft::gdn {

class GatedDeltaNet final : public sdk::TorchMixer {
 public:
  GatedDeltaNet(const sdk::LayerInfo& layer, const sdk::Config& config);

  static sdk::Description describe();

  void param_specs(sdk::ParamSpecs& specs) override;
  void tensors(const graft_plan_in& in, sdk::Plan& plan) override;
  sdk::TorchOutput compute(const sdk::TorchInput& in) override;
  void set_natural(std::string_view what, std::span<const double> values,
                   sdk::NaturalParams& params) override;

 private:
  void set_half_life(std::span<const double> values, sdk::NaturalParams& params) const;
  void set_write_gate(std::span<const double> values, sdk::NaturalParams& params) const;
  void set_output_gate(std::span<const double> values, sdk::NaturalParams& params) const;

  const BlockOptions options_;
};

}  // namespace graft::gdn
