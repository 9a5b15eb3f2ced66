#include "core/train/calibration_sweep.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <vector>

#include "core/base/clock.h"
#include "core/teacher/lanes.h"
#include "core/train/init_run.h"

namespace graft {
namespace {

// Sequences run through a layer of the teacher at once: bounds the activations of its MLP.
constexpr std::int64_t kSequencesAtOnce = 8;

at::Tensor rows(const at::Tensor& all, std::int64_t first, std::int64_t count) {
  return all.narrow(0, first, count);
}

}  // namespace

at::Tensor residual_weights(const at::Tensor& residual) {
  const at::Tensor weight = residual.square().sum(-1).clamp_min(1e-12).reciprocal();
  return weight / weight.mean();
}

CalibrationSweep::CalibrationSweep(const Backbone& teacher, const at::Tensor& windows,
                                   const Initializer& initializer, std::int64_t n_init,
                                   const StreamOptions& options)
    : teacher_(teacher), options_(options), n_init_(n_init) {
  wants_context_ = wants_signal(initializer, GRAFT_SIGNAL_HEAD_CONTEXT, &context_limit_);
  // A signal covers whole batches: the limit is rounded up to them.
  const std::int64_t batches = (context_limit_ + kSequencesInABatch - 1) / kSequencesInABatch;
  const std::int64_t wanted =
      context_limit_ == 0 ? n_init : std::min(batches * kSequencesInABatch, n_init);
  context_limit_ = wants_context_ ? wanted : 0;
  h_ = teacher.embed(windows);
  if (options.student) student_ = h_.clone();
}

void CalibrationSweep::run_attention(std::int64_t layer, bool signals_wanted) {
  layer_ = layer;
  // What was there before is another layer's, perhaps still at work.
  y_ = at::empty_like(h_);
  x_ = signals_wanted ? at::empty_like(h_) : at::Tensor();
  context_ = signals_wanted && context_limit_ > 0
                 ? at::empty({context_limit_, h_.size(1), teacher_.config().n_heads,
                              teacher_.config().head_dim})
                 : at::Tensor();
  for_batches([&](std::int64_t first, std::int64_t count, std::int64_t) {
    const at::Tensor x = teacher_.block_input(layer, rows(h_, first, count));
    AttentionCall call;
    call.want_context = signals_wanted && first < context_limit_;
    const AttentionResult result = teacher_.attention(layer, x, call);
    rows(y_, first, count).copy_(result.y);
    if (signals_wanted) rows(x_, first, count).copy_(x);
    if (call.want_context) keep_context(first, result.context);
  });
}

void CalibrationSweep::finish_layer() {
  for_batches([&](std::int64_t first, std::int64_t count, std::int64_t) {
    at::Tensor h = rows(h_, first, count);
    h.copy_(teacher_.finish_block(layer_, h, rows(y_, first, count)));
  });
}

SweepLayer CalibrationSweep::layer() const {
  SweepLayer out{x_, y_, h_ + y_, {}};
  if (student_.defined()) {
    out.x = teacher_.block_input(layer_, student_);
    out.y = y_ + stream_error(h_, student_) * options_.correction;
  }
  const auto of_init = [&](const at::Tensor& all) { return all.narrow(0, 0, n_init_); };
  out.signals.block_input = of_init(out.x);
  out.signals.block_output = of_init(out.y);
  out.signals.residual = of_init(out.residual);
  if (context_.defined()) out.signals.head_context = context_;
  out.signals.attention_probs = [&teacher = teacher_, x = x_, layer = layer_](std::int64_t first,
                                                                              std::int64_t count) {
    AttentionCall call;
    call.want_probs = true;
    return teacher.attention(layer, x.narrow(0, first, count), call).probs;
  };
  return out;
}

void CalibrationSweep::advance_student(TokenMixer* mixer,
                                       std::map<std::string, at::Tensor>& backbone) {
  strayed_ = strayed_ || mixer != nullptr;
  const std::int64_t batches = (student_.size(0) + kSequencesAtOnce - 1) / kSequencesAtOnce;
  std::vector<std::shared_ptr<TokenMixer>> replicas;  // of the lanes but the first
  for (std::int64_t lane = 1; mixer != nullptr && lane < lanes(batches); ++lane)
    replicas.push_back(mixer->replica());
  at::Tensor y = at::empty_like(student_);
  for_batches([&](std::int64_t first, std::int64_t count, std::int64_t lane) {
    const at::Tensor x = teacher_.block_input(layer_, rows(student_, first, count));
    TokenMixer* own =
        lane == 0 || mixer == nullptr ? mixer : replicas[static_cast<std::size_t>(lane - 1)].get();
    rows(y, first, count)
        .copy_(own != nullptr ? own->forward(x).y : teacher_.attention(layer_, x).y);
  });
  std::map<std::string, at::Tensor> corrected;
  if (strayed_ && options_.mlp_ridge > 0)
    corrected[mlp_output_name(teacher_.config(), layer_)] = corrected_mlp_output(y);
  const Backbone own = teacher_.with(corrected);
  for_batches([&](std::int64_t first, std::int64_t count, std::int64_t) {
    at::Tensor h = rows(student_, first, count);
    h.copy_(own.finish_block(layer_, h, rows(y, first, count)));
  });
  backbone.merge(corrected);
}

// What is missing to the teacher's stream, nothing for a token that is lost: a correction as large
// as the stream itself would only be noise to the others.
at::Tensor CalibrationSweep::stream_error(const at::Tensor& teacher,
                                          const at::Tensor& student) const {
  const at::Tensor error = teacher - student;
  const at::Tensor kept = error.norm(2, -1) < teacher.norm(2, -1) * options_.lost;
  return error * kept.unsqueeze(-1);
}

// W + dW with dW the ridge regression of what is missing to the teacher's next stream on what the
// map reads. `y`: the student's attention or mixer outputs. The teacher's stream is a layer ahead.
at::Tensor CalibrationSweep::corrected_mlp_output(const at::Tensor& y) const {
  const at::Tensor weight =
      teacher_.parameters().at(mlp_output_name(teacher_.config(), layer_)).value;
  const std::int64_t inner = weight.size(1);
  const at::Tensor token_weight = residual_weights(h_);
  at::Tensor gram = at::zeros({inner, inner}), moment = at::zeros({inner, weight.size(0)});
  // One after the other: sums must not depend on which lane is faster.
  for (std::int64_t first = 0; first < student_.size(0); first += kSequencesAtOnce) {
    const std::int64_t count = std::min(kSequencesAtOnce, student_.size(0) - first);
    const at::Tensor h = rows(student_, first, count), y_of = rows(y, first, count);
    const at::Tensor root = rows(token_weight, first, count).sqrt().unsqueeze(-1);
    const at::Tensor missing =
        stream_error(rows(h_, first, count), teacher_.finish_block(layer_, h, y_of));
    const at::Tensor kept = missing.abs().sum(-1, /*keepdim=*/true) > 0;
    const at::Tensor a = (teacher_.mlp_inner(layer_, h, y_of) * root * kept).flatten(0, 1);
    gram.addmm_(a.t(), a);
    moment.addmm_(a.t(), (missing * root).flatten(0, 1));
  }
  const at::Tensor g = gram.to(at::kDouble);
  g.diagonal().add_(g.diagonal().mean() * options_.mlp_ridge + 1e-12);
  const at::Tensor change = at::cholesky_solve(moment.to(at::kDouble), at::linalg_cholesky(g));
  return weight + change.t().to(at::kFloat);
}

// Keeps the time of the initializer's sequences apart from that of those only calibration sees.
template <typename Work>
void CalibrationSweep::for_batches(Work&& work) {
  const auto part = [&](std::int64_t begin, std::int64_t end, double& seconds) {
    const auto start = Clock::now();
    in_lanes((end - begin + kSequencesAtOnce - 1) / kSequencesAtOnce,
             [&](std::int64_t batch, std::int64_t lane) {
               const std::int64_t first = begin + batch * kSequencesAtOnce;
               work(first, std::min(kSequencesAtOnce, end - first), lane);
             });
    seconds += seconds_since(start);
  };
  part(0, n_init_, seconds_.init);
  part(n_init_, h_.size(0), seconds_.rest);
}

void CalibrationSweep::keep_context(std::int64_t first, const at::Tensor& context) {
  const std::int64_t count = std::min(context.size(0), context_limit_ - first);
  context_.narrow(0, first, count).copy_(context.narrow(0, 0, count));
}

}  // namespace graft
