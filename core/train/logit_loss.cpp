#include "core/train/logit_loss.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/student/torch_abi.h"
#include "core/teacher/layout.h"
#include "core/train/objective_function.h"

namespace graft {
namespace {

constexpr std::array<std::string_view, 5> kSignals = {
    GRAFT_SIGNAL_STUDENT_LOGITS, GRAFT_SIGNAL_TEACHER_LOGITS, GRAFT_SIGNAL_LABELS,
    GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT};

const graft_signal_need* find_need(const Objective& objective, std::string_view signal) {
  for (const graft_signal_need& need : objective.needs())
    if (need.name == signal) return &need;
  return nullptr;
}

bool any_names(std::span<const WeightedObjective> objectives, std::string_view signal) {
  return std::any_of(objectives.begin(), objectives.end(), [&](const WeightedObjective& term) {
    return find_need(*term.objective, signal) != nullptr;
  });
}

// ---------------------------------------------------------------- which tokens count

std::int64_t row_count(const LogitLossInput& input) {
  const at::Tensor& rows = input.student_rows;
  if (!rows.defined() || rows.dim() < 2)
    fail(ErrorKind::internal, "logit_loss: student_rows must be [...,model]");
  return rows.numel() / std::max<std::int64_t>(1, rows.size(-1));
}

void expect_tokens(const at::Tensor& tensor, const char* name, std::int64_t rows) {
  if (tensor.numel() == rows) return;
  fail(ErrorKind::internal, std::string("logit_loss: ") + name + " has " +
                                std::to_string(tensor.numel()) + " numbers for " +
                                std::to_string(rows) + " tokens");
}

// [N] bool, undefined when every token counts.
at::Tensor counting(const LogitLossInput& input) {
  const std::int64_t rows = row_count(input);
  at::Tensor counts;
  const auto also = [&](const at::Tensor& more) {
    counts = counts.defined() ? counts.logical_and(more) : more;
  };
  if (input.mask.defined()) {
    expect_tokens(input.mask, "mask", rows);
    also(input.mask.reshape({rows}).to(at::kBool));
  }
  if (input.labels.defined()) {
    expect_tokens(input.labels, "labels", rows);
    also(input.labels.reshape({rows}) != kNoLabel);
  }
  if (input.token_weight.defined()) {
    expect_tokens(input.token_weight, "token_weight", rows);
    const at::Tensor weight = input.token_weight.reshape({rows});
    also(weight != 0);
    if ((at::isfinite(weight).logical_and(weight >= 0).logical_not().logical_and(counts))
            .any()
            .item<bool>())
      fail(ErrorKind::internal,
           "logit_loss: token_weight holds a number that is negative or not finite");
  }
  return counts;
}

// The tokens that count, one behind the other.
struct Tokens {
  at::Tensor index;    // [M] i64 among the N given; undefined when all count
  at::Tensor student;  // [M,D]
  at::Tensor teacher;  // [M,D'], labels [M], weight [M]: where given
  at::Tensor labels, weight;
  double total = 0;  // of weight, or M

  std::int64_t size() const { return student.size(0); }
  double weight_of(std::int64_t begin, std::int64_t n) const {
    if (!weight.defined()) return static_cast<double>(n);
    return weight.narrow(0, begin, n).sum(at::kDouble).item<double>();
  }
};

Tokens gather(const LogitLossInput& input) {
  const std::int64_t rows = row_count(input);
  const at::Tensor counts = counting(input);
  Tokens tokens;
  if (counts.defined() && !counts.all().item<bool>()) tokens.index = counts.nonzero().squeeze(1);
  const auto take = [&](const at::Tensor& given, at::IntArrayRef shape) {
    if (!given.defined()) return at::Tensor();
    const at::Tensor flat = given.detach().reshape(shape);
    return (tokens.index.defined() ? flat.index_select(0, tokens.index) : flat).contiguous();
  };
  tokens.student = take(input.student_rows, {rows, input.student_rows.size(-1)});
  if (input.teacher_rows.defined()) {
    const std::int64_t width = input.teacher_rows.size(-1);
    expect_tokens(input.teacher_rows, "teacher_rows", rows * width);
    tokens.teacher = take(input.teacher_rows, {rows, width});
  }
  tokens.labels = take(input.labels, {rows});
  tokens.weight = take(input.token_weight, {rows});
  if (tokens.weight.defined()) tokens.weight = tokens.weight.to(at::kFloat);
  tokens.total = tokens.weight_of(0, tokens.size());
  return tokens;
}

// ---------------------------------------------------------------- one block

const at::Tensor& output_projection(const Backbone& backbone) {
  const ModelConfig& config = backbone.config();
  return backbone.parameters()
      .at(config.tied ? embedding_name(config) : output_projection_name(config))
      .value;
}

struct Wanted {
  bool rows = false, projection = false;
  bool any() const { return rows || projection; }
};

struct Job {
  const LogitLossInput& input;
  std::span<const WeightedObjective> objectives;
  double denominator;  // 0: the tokens' own
  Wanted wanted;
};

// What an objective reports from one block, added to the whole's with the block's share.
struct Report {
  const WeightedObjective& term;
  std::map<std::string, double>& parts;
  double share;
  double counted;  // the weight of the tokens that the objective counted

  static void metric(void* ctx, const char* name, const DLTensor* scalar) {
    auto& self = *static_cast<Report*>(ctx);
    const auto value = view_of(*scalar).item<double>();
    if (std::string_view(name) != GRAFT_METRIC_WEIGHT) {
      self.parts[self.term.name + "." + name] += self.share * value;
    } else {
      self.counted = value;
    }
  }
};

// An objective may leave out tokens by a rule of its own (ignore_index). Its mean is over the
// others; these factors make of it what it is as a sum over the tokens that count for all, over
// their number, so that the step's denominator is one number that is known beforehand.
double counted_share(double counted, double weight) {
  const double share = weight > 0 ? counted / weight : 0;
  return std::abs(share - 1) <= 1e-4 ? 1 : share;  // metrics are float32
}

class Blocks {
 public:
  Blocks(const Job& job, LogitLoss& result)
      : job_(job),
        student_(*job.input.student),
        projection_(output_projection(student_)),
        tokens_(gather(job.input)),
        result_(result),
        needs_teacher_(any_names(job.objectives, GRAFT_SIGNAL_TEACHER_LOGITS)) {
    result_.tokens = tokens_.total;
    for (const WeightedObjective& term : job.objectives) result_.parts[term.name] = 0;
    if (job.wanted.rows) rows_gradient_ = at::zeros_like(tokens_.student);
    if (job.wanted.projection) projection_gradient_ = at::zeros_like(projection_);
  }

  double run() {
    if (tokens_.total == 0) return 0;
    const std::int64_t size = block_size();
    for (std::int64_t begin = 0; begin < tokens_.size(); begin += size)
      block(begin, std::min(size, tokens_.size() - begin), size);
    double loss = 0;
    for (const WeightedObjective& term : job_.objectives)
      if (term.weight > 0) loss += term.weight * result_.parts.at(term.name);
    return loss * tokens_.total / denominator();
  }

  // Of the rows as they were given.
  at::Tensor rows_gradient() const {
    if (!rows_gradient_.defined()) return {};
    const at::Tensor& given = job_.input.student_rows;
    if (!tokens_.index.defined()) return rows_gradient_.reshape(given.sizes());
    at::Tensor all = at::zeros({row_count(job_.input), given.size(-1)}, rows_gradient_.options());
    return all.index_copy_(0, tokens_.index, rows_gradient_).reshape(given.sizes());
  }
  const at::Tensor& projection_gradient() const { return projection_gradient_; }

 private:
  double denominator() const { return job_.denominator > 0 ? job_.denominator : tokens_.total; }
  std::int64_t terms_with_gradient() const {
    if (!job_.wanted.any()) return 0;
    return std::count_if(job_.objectives.begin(), job_.objectives.end(),
                         [](const WeightedObjective& term) { return term.weight > 0; });
  }

  // Equal blocks, as large as their logits and gradients may be.
  std::int64_t block_size() const {
    const std::int64_t logits = needs_teacher_ ? 2 : 1;
    const std::int64_t gradients = std::min<std::int64_t>(2, terms_with_gradient());
    std::int64_t bytes = 4 * (logits + gradients);
    if (student_.compute() == Compute::bfloat16) bytes += 2;  // the product, before it is float32
    const std::int64_t most =
        std::max<std::int64_t>(1, job_.input.block_bytes / (bytes * projection_.size(0)));
    const std::int64_t blocks = (tokens_.size() + most - 1) / most;
    return (tokens_.size() + blocks - 1) / blocks;
  }

  void block(std::int64_t begin, std::int64_t n, std::int64_t size) {
    const auto part = [&](const at::Tensor& all) {
      return all.defined() ? all.narrow(0, begin, n) : at::Tensor();
    };
    const at::Tensor rows = part(tokens_.student);
    const std::map<std::string_view, at::Tensor> signals = {
        {GRAFT_SIGNAL_STUDENT_LOGITS, student_.logits(rows)},
        {GRAFT_SIGNAL_TEACHER_LOGITS, needs_teacher_ && tokens_.teacher.defined()
                                          ? job_.input.teacher->logits(part(tokens_.teacher))
                                          : at::Tensor()},
        {GRAFT_SIGNAL_LABELS, aligned(part(tokens_.labels))},
        {GRAFT_SIGNAL_TOKEN_WEIGHT, aligned(part(tokens_.weight))}};
    const double weight = tokens_.weight_of(begin, n);
    bool first = true;
    for (const WeightedObjective& term : job_.objectives) {
      at::Tensor gradient;
      if (job_.wanted.any() && term.weight > 0) gradient = buffer(first ? 0 : 1, n, size);
      evaluate(term, signals, weight, gradient);
      if (!gradient.defined()) continue;
      if (!first) buffer(0, n, size).add_(gradient);
      first = false;
    }
    if (first) return;
    const at::Tensor gradient = buffer(0, n, size);
    if (job_.wanted.rows) {
      at::Tensor out = part(rows_gradient_);
      at::mm_out(out, gradient, projection_.detach());
    }
    if (job_.wanted.projection) projection_gradient_.addmm_(gradient.t(), rows);
  }

  at::Tensor buffer(std::size_t which, std::int64_t n, std::int64_t size) {
    at::Tensor& all = buffers_[which];
    if (!all.defined()) all = at::empty({size, projection_.size(0)}, at::kFloat);
    return all.narrow(0, 0, n);
  }

  void evaluate(const WeightedObjective& term,
                const std::map<std::string_view, at::Tensor>& signals, double weight,
                const at::Tensor& gradient) {
    const auto needs = term.objective->needs();
    std::vector<at::Tensor> inputs(needs.size()), gradients(needs.size());
    for (std::size_t i = 0; i < needs.size(); ++i) {
      const auto found = signals.find(needs[i].name);
      if (found != signals.end()) inputs[i] = found->second;
      if (std::string_view(needs[i].name) == GRAFT_SIGNAL_STUDENT_LOGITS) gradients[i] = gradient;
    }
    const at::Tensor value = at::zeros({}, at::kFloat);
    BorrowedTensors in(inputs), out(gradients);
    BorrowedTensor value_out(value);
    Report report{term, result_.parts, weight / tokens_.total, weight};
    graft_objective_args args{};
    args.struct_size = sizeof args;
    args.n_signals = in.size();
    args.signals = in.const_data();
    args.grads = out.data();
    args.loss = value_out.get();
    args.grad_scale = term.weight * weight / denominator();
    args.metric = &Report::metric;
    args.metric_ctx = &report;
    run_objective(*term.objective, args);
    const double counted = counted_share(report.counted, weight);
    if (counted != 1 && gradient.defined()) gradient.mul_(counted);
    result_.parts[term.name] += report.share * counted * value.item<double>();
  }

  const Job& job_;
  const Backbone& student_;
  const at::Tensor& projection_;
  const Tokens tokens_;
  LogitLoss& result_;
  const bool needs_teacher_;
  at::Tensor rows_gradient_, projection_gradient_;
  std::array<at::Tensor, 2> buffers_;
};

// ---------------------------------------------------------------- as a node of the graph

// Gradients are made with the loss, block by block; backward() hands them over.
class LogitLossNode : public torch::autograd::Function<LogitLossNode> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor&,
                            const at::Tensor&, const Job* job, LogitLoss* result) {
    Blocks blocks(*job, *result);
    const double loss = blocks.run();
    const at::Tensor rows = blocks.rows_gradient(), projection = blocks.projection_gradient();
    // saved_data and not saved variables: those would hold a second reference while the gradient is
    // being accumulated, and a gradient that is not the last reference is copied.
    ctx->saved_data["there"] = true;
    if (rows.defined()) ctx->saved_data["rows"] = rows;
    if (projection.defined()) ctx->saved_data["projection"] = projection;
    return at::scalar_tensor(loss, at::kFloat);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    auto& kept = ctx->saved_data;
    if (kept.empty())
      fail(ErrorKind::internal,
           "logit_loss: backward() may be called once, its gradients are gone");
    const auto factor = grads[0].item<double>();
    const auto take = [&](const char* name) {
      const auto found = kept.find(name);
      if (found == kept.end()) return at::Tensor();
      at::Tensor gradient = found->second.toTensor();
      kept.erase(found);
      if (factor != 1) gradient.mul_(factor);
      return gradient;
    };
    torch::autograd::variable_list result{take("rows"), take("projection"), at::Tensor(),
                                          at::Tensor()};
    kept.clear();
    return result;
  }
};

std::string given_signals(bool has_teacher, bool has_labels) {
  std::string text = GRAFT_SIGNAL_STUDENT_LOGITS;
  if (has_teacher) text += ", " GRAFT_SIGNAL_TEACHER_LOGITS;
  if (has_labels) text += ", " GRAFT_SIGNAL_LABELS;
  return text + ", " GRAFT_SIGNAL_LOSS_MASK ", " GRAFT_SIGNAL_TOKEN_WEIGHT;
}

void check_signals(const WeightedObjective& term, bool has_teacher, bool has_labels) {
  for (const graft_signal_need& need : term.objective->needs()) {
    const std::string_view name = need.name;
    const bool there = name == GRAFT_SIGNAL_TEACHER_LOGITS ? has_teacher
                       : name == GRAFT_SIGNAL_LABELS
                           ? has_labels
                           : std::find(kSignals.begin(), kSignals.end(), name) != kSignals.end();
    if (there || (need.flags & GRAFT_NEED_REQUIRED) == 0) continue;
    fail(ErrorKind::usage, "objective " + quoted(term.name) + " (" + term.objective->label() +
                               ") needs signal " + std::string(name) +
                               "; the scope \"model\" gives " +
                               given_signals(has_teacher, has_labels));
  }
}

}  // namespace

double counted_tokens(const LogitLossInput& input) {
  const at::Tensor counts = counting(input);
  if (!counts.defined()) return static_cast<double>(row_count(input));
  if (!input.token_weight.defined()) return counts.sum().item<double>();
  const at::Tensor weight = input.token_weight.reshape({-1}).to(at::kDouble);
  return weight.masked_select(counts).sum().item<double>();
}

void check_logit_objectives(std::span<const WeightedObjective> objectives, bool has_teacher,
                            bool has_labels) {
  std::set<std::string> names;
  for (const WeightedObjective& term : objectives) {
    if (!names.insert(term.name).second)
      fail(ErrorKind::usage, "two objectives have the name " + quoted(term.name));
    if (!(term.weight >= 0) || std::isinf(term.weight))
      fail(ErrorKind::usage, "the weight of objective " + quoted(term.name) + " is " +
                                 std::to_string(term.weight) +
                                 "; expected a finite number of at least 0");
    check_signals(term, has_teacher, has_labels);
    const graft_signal_need* const need = find_need(*term.objective, GRAFT_SIGNAL_STUDENT_LOGITS);
    if (term.weight > 0 && (need == nullptr || (need->flags & GRAFT_NEED_GRAD) == 0))
      fail(ErrorKind::usage, "objective " + quoted(term.name) + " (" + term.objective->label() +
                                 ") gives no gradient to " GRAFT_SIGNAL_STUDENT_LOGITS
                                 ": nothing would train on it");
  }
}

LogitLoss logit_loss(const LogitLossInput& input, std::span<const WeightedObjective> objectives,
                     double denominator) {
  check_logit_objectives(objectives, input.teacher_rows.defined(), input.labels.defined());
  if (input.student == nullptr || (input.teacher_rows.defined() && input.teacher == nullptr))
    fail(ErrorKind::internal, "logit_loss: rows come with the backbone whose they are");
  const at::Tensor& projection = output_projection(*input.student);
  const bool graph = at::GradMode::is_enabled();
  const Job job{input,
                objectives,
                denominator,
                {graph && input.student_rows.requires_grad(), graph && projection.requires_grad()}};
  LogitLoss result;
  result.loss = LogitLossNode::apply(input.student_rows, projection, &job, &result);
  return result;
}

}  // namespace graft
