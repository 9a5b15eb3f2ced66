// The block of linear_block.h as a graft mixer: what hedgehog and hedgemamba are both made of.
#pragma once

#include <string_view>
#include <vector>

#include "graft/torch_mixer.hpp"
#include "linear_block.h"

namespace graft::mixers {

// The options both have, and what they mean for one layer. The latter throws sdk::Status with where
// = "config.<key>" for what cannot be built.
std::vector<sdk::Option> linear_option_schema();
LinearBlockOptions linear_block_options(const sdk::LayerInfo& layer, const sdk::Config& config);

class LinearMixer : public sdk::TorchMixer {
 public:
  LinearMixer(const LinearBlockOptions& options, bool recompute);

  // What both say of themselves but for name, options and citation.
  static sdk::Description describe_common();

  void param_specs(sdk::ParamSpecs& specs) override;
  void tensors(const graft_plan_in& in, sdk::Plan& plan) override;
  sdk::TorchOutput compute(const sdk::TorchInput& in) override;
  void set_natural(std::string_view what, std::span<const double> values,
                   sdk::NaturalParams& params) override;

 private:
  void set_half_life(std::span<const double> values, sdk::NaturalParams& params) const;
  void set_write_gate(std::span<const double> values, sdk::NaturalParams& params) const;
  void set_output_gate(std::span<const double> values, sdk::NaturalParams& params) const;

  const LinearBlockOptions options_;
};

}  // namespace graft::mixers
