// taylor: fits a mixer to the teacher's attention block without a gradient step.
#include <ATen/core/grad_mode.h>
#include <graft/version.h>
#include <graft/plugin.hpp>

#include <algorithm>

#include "plugins/initializers/projection_copy/projections.h"
#include "plugins/initializers/taylor/closed_form.h"
#include "plugins/initializers/taylor/options.h"
#include "plugins/initializers/taylor/paper.h"

namespace graft::taylor {
namespace {

// The larger of two numbers of sequences, of which 0 means all.
int64_t more_sequences(int64_t a, int64_t b) { return a == 0 || b == 0 ? 0 : std::max(a, b); }

class Taylor final : public sdk::Initializer {
 public:
  explicit Taylor(const sdk::Config& config) : options_(config) {}

  static sdk::Description describe() {
    return {.id = "org.graft.taylor",
            .alias = "taylor",
            .name = "Taylor-Calibrate",
            .version = GRAFT_VERSION_STRING,
            .license = "Apache-2.0",
            .citation = "https://arxiv.org/abs/2606.16429",
            .description =
                "Fits decay, write gate, output gate and output projection to the teacher's "
                "attention by linear regression (closed_form), or sets them as Phase 1 "
                "of Taylor-Calibrate was published (paper).",
            .options = declare_options()};
  }

  void needs(sdk::RoleNeeds& needs) override {
    projections::need_projections(needs);
    if (options_.paper()) need_paper_roles(needs);
  }

  void calibration(sdk::CalibrationNeeds& needs) override {
    const auto count = [](int64_t sequences) { return static_cast<uint32_t>(sequences); };
    const int64_t statistics = options_.statistics_sequences;
    if (options_.wants_attention()) {
      needs.add(GRAFT_SIGNAL_ATTENTION_PROBS, true, count(statistics));
    }
    if (options_.paper()) {
      needs.add(GRAFT_SIGNAL_BLOCK_INPUT, true, count(statistics));
      needs.add(GRAFT_SIGNAL_HEAD_CONTEXT, true, count(statistics));
      return;
    }
    const int64_t contexts =
        options_.searches() ? more_sequences(options_.context_sequences, options_.grid_sequences)
                            : options_.context_sequences;
    needs.add(GRAFT_SIGNAL_BLOCK_INPUT);
    needs.add(GRAFT_SIGNAL_HEAD_CONTEXT, true, count(contexts));
    if (options_.solve_output) needs.add(GRAFT_SIGNAL_BLOCK_OUTPUT);
    if (options_.solve_output && options_.token_weight == "residual") {
      needs.add(GRAFT_SIGNAL_RESIDUAL, /*required=*/false);
    }
  }

  void run(const graft_exec&, sdk::InitArgs& args) override {
    if (!args.has_calibration()) {
      throw sdk::Status(GRAFT_FAILED_PRECONDITION, "calibration",
                        "taylor reads the teacher's attention on text and was given none; "
                        "projection_copy works without");
    }
    const at::NoGradGuard no_grad;
    if (options_.paper()) {
      run_paper(options_, args);
    } else {
      ClosedForm(options_, args).run();
    }
  }

 private:
  Options options_;
};

}  // namespace
}  // namespace graft::taylor

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.taylor",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = GRAFT_VERSION_STRING,
                                             .license = "Apache-2.0"}),
                    graft::sdk::initializer<graft::taylor::Taylor>())
