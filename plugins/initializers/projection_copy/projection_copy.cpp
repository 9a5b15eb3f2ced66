// projection_copy: the teacher's projections, and nothing learned about the mixer's own gates.
#include <graft/version.h>
#include <graft/plugin.hpp>

#include <algorithm>
#include <string>

#include "plugins/initializers/projection_copy/projections.h"

namespace graft {
namespace {

class ProjectionCopy final : public sdk::Initializer {
 public:
  explicit ProjectionCopy(const sdk::Config& config)
      : gates_(config.get<std::string>("gates")), small_(config.get<double>("small_scale")) {}

  static sdk::Description describe() {
    return {.id = "org.graft.projection-copy",
            .alias = "projection_copy",
            .name = "Projection copy",
            .version = GRAFT_VERSION_STRING,
            .license = "Apache-2.0",
            .citation = "https://arxiv.org/abs/2606.16429",
            .description =
                "Copies the query, key, value and output projections by role, repeating "
                "grouped-query heads; the gates stay random, zero or small.",
            .options = {sdk::Option::string("gates", "random",
                                            "output gate: random (the mixer's own start), zero "
                                            "(weight 0) or small (random x small_scale)")
                            .one_of({"random", "zero", "small"}),
                        sdk::Option::real("small_scale", 0.02,
                                          "factor of the output gate's weight with gates = small")
                            .at_least(0.0)}};
  }

  void needs(sdk::RoleNeeds& needs) override {
    projections::need_projections(needs);
    if (gates_ != "random") needs.student(GRAFT_ROLE_OUTPUT_GATE);
  }

  void run(const graft_exec&, sdk::InitArgs& args) override {
    projections::copy_projections(args);
    if (gates_ == "zero") zero_gate(args);
    if (gates_ == "small") scale_gate(args);
  }

 private:
  static void zero_gate(const sdk::InitArgs& args) {
    const sdk::StudentParam& gate = args.student(GRAFT_ROLE_OUTPUT_GATE);
    std::ranges::fill(gate.write(), 0.0F);
    const auto* const bias = args.find_student(GRAFT_ROLE_OUTPUT_GATE_BIAS);
    if (bias != nullptr) std::ranges::fill(bias->write(), 0.0F);
    if (!gate.domain().empty() && gate.domain() != "silu-inv") {
      sdk::log(GRAFT_LOG_WARN, sdk::cat("layer ", args.layer().layer, ": the gate of ", gate.name(),
                                        " (", gate.domain(), ") is not 0 where its weight is"));
    }
  }

  void scale_gate(const sdk::InitArgs& args) const {
    for (float& w : args.student(GRAFT_ROLE_OUTPUT_GATE).write()) {
      w = static_cast<float>(w * small_);
    }
  }

  std::string gates_;
  double small_;
};

}  // namespace
}  // namespace graft

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.projection-copy",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = GRAFT_VERSION_STRING,
                                             .license = "Apache-2.0"}),
                    graft::sdk::initializer<graft::ProjectionCopy>())
