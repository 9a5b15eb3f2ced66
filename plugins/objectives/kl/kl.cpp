// kl: how far the student's distribution over the next token is from the teacher's.
#include <graft/version.h>
#include <graft/plugin.hpp>

#include <optional>
#include <string>

#include "plugins/objectives/kl/kl_loss.h"
#include "plugins/objectives/shared/logit_rows.h"

namespace graft::kl {
namespace {

using objectives::LogitRows;
using objectives::RowLoss;
using objectives::TokenWeights;

enum Signal : std::size_t { kStudent, kTeacher, kMask, kWeight };

class Kl final : public sdk::Objective {
 public:
  explicit Kl(const sdk::Config& config)
      : options_{config.get<std::string>("direction") == "forward" ? Direction::forward
                                                                   : Direction::reverse,
                 config.get<double>("tau")} {}

  static sdk::Description describe() {
    return {.id = "org.graft.kl",
            .alias = "kl",
            .name = "Kullback-Leibler divergence",
            .version = GRAFT_VERSION_STRING,
            .license = "Apache-2.0",
            .citation = "https://arxiv.org/abs/1503.02531",
            .description =
                "Divergence of the student's next-token distribution from the "
                "teacher's, token by token.",
            .caps = GRAFT_CAP_PAD_MASK | GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_THREAD_INVARIANT,
            .options = {sdk::Option::string("direction", "forward",
                                            "forward: KL(teacher || student); reverse: "
                                            "KL(student || teacher)")
                            .one_of({"forward", "reverse"}),
                        sdk::Option::real("tau", 1.0,
                                          "temperature of both distributions; the loss is "
                                          "multiplied by tau^2")
                            .range(0.01, 1000.0)},
            .dtypes = {sdk::float32, sdk::bfloat16, sdk::float16}};
  }

  void needs(sdk::SignalNeeds& needs) override {
    needs.add(GRAFT_SIGNAL_STUDENT_LOGITS, /*want_grad=*/true);
    needs.add(GRAFT_SIGNAL_TEACHER_LOGITS);
    needs.add(GRAFT_SIGNAL_LOSS_MASK, false, /*optional=*/true);
    needs.add(GRAFT_SIGNAL_TOKEN_WEIGHT, false, /*optional=*/true);
  }

  std::uint64_t workspace(const sdk::ObjectiveArgs& args) override {
    return objectives::workspace_of(args.signal(kStudent));
  }

  void run(const graft_exec& exec, const sdk::ObjectiveArgs& args) override {
    const LogitRows student(args.signal(kStudent), GRAFT_SIGNAL_STUDENT_LOGITS);
    sdk::check_shape(args.signal(kTeacher), GRAFT_SIGNAL_TEACHER_LOGITS, student.shape());
    const LogitRows teacher(args.signal(kTeacher), GRAFT_SIGNAL_TEACHER_LOGITS);
    const std::optional<LogitRows> grad = objectives::gradient_rows(args.grad(kStudent), student);
    const TokenWeights weights(student, args.find_signal(kMask), args.find_signal(kWeight));
    const double total = weights.total([](std::int64_t) { return true; });

    const RowLoss sum = objectives::sum_rows(student, exec, [&](std::int64_t row) -> RowLoss {
      const double weight = weights[row];
      if (weight == 0) {
        if (grad) grad->write_zeros(row);
        return {};
      }
      return {weight * kl_row(options_, student, teacher, row, grad ? &*grad : nullptr,
                              args.grad_scale() * weight / total)};
    });
    objectives::write_loss(args.loss(), total > 0 ? sum.loss / total : 0);
    objectives::report_metric(args, GRAFT_METRIC_WEIGHT, total);
  }

 private:
  KlOptions options_;
};

}  // namespace
}  // namespace graft::kl

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.kl",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = GRAFT_VERSION_STRING,
                                             .license = "Apache-2.0"}),
                    graft::sdk::objective<graft::kl::Kl>())
