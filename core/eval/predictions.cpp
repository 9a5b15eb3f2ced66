#include "core/eval/predictions.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.h"

namespace graft {
namespace {

// Rows of logits held at once: V is large (49k to 152k), so 128 rows of float32 are 25 to 78 MB,
// and a comparison needs a few of them.
constexpr std::int64_t kPredictionsAtOnce = 128;

void add_to(std::vector<double>& sums, const std::vector<double>& more) {
  if (sums.empty()) sums.resize(more.size());
  if (sums.size() != more.size())
    fail(ErrorKind::internal, "predictions at " + std::to_string(more.size()) +
                                  " positions added to those at " + std::to_string(sums.size()));
  for (std::size_t i = 0; i < more.size(); ++i) sums[i] += more[i];
}

// sums[position + i] += values[i]
void scatter(std::vector<double>& sums, std::int64_t position, const at::Tensor& values) {
  const at::Tensor numbers = values.to(at::kDouble).contiguous();
  const double* const from = numbers.const_data_ptr<double>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i)
    sums[static_cast<std::size_t>(position + i)] += from[i];
}

// One block of one sequence: rows predict the ids.
void add_block(const at::Tensor& logits, const at::Tensor& teacher_logits, const at::Tensor& ids,
               std::int64_t position, PredictionFigures& figures) {
  const at::Tensor log_q = logits.log_softmax(-1), label = ids.unsqueeze(-1);
  scatter(figures.nll, position, -log_q.gather(-1, label).squeeze(-1));
  if (!teacher_logits.defined()) return;
  const at::Tensor log_p = teacher_logits.log_softmax(-1);
  scatter(figures.teacher_nll, position, -log_p.gather(-1, label).squeeze(-1));
  scatter(figures.agreed, position, log_p.argmax(-1).eq(log_q.argmax(-1)));
  // p = 0 where the teacher's logit is -inf: then the term is 0 and not NaN.
  const at::Tensor p = log_p.exp();
  scatter(figures.kl, position, at::where(p > 0, p * (log_p - log_q), at::zeros({})).sum(-1));
}

}  // namespace

double PredictionFigures::mean(const std::vector<double>& sums) const {
  const auto scored = static_cast<double>(sequences) * (static_cast<double>(sums.size()) - 1);
  return scored > 0 ? std::accumulate(sums.begin(), sums.end(), 0.0) / scored : NAN;
}

void PredictionFigures::add(const PredictionFigures& other) {
  add_to(nll, other.nll);
  add_to(teacher_nll, other.teacher_nll);
  add_to(kl, other.kl);
  add_to(agreed, other.agreed);
  sequences += other.sequences;
}

PredictionFigures compare_predictions(const PredictionSource& model,
                                      const PredictionSource* teacher, const at::Tensor& ids) {
  const c10::InferenceMode inference;
  const std::int64_t tokens = ids.size(1);
  PredictionFigures figures;
  figures.sequences = ids.size(0);
  const auto length = static_cast<std::size_t>(tokens);
  figures.nll.resize(length);
  if (teacher != nullptr)
    for (auto* sums : {&figures.teacher_nll, &figures.kl, &figures.agreed}) sums->resize(length);
  for (std::int64_t b = 0; b < ids.size(0); ++b) {
    for (std::int64_t at = 1; at < tokens; at += kPredictionsAtOnce) {
      const std::int64_t n = std::min(kPredictionsAtOnce, tokens - at);
      const auto logits_of = [&](const PredictionSource& source) {
        return source.backbone->logits(source.rows[b].narrow(0, at - 1, n));
      };
      add_block(logits_of(model), teacher != nullptr ? logits_of(*teacher) : at::Tensor(),
                ids[b].narrow(0, at, n), at, figures);
    }
  }
  return figures;
}

}  // namespace graft
