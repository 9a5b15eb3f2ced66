#include "kit/objective.h"

#include <algorithm>
#include <optional>

namespace graft::conformance {
namespace {

constexpr std::int64_t kTapHeads = 2;

bool is(std::string_view a, std::string_view b) { return a == b; }

bool of_logits(std::string_view name) {
  return is(name, GRAFT_SIGNAL_STUDENT_LOGITS) || is(name, GRAFT_SIGNAL_TEACHER_LOGITS) ||
         is(name, GRAFT_SIGNAL_LABELS);
}

// The axes behind [B,T] of a tap; nothing for one the kit does not know.
std::vector<std::int64_t> tap_axes(std::string_view tap, std::int64_t width) {
  if (is(tap, GRAFT_TAP_HEAD_OUTPUT)) return {kTapHeads, width};
  if (is(tap, GRAFT_TAP_PRE_OUTPUT)) return {kTapHeads * width};
  if (is(tap, GRAFT_TAP_LOG_DECAY) || is(tap, GRAFT_TAP_WRITE_GATE)) return {kTapHeads};
  return {};
}

bool known(std::string_view name) {
  const std::string_view tap = GRAFT_SIGNAL_STUDENT_TAP;
  if (name.starts_with(tap)) return !tap_axes(name.substr(tap.size()), 1).empty();
  return of_logits(name) || is(name, GRAFT_SIGNAL_STUDENT_HIDDEN) ||
         is(name, GRAFT_SIGNAL_TEACHER_HIDDEN) || is(name, GRAFT_SIGNAL_LOSS_MASK) ||
         is(name, GRAFT_SIGNAL_TOKEN_WEIGHT);
}

// Nothing for a number that is no scalar of float32 or float64.
std::optional<double> number_of(const DLTensor& scalar) {
  if (scalar.data == nullptr || sdk::numel(scalar) != 1) return std::nullopt;
  const void* const data = sdk::data_address(scalar);
  if (sdk::same_dtype(scalar.dtype, sdk::float64)) return *static_cast<const double*>(data);
  if (sdk::same_dtype(scalar.dtype, sdk::float32))
    return static_cast<double>(*static_cast<const float*>(data));
  return std::nullopt;
}

// The callback of the host; nothing may be thrown through the plugin.
void take_metric(void* ctx, const char* name, const DLTensor* scalar) {
  Objective::Call& call = *static_cast<Objective::Call*>(ctx);
  const auto number = scalar == nullptr ? std::nullopt : number_of(*scalar);
  if (name == nullptr || *name == '\0') {
    call.metric_problem = "reports a metric without a name";
  } else if (!number) {
    call.metric_problem =
        sdk::cat("reports the metric '", name, "', which is no number of float32 or float64");
  } else {
    call.metrics[name] = *number;
  }
}

void check_guards(const Tensor& tensor, std::string_view what) {
  if (!tensor.intact()) fail("writes past the end (or before the start) of ", what);
}

}  // namespace

ObjectiveInputs ObjectiveInputs::copy() const {
  ObjectiveInputs out;
  for (const Tensor& signal : signals) out.signals.push_back(signal.copy());
  out.grad_scale = grad_scale;
  out.grads = grads;
  return out;
}

Objective::Objective(Context& context, const Options& more) : context_(context) {
  Options options = context.options;
  for (const auto& [key, value] : more) options.insert_or_assign(key, value);
  const CompleteConfig config(context.desc(), options);
  must(outcome_of([&](graft_error* e) {
         return context.library.objectives()->create(context.desc().id, config.c(), &handle_, e);
       }),
       "create");
  if (handle_ == nullptr || handle_->v == nullptr) fail("create answers OK and gives no objective");
}

Objective::~Objective() {
  if (handle_ != nullptr) handle_->v->destroy(handle_);
}

std::span<const graft_signal_need> Objective::needs() const {
  if (handle_->v->n_needs > 0 && handle_->v->needs == nullptr)
    fail("announces ", handle_->v->n_needs, " needs and gives none (NULL)");
  return {handle_->v->needs, handle_->v->n_needs};
}

int Objective::find(std::string_view signal) const {
  for (std::size_t i = 0; i < needs().size(); ++i) {
    if (name(i) == signal) return static_cast<int>(i);
  }
  return -1;
}

bool Objective::on_logits() const {
  return std::ranges::any_of(needs(), [](const graft_signal_need& n) { return of_logits(n.name); });
}

bool Objective::flat(std::size_t signal) const {
  const bool per_token =
      name(signal) == GRAFT_SIGNAL_LOSS_MASK || name(signal) == GRAFT_SIGNAL_TOKEN_WEIGHT;
  return of_logits(name(signal)) || (per_token && on_logits());
}

Tensor Objective::per_token(std::size_t signal, const BatchSize& size, DLDataType dtype) const {
  if (flat(signal)) return Tensor(dtype, {size.all()});
  return Tensor(dtype, {size.batch, size.tokens});
}

Tensor Objective::random_signal(std::size_t signal, const BatchSize& size, DLDataType dtype,
                                Random& random) const {
  const std::string of = name(signal);
  if (!known(of)) skip("requires the signal '", of, "', which the kit cannot make");
  if (of == GRAFT_SIGNAL_LOSS_MASK) {
    Tensor all = per_token(signal, size, sdk::uint8);
    all.fill(1);
    return all;
  }
  if (of == GRAFT_SIGNAL_TOKEN_WEIGHT) {
    Tensor weights = per_token(signal, size, sdk::float32);
    for (std::int64_t i = 0; i < weights.size(); ++i) weights.set(i, random.between(0.2, 2));
    return weights;
  }
  if (of == GRAFT_SIGNAL_LABELS) {
    Tensor labels = per_token(signal, size, sdk::int64);
    for (std::int64_t i = 0; i < labels.size(); ++i)
      labels.set(i, static_cast<double>(random.below(size.width)));
    return labels;
  }
  std::vector<std::int64_t> shape{size.batch, size.tokens};
  if (flat(signal)) shape = {size.all()};
  const std::string_view tap = GRAFT_SIGNAL_STUDENT_TAP;
  std::vector<std::int64_t> rest{size.width};
  if (of.starts_with(tap)) rest = tap_axes(of.substr(tap.size()), size.width);
  shape.insert(shape.end(), rest.begin(), rest.end());
  Tensor out(dtype, shape);
  for (std::int64_t i = 0; i < out.size(); ++i) out.set(i, random.normal());
  return out;
}

ObjectiveInputs Objective::random_inputs(const BatchSize& size, DLDataType dtype, Random& random,
                                         std::initializer_list<std::string_view> with) const {
  ObjectiveInputs in;
  for (std::size_t i = 0; i < needs().size(); ++i) {
    const bool wanted = (needs()[i].flags & GRAFT_NEED_REQUIRED) != 0 ||
                        std::ranges::find(with, name(i)) != with.end();
    in.signals.push_back(wanted ? random_signal(i, size, dtype, random) : Tensor());
  }
  return in;
}

void Objective::fill(Call& call, const ObjectiveInputs& in) const {
  const bool wanted = in.grads == ObjectiveInputs::Grads::all;
  for (std::size_t i = 0; i < in.signals.size(); ++i) {
    const Tensor& signal = in.signals[i];
    const bool grad = wanted && signal.there() && (needs()[i].flags & GRAFT_NEED_GRAD) != 0;
    call.signals.push_back(signal.c());
    call.grads.push_back(grad ? Tensor(signal.dtype(), signal.shape()) : Tensor());
  }
  for (Tensor& grad : call.grads) call.grad_pointers.push_back(grad.c());
  call.loss = Tensor(sdk::float32, {});
  call.exec.struct_size = sizeof call.exec;
  call.exec.device_type = kDLCPU;
  call.exec.flags = GRAFT_X_TRAINING | GRAFT_X_DETERMINISTIC;
  call.exec.seed = context_.seed;
  graft_objective_args& args = call.args;
  args.struct_size = sizeof args;
  args.n_signals = static_cast<std::uint32_t>(call.signals.size());
  args.signals = call.signals.data();
  args.grads = in.grads == ObjectiveInputs::Grads::none ? nullptr : call.grad_pointers.data();
  args.loss = call.loss.c();
  args.grad_scale = in.grad_scale;
  args.metric = &take_metric;
  args.metric_ctx = &call;
}

Outcome Objective::try_call(Call& call, std::uint64_t less) {
  std::uint64_t bytes = 0;
  if (handle_->v->workspace != nullptr) {
    const Outcome outcome = outcome_of(
        [&](graft_error* e) { return handle_->v->workspace(handle_, &call.args, &bytes, e); });
    if (!outcome.ok()) return outcome;
  }
  if (bytes > (std::uint64_t{1} << 40)) fail("asks for a workspace of ", bytes, " bytes");
  if (less > 0 && bytes == 0) skip("asks for no workspace");
  bytes -= less;
  // 256-aligned, as the ABI promises; the rest is guard.
  call.workspace = Tensor(sdk::uint8, {static_cast<std::int64_t>(bytes) + 512});
  const auto address = reinterpret_cast<std::uintptr_t>(call.workspace.c()->data);
  auto* const start = reinterpret_cast<std::byte*>((address + 255) / 256 * 256);
  call.exec.workspace = bytes == 0 ? nullptr : start;
  call.exec.workspace_bytes = bytes;
  const Outcome outcome = outcome_of(
      [&](graft_error* e) { return handle_->v->run(handle_, &call.exec, &call.args, e); });
  check_guards(call.workspace, "the workspace");
  const auto all = call.workspace.bytes();
  for (const std::byte* p = start + bytes; p < all.data() + all.size(); ++p) {
    if (*p != std::byte{0xFF}) fail("writes past the end of the workspace of ", bytes, " bytes");
  }
  return outcome;
}

Outcome Objective::try_run(const ObjectiveInputs& in, ObjectiveOutputs* out) {
  const ObjectiveInputs before = in.copy();
  Call call;
  fill(call, in);
  const Outcome outcome = try_call(call);
  if (!call.metric_problem.empty()) fail(call.metric_problem);
  check_guards(call.loss, "the loss");
  for (std::size_t i = 0; i < in.signals.size(); ++i) {
    check_guards(in.signals[i], "signal " + name(i));
    check_guards(call.grads[i], "the gradient of " + name(i));
    if (in.signals[i].there() && !in.signals[i].same_bytes(before.signals[i]))
      fail("changes its signal ", name(i));
  }
  *out = {call.loss.at(0), std::move(call.grads), std::move(call.metrics)};
  return outcome;
}

ObjectiveOutputs Objective::run(const ObjectiveInputs& in) {
  ObjectiveOutputs out;
  must(try_run(in, &out), "run");
  return out;
}

ObjectiveInputs Objective::tokens_of(const ObjectiveInputs& in, const BatchSize& size,
                                     const std::vector<std::int64_t>& which) const {
  ObjectiveInputs out;
  out.grad_scale = in.grad_scale;
  out.grads = in.grads;
  const auto n = static_cast<std::int64_t>(which.size());
  for (std::size_t s = 0; s < in.signals.size(); ++s) {
    const Tensor& signal = in.signals[s];
    if (!signal.there()) {
      out.signals.emplace_back();
      continue;
    }
    std::vector<std::int64_t> shape = signal.shape();
    shape[0] = flat(s) ? n : 1;
    if (!flat(s)) shape[1] = n;
    const std::int64_t width = signal.size() / size.all();
    Tensor& some = out.signals.emplace_back(signal.dtype(), shape);
    for (std::int64_t i = 0; i < some.size(); ++i)
      some.set(i, signal.at(which[static_cast<std::size_t>(i / width)] * width + i % width));
  }
  return out;
}

}  // namespace graft::conformance
