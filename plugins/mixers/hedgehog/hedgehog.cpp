// hedgehog: linear attention with a learned feature map.
#include "linear_mixer.h"

namespace graft::mixers {
namespace {

class Hedgehog final : public LinearMixer {
 public:
  Hedgehog(const sdk::LayerInfo& layer, const sdk::Config& config)
      : LinearMixer(linear_block_options(layer, config), config.get<bool>("recompute")) {}

  static sdk::Description describe() {
    sdk::Description d = describe_common();
    d.id = "org.graft.hedgehog";
    d.alias = "hedgehog";
    d.name = "Hedgehog";
    d.citation = "https://arxiv.org/abs/2402.04347";
    d.description =
        "Linear attention whose feature map, the softmax of a learned projection of each query and "
        "key head, imitates the teacher's attention";
    d.options = linear_option_schema();
    return d;
  }
};

}  // namespace
}  // namespace graft::mixers

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.hedgehog",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = "0.1.0",
                                             .license = "Apache-2.0"}),
                    graft::sdk::mixer<graft::mixers::Hedgehog>())
