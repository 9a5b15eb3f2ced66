#include "core/student/token_mixer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

// One independent stream of random numbers per parameter: adding a parameter does not move the
// others.
std::uint64_t mix_seed(std::uint64_t seed, const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325u ^ seed * 0x9e3779b97f4a7c15u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i)
    text.append(i == 0 ? "" : ",").append(std::to_string(shape[i]));
  return text + "]";
}

}  // namespace

void fill_default(at::Tensor& tensor, const graft_param_spec& spec, std::uint64_t seed) {
  at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(mix_seed(seed, spec.name));
  switch (spec.init) {
    case GRAFT_INIT_ZEROS:
      tensor.zero_();
      return;
    case GRAFT_INIT_ONES:
      tensor.fill_(1);
      return;
    case GRAFT_INIT_CONSTANT:
      tensor.fill_(spec.init_a);
      return;
    case GRAFT_INIT_NORMAL:
      tensor.normal_(spec.init_a, spec.init_b, generator);
      return;
    case GRAFT_INIT_UNIFORM:
      tensor.uniform_(spec.init_a, spec.init_b, generator);
      return;
    case GRAFT_INIT_EYE: {
      // One identity per leading index: a stack of feature maps starts as identities.
      if (tensor.dim() < 2)
        fail(ErrorKind::plugin, std::string("parameter '") + spec.name +
                                    "' asks for an identity but has shape " +
                                    shape_text(tensor.sizes()) + "; an identity needs two axes");
      tensor.zero_();
      tensor.diagonal(0, -2, -1).fill_(1);
      return;
    }
    default:
      fail(ErrorKind::plugin, std::string("parameter '") + spec.name +
                                  "' asks for initialisation kind " + std::to_string(spec.init) +
                                  ", which this host does not know");
  }
}

TokenMixer::TokenMixer(std::shared_ptr<Mixer> plugin, std::uint64_t seed)
    : plugin_(std::move(plugin)) {
  for (const graft_param_spec* spec : plugin_->param_specs()) {
    const at::IntArrayRef shape(spec->shape, static_cast<std::size_t>(spec->ndim));
    at::Tensor tensor = at::empty(shape, at::kFloat);
    fill_default(tensor, *spec, seed);
    parameters_.push_back(
        {spec->name, spec->role == nullptr ? "" : spec->role, spec, std::move(tensor)});
  }
}

std::shared_ptr<TokenMixer> TokenMixer::clone() const {
  std::shared_ptr<TokenMixer> copy(new TokenMixer);
  copy->plugin_ = plugin_;
  copy->parameters_ = parameters_;
  for (MixerParameter& parameter : copy->parameters_)
    parameter.tensor = parameter.tensor.detach().clone();
  return copy;
}

std::shared_ptr<TokenMixer> TokenMixer::replica() const {
  std::shared_ptr<TokenMixer> copy(new TokenMixer);
  copy->plugin_ = plugin_->another();
  copy->parameters_ = parameters_;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    copy->parameters_[i].spec = copy->plugin_->param_specs()[i];
  return copy;
}

std::vector<at::Tensor> TokenMixer::parameter_tensors() const {
  std::vector<at::Tensor> tensors;
  for (const MixerParameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  return tensors;
}

void TokenMixer::load_parameter(const std::string& name, const at::Tensor& value) {
  const auto found =
      std::find_if(parameters_.begin(), parameters_.end(),
                   [&](const MixerParameter& parameter) { return parameter.name == name; });
  if (found == parameters_.end()) {
    std::vector<std::string> known;
    for (const MixerParameter& parameter : parameters_) known.push_back(parameter.name);
    fail(ErrorKind::input, "mixer '" + plugin_->label() + "' has no parameter '" + name + "'" +
                               did_you_mean(name, known));
  }
  if (value.sizes() != found->tensor.sizes())
    fail(ErrorKind::input, "parameter '" + name + "' of mixer '" + plugin_->label() +
                               "': expected shape " + shape_text(found->tensor.sizes()) + ", got " +
                               shape_text(value.sizes()));
  at::NoGradGuard no_grad;
  found->tensor.copy_(value);
}

at::Tensor TokenMixer::Plan::Tensor::allocate() const { return at::zeros(shape, dtype); }

namespace {

// The same for plan() and for the call it is made for.
std::uint64_t flags_of_call(bool training) {
  return GRAFT_X_DETERMINISTIC | (training ? GRAFT_X_TRAINING : 0);
}

}  // namespace

TokenMixer::Plan TokenMixer::plan(std::int64_t batch, std::int64_t tokens, at::ScalarType dtype,
                                  bool training) {
  graft_plan_in in{};
  in.struct_size = sizeof in;
  in.device_type = kDLCPU;
  in.dtype = dl_dtype(dtype);
  in.flags = flags_of_call(training);
  in.batch = batch;
  in.tokens = tokens;
  const graft_plan_out out = plugin_->plan(in);

  const auto copy = [](const graft_tensor_spec* const* specs, std::uint32_t count) {
    std::vector<Plan::Tensor> tensors;
    for (std::uint32_t i = 0; i < count; ++i)
      tensors.push_back(
          {specs[i]->name,
           std::vector<std::int64_t>(specs[i]->shape, specs[i]->shape + specs[i]->ndim),
           scalar_type(specs[i]->dtype)});
    return tensors;
  };
  return {out.workspace_forward,        out.workspace_backward,       out.workspace_step,
          copy(out.saved, out.n_saved), copy(out.state, out.n_state), copy(out.taps, out.n_taps)};
}

std::vector<std::string> TokenMixer::tap_names() {
  std::vector<std::string> names;
  for (const Plan::Tensor& tap : plan(1, 1, at::kFloat, false).taps) names.push_back(tap.name);
  return names;
}

graft_exec TokenMixer::exec(std::uint64_t workspace_bytes, bool training) {
  graft_exec exec{};
  exec.struct_size = sizeof exec;
  exec.device_type = kDLCPU;
  exec.flags = flags_of_call(training);
  exec.workspace = workspace_.reserve(workspace_bytes);
  exec.workspace_bytes = workspace_bytes;
  return exec;
}

std::vector<std::size_t> TokenMixer::tap_indices(const Plan& plan,
                                                 const std::vector<std::string>& names) const {
  std::vector<std::size_t> indices;
  for (const std::string& name : names) {
    const auto found = std::find_if(plan.taps.begin(), plan.taps.end(),
                                    [&](const Plan::Tensor& tap) { return tap.name == name; });
    if (found == plan.taps.end()) {
      std::vector<std::string> known;
      for (const Plan::Tensor& tap : plan.taps) known.push_back(tap.name);
      fail(ErrorKind::plugin, "mixer '" + plugin_->label() + "' has no tap '" + name + "'" +
                                  did_you_mean(name, known));
    }
    indices.push_back(static_cast<std::size_t>(found - plan.taps.begin()));
  }
  return indices;
}

// The tensors of one call, borrowed for the plugin.
struct MixerCall {
  BorrowedTensor x, y, positions, pad_mask;
  BorrowedTensors params, state_in, state_out, saved, taps;
  graft_mixer_forward args{};

  MixerCall(const TokenMixer::Plan& plan, const at::Tensor& x_in, const at::Tensor& y_out,
            const at::Tensor& positions_in, const at::Tensor& mask_in,
            const std::vector<at::Tensor>& param_tensors, const std::vector<at::Tensor>& state_from,
            const std::vector<at::Tensor>& state_to, const std::vector<at::Tensor>& saved_tensors,
            const std::vector<at::Tensor>& tap_tensors)
      : x(x_in),
        y(y_out),
        positions(aligned(positions_in)),
        pad_mask(aligned(mask_in)),
        params(param_tensors),
        state_in(state_from),
        state_out(state_to),
        saved(saved_tensors),
        taps(tap_tensors) {
    args.struct_size = sizeof args;
    args.n_params = params.size();
    // The plan's, also where an array is NULL.
    args.n_state = static_cast<std::uint32_t>(plan.state.size());
    args.n_saved = static_cast<std::uint32_t>(plan.saved.size());
    args.n_taps = static_cast<std::uint32_t>(plan.taps.size());
    args.x = x.get();
    args.y = y.get();
    args.positions = positions.get();
    args.pad_mask = pad_mask.get();
    args.params = params.const_data();
    args.state_in = state_in.const_data();
    args.state_out = state_out.data();
    args.saved = saved.data();
    args.taps = taps.data();
  }
};

// The plugin's forward and backward as one node of LibTorch's graph.
class MixerFunction : public torch::autograd::Function<MixerFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& x, at::TensorList params,
                                                const std::optional<at::Tensor>& positions_in,
                                                const std::optional<at::Tensor>& pad_mask_in,
                                                TokenMixer* mixer,
                                                std::vector<std::size_t> wanted) {
    const at::Tensor positions = positions_in.value_or(at::Tensor()),
                     pad_mask = pad_mask_in.value_or(at::Tensor());
    const TokenMixer::Plan plan = mixer->plan(x.size(0), x.size(1), x.scalar_type(), true);
    const at::Tensor input = aligned(x.contiguous());
    at::Tensor y = at::empty_like(input);
    std::vector<at::Tensor> saved, taps(plan.taps.size());
    for (const auto& tensor : plan.saved) saved.push_back(tensor.allocate());
    for (const std::size_t i : wanted) taps[i] = plan.taps[i].allocate();
    MixerCall call(plan, input, y, positions, pad_mask, params.vec(), {}, {}, saved, taps);
    mixer->plugin_->forward(mixer->exec(plan.workspace_forward, /*training=*/true), call.args);

    torch::autograd::variable_list kept{input, positions, pad_mask};
    kept.insert(kept.end(), params.begin(), params.end());
    kept.insert(kept.end(), saved.begin(), saved.end());
    ctx->save_for_backward(std::move(kept));
    ctx->saved_data["mixer"] = reinterpret_cast<std::int64_t>(mixer);
    std::vector<std::int64_t> wanted_ids(wanted.begin(), wanted.end());
    ctx->saved_data["wanted"] = wanted_ids;
    ctx->saved_data["n_params"] = static_cast<std::int64_t>(params.size());
    torch::autograd::variable_list outputs{y};
    for (const std::size_t i : wanted) outputs.push_back(taps[i]);
    return outputs;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    auto* mixer = reinterpret_cast<TokenMixer*>(ctx->saved_data["mixer"].toInt());
    const auto wanted = ctx->saved_data["wanted"].toIntVector();
    const auto n_params = static_cast<std::size_t>(ctx->saved_data["n_params"].toInt());
    const auto kept = ctx->get_saved_variables();
    const at::Tensor &x = kept[0], &positions = kept[1], &pad_mask = kept[2];
    const auto first_saved = kept.begin() + 3 + static_cast<std::ptrdiff_t>(n_params);
    const std::vector<at::Tensor> params(kept.begin() + 3, first_saved),
        saved(first_saved, kept.end());

    const TokenMixer::Plan plan = mixer->plan(x.size(0), x.size(1), x.scalar_type(), true);
    std::vector<at::Tensor> dtaps(plan.taps.size());
    for (std::size_t i = 0; i < wanted.size(); ++i)
      if (grads[i + 1].defined())
        dtaps[static_cast<std::size_t>(wanted[i])] = aligned(grads[i + 1].contiguous());
    // What nobody asks for is NULL: a plugin then leaves its matrix products out.
    const at::Tensor dx = ctx->needs_input_grad(0) ? at::empty_like(x) : at::Tensor();
    std::vector<at::Tensor> dparams(n_params);
    for (std::size_t i = 0; i < n_params; ++i)
      if (ctx->needs_input_grad(1 + i)) dparams[i] = at::empty_like(params[i]);

    MixerCall call(plan, x, {}, positions, pad_mask, params, {}, {}, saved, {});
    BorrowedTensor dy(grads[0].defined() ? aligned(grads[0].contiguous()) : at::zeros_like(x)),
        dx_out(dx);
    BorrowedTensors dtaps_in(dtaps), dparams_out(dparams);
    graft_mixer_backward args{};
    args.struct_size = sizeof args;
    args.fwd = &call.args;
    args.dy = dy.get();
    args.dtaps = wanted.empty() ? nullptr : dtaps_in.const_data();
    args.dx = dx_out.get();
    args.dparams = dparams_out.data();
    mixer->plugin_->backward(mixer->exec(plan.workspace_backward, /*training=*/true), args);

    torch::autograd::variable_list result{dx};
    result.insert(result.end(), dparams.begin(), dparams.end());
    result.resize(result.size() + 4);  // positions, pad_mask, mixer, wanted
    return result;
  }
};

at::Tensor TokenMixer::usable_mask(const at::Tensor& pad_mask) const {
  if (!pad_mask.defined() || plugin_->component().has(GRAFT_CAP_PAD_MASK)) return pad_mask;
  if (pad_mask.ne(0).all().item<bool>()) return {};
  fail(ErrorKind::plugin, "mixer '" + plugin_->label() +
                              "' takes no pad mask (GRAFT_CAP_PAD_MASK), and these rows have "
                              "different lengths; give it one row at a time");
}

MixerOutput TokenMixer::forward(const at::Tensor& x, const at::Tensor& positions,
                                const at::Tensor& mask, const std::vector<std::string>& taps) {
  const at::Tensor pad_mask = usable_mask(mask);
  const bool training =
      at::GradMode::is_enabled() &&
      (x.requires_grad() || std::any_of(parameters_.begin(), parameters_.end(),
                                        [](const auto& p) { return p.tensor.requires_grad(); }));
  const Plan sizes = plan(x.size(0), x.size(1), x.scalar_type(), training);
  const std::vector<std::size_t> wanted = tap_indices(sizes, taps);
  if (training) {
    const std::vector<at::Tensor> params = parameter_tensors();
    // LibTorch takes an absent tensor as an empty optional, not as an undefined one.
    const auto optional = [](const at::Tensor& t) {
      return t.defined() ? std::optional(t) : std::nullopt;
    };
    auto outputs = MixerFunction::apply(x, at::TensorList(params), optional(positions),
                                        optional(pad_mask), this, wanted);
    return {outputs[0], {outputs.begin() + 1, outputs.end()}};
  }
  return infer(x, positions, pad_mask, sizes, wanted, /*want_y=*/true);
}

MixerOutput TokenMixer::infer(const at::Tensor& x, const at::Tensor& positions,
                              const at::Tensor& pad_mask, const Plan& sizes,
                              const std::vector<std::size_t>& wanted, bool want_y) {
  const at::Tensor input = aligned(x.contiguous());
  MixerOutput out{want_y ? at::empty_like(input) : at::Tensor(), {}};
  std::vector<at::Tensor> all_taps(sizes.taps.size());
  for (const std::size_t i : wanted) out.taps.push_back(all_taps[i] = sizes.taps[i].allocate());
  MixerCall call(sizes, input, out.y, positions, pad_mask, parameter_tensors(), {}, {}, {},
                 all_taps);
  plugin_->forward(exec(sizes.workspace_forward, /*training=*/false), call.args);
  return out;
}

std::vector<at::Tensor> TokenMixer::taps(const at::Tensor& x,
                                         const std::vector<std::string>& names) {
  at::NoGradGuard no_grad;
  const Plan sizes = plan(x.size(0), x.size(1), x.scalar_type(), false);
  const bool want_y = !plugin_->component().has(GRAFT_CAP_TAPS_ONLY);
  return infer(x, {}, {}, sizes, tap_indices(sizes, names), want_y).taps;
}

at::Tensor TokenMixer::advance(const at::Tensor& x, const at::Tensor& positions,
                               const at::Tensor& mask, MixerState& state) {
  at::NoGradGuard no_grad;
  if (!plugin_->component().has(GRAFT_CAP_STATE_IO))
    fail(ErrorKind::plugin, "mixer '" + plugin_->label() +
                                "' cannot go on from a state (GRAFT_CAP_STATE_IO): it can be "
                                "trained and evaluated, but does not generate");
  const at::Tensor pad_mask = usable_mask(mask);
  const Plan sizes = plan(x.size(0), x.size(1), x.scalar_type(), false);
  const bool fresh = state.empty();
  if (fresh)
    for (const auto& tensor : sizes.state) state.push_back(tensor.allocate());
  const at::Tensor input = aligned(x.contiguous());
  at::Tensor y = at::empty_like(input);
  const std::vector<at::Tensor> params = parameter_tensors();
  if (!fresh && x.size(1) == 1 && plugin_->has_step()) {
    // step() may update the state in place.
    MixerCall call(sizes, input, y, positions, pad_mask, params, state, state, {}, {});
    plugin_->step(exec(sizes.workspace_step, /*training=*/false), call.args);
    return y;
  }
  MixerState next;
  for (const auto& tensor : sizes.state) next.push_back(tensor.allocate());
  MixerCall call(sizes, input, y, positions, pad_mask, params, fresh ? MixerState{} : state, next,
                 {}, {});
  plugin_->forward(exec(sizes.workspace_forward, /*training=*/false), call.args);
  state = std::move(next);
  return y;
}

}  // namespace graft
