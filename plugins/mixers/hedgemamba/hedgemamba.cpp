// hedgemamba: a Mamba block whose state space model starts as the linearised attention.
#include <iterator>

#include "linear_mixer.h"
#include "mixer_options.h"

namespace graft::mixers {
namespace {

std::vector<sdk::Option> option_schema() {
  std::vector<sdk::Option> options = linear_option_schema();
  std::vector<sdk::Option> own = {
      sdk::Option::boolean("decay", true, "dt and A: input-dependent strength of writes and decay")
          .shapes(),
      sdk::Option::integer("short_conv", 4,
                           "width of the causal conv on q, k, v: 0 (none) or 2 to 8")
          .range(0, 8)
          .shapes(),
      sdk::Option::boolean("conv_bias", false, "bias of the short conv").shapes(),
      sdk::Option::boolean("output_gate", true, "silu gate on each head's output").shapes()};
  options.insert(options.end(), std::make_move_iterator(own.begin()),
                 std::make_move_iterator(own.end()));
  return options;
}

LinearBlockOptions block_options(const sdk::LayerInfo& layer, const sdk::Config& config) {
  LinearBlockOptions o = linear_block_options(layer, config);
  o.decay = config.get<bool>("decay");
  o.short_conv = short_conv_width(config);
  o.conv_bias = config.get<bool>("conv_bias");
  if (o.conv_bias && o.short_conv == 0)
    refuse_option("conv_bias", "there is no short conv to have a bias; set short_conv");
  o.output_gate = config.get<bool>("output_gate");
  return o;
}

class HedgeMamba final : public LinearMixer {
 public:
  HedgeMamba(const sdk::LayerInfo& layer, const sdk::Config& config)
      : LinearMixer(block_options(layer, config), config.get<bool>("recompute")) {}

  static sdk::Description describe() {
    sdk::Description d = describe_common();
    d.id = "org.graft.hedgemamba";
    d.alias = "hedgemamba";
    d.name = "HedgeMamba";
    d.citation = "https://arxiv.org/abs/2604.14191";
    d.description =
        "A Mamba block with Hedgehog's features as B and C: linear attention with decay, short "
        "conv "
        "and output gate";
    d.options = option_schema();
    return d;
  }
};

}  // namespace
}  // namespace graft::mixers

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.hedgemamba",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = "0.1.0",
                                             .license = "Apache-2.0"}),
                    graft::sdk::mixer<graft::mixers::HedgeMamba>())
