// cross_entropy: the student's next-token distribution against the text.
#include <graft/version.h>
#include <graft/plugin.hpp>

#include <optional>
#include <string>

#include "plugins/objectives/cross_entropy/cross_entropy_loss.h"
#include "plugins/objectives/shared/logit_rows.h"

namespace graft::cross_entropy {
namespace {

using objectives::LogitRows;
using objectives::RowLoss;
using objectives::TokenWeights;

enum Signal : std::size_t { kStudent, kLabels, kMask, kWeight };

class CrossEntropy final : public sdk::Objective {
 public:
  explicit CrossEntropy(const sdk::Config& config)
      : ignore_index_(config.get<std::int64_t>("ignore_index")),
        z_weight_(config.get<double>("z_loss")) {}

  static sdk::Description describe() {
    return {.id = "org.graft.cross-entropy",
            .alias = "cross_entropy",
            .name = "Cross entropy",
            .version = GRAFT_VERSION_STRING,
            .license = "Apache-2.0",
            .citation = "https://arxiv.org/abs/2204.02311",
            .description =
                "Cross entropy of the student's next-token distribution with the "
                "labels, token by token.",
            .caps = GRAFT_CAP_PAD_MASK | GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_THREAD_INVARIANT,
            .options = {sdk::Option::integer("ignore_index", -100,
                                             "a token with this label does not count"),
                        sdk::Option::real("z_loss", 0.0,
                                          "weight of (log Z)^2, which keeps logits from drifting; "
                                          "1e-4 is common")
                            .at_least(0.0)},
            .dtypes = {sdk::float32, sdk::bfloat16, sdk::float16}};
  }

  void needs(sdk::SignalNeeds& needs) override {
    needs.add(GRAFT_SIGNAL_STUDENT_LOGITS, /*want_grad=*/true);
    needs.add(GRAFT_SIGNAL_LABELS);
    needs.add(GRAFT_SIGNAL_LOSS_MASK, false, /*optional=*/true);
    needs.add(GRAFT_SIGNAL_TOKEN_WEIGHT, false, /*optional=*/true);
  }

  std::uint64_t workspace(const sdk::ObjectiveArgs& args) override {
    return objectives::workspace_of(args.signal(kStudent));
  }

  void run(const graft_exec& exec, const sdk::ObjectiveArgs& args) override {
    const LogitRows student(args.signal(kStudent), GRAFT_SIGNAL_STUDENT_LOGITS);
    objectives::check_tokens(student, args.signal(kLabels), GRAFT_SIGNAL_LABELS);
    const auto labels = sdk::data<const std::int64_t>(args.signal(kLabels), GRAFT_SIGNAL_LABELS);
    const std::optional<LogitRows> grad = objectives::gradient_rows(args.grad(kStudent), student);
    const TokenWeights weights(student, args.find_signal(kMask), args.find_signal(kWeight));
    const auto label = [&](std::int64_t row) { return labels[static_cast<std::size_t>(row)]; };
    const auto counts = [&](std::int64_t row) {
      return weights[row] > 0 && label(row) != ignore_index_;
    };
    for (std::int64_t row = 0; row < student.rows(); ++row)
      if (counts(row)) check_label(student, row, label(row));
    const double total = weights.total(counts);

    const RowLoss sum = objectives::sum_rows(student, exec, [&](std::int64_t row) -> RowLoss {
      if (!counts(row)) {
        if (grad) grad->write_zeros(row);
        return {};
      }
      const double weight = weights[row];
      const RowResult of =
          cross_entropy_row(student, row, label(row), z_weight_, grad ? &*grad : nullptr,
                            args.grad_scale() * weight / total);
      return {weight * of.cross_entropy, weight * of.z_loss};
    });
    const double mean = total > 0 ? 1 / total : 0;
    objectives::write_loss(args.loss(), (sum.loss + z_weight_ * sum.second) * mean);
    objectives::report_metric(args, GRAFT_METRIC_WEIGHT, total);
    if (z_weight_ > 0) objectives::report_metric(args, "z_loss", z_weight_ * sum.second * mean);
  }

 private:
  void check_label(const LogitRows& student, std::int64_t row, std::int64_t label) const {
    if (label >= 0 && label < student.vocabulary()) return;
    throw sdk::Status(
        GRAFT_OUT_OF_RANGE, "tensor:" GRAFT_SIGNAL_LABELS,
        sdk::cat("the label at ", objectives::token_position(student.tokens_shape(), row), " is ",
                 label, "; the vocabulary has tokens 0 to ", student.vocabulary() - 1,
                 " (V = ", student.vocabulary(), "), and ignore_index is ", ignore_index_));
  }

  std::int64_t ignore_index_;
  double z_weight_;
};

}  // namespace
}  // namespace graft::cross_entropy

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.cross-entropy",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = GRAFT_VERSION_STRING,
                                             .license = "Apache-2.0"}),
                    graft::sdk::objective<graft::cross_entropy::CrossEntropy>())
