#include "kit/mixer.h"

#include <algorithm>
#include <cmath>

namespace graft::conformance {
namespace {

Layer make_layer(std::string name, int heads, int kv_heads, int head_dim, int model, int rotated,
                 std::uint32_t flags) {
  Layer layer;
  layer.name = std::move(name);
  for (int i = 0; i < rotated / 2; ++i)
    layer.inv_freq.push_back(std::pow(100.0, -2.0 * i / rotated));
  graft_layer_info& info = layer.info;
  info.struct_size = sizeof info;
  info.layer = 1;
  info.n_layers = 4;
  info.n_heads = heads;
  info.n_kv_heads = kv_heads;
  info.head_dim = head_dim;
  info.model_dim = model;
  info.max_positions = 4096;
  info.rope_theta = rotated > 0 ? 100 : 0;
  info.rope_fraction = static_cast<double>(rotated) / head_dim;
  info.rope_scaling = "";
  info.family = "llama";
  info.param_dtype = sdk::float32;
  info.flags = flags;
  info.norm_eps = 1e-6;
  info.n_rope_freq = rotated / 2;
  info.rope_attention_factor = 1;
  return layer;
}

Tensor tensor_of(const Plan::Spec& spec) { return Tensor(spec.dtype, spec.shape); }

std::vector<Tensor> tensors_of(const std::vector<Plan::Spec>& specs) {
  std::vector<Tensor> out;
  for (const Plan::Spec& spec : specs) out.push_back(tensor_of(spec));
  return out;
}

std::vector<Plan::Spec> read_specs(const graft_tensor_spec* const* specs, std::uint32_t n,
                                   const char* what) {
  std::vector<Plan::Spec> out;
  if (n > 0 && specs == nullptr)
    fail("plan() announces ", n, " ", what, " tensors and gives none (NULL)");
  for (std::uint32_t i = 0; i < n; ++i) {
    const graft_tensor_spec& spec = *specs[i];
    if (spec.ndim < 0 || spec.ndim > 6) fail("plan(): ", what, " ", i, " has ", spec.ndim, " axes");
    out.push_back({spec.name == nullptr ? "" : spec.name,
                   spec.axes == nullptr ? "" : spec.axes,
                   spec.dtype,
                   {spec.shape, spec.shape + spec.ndim}});
  }
  return out;
}

template <class To>
std::vector<To*> pointers(std::vector<Tensor>& tensors) {
  std::vector<To*> out;
  for (Tensor& tensor : tensors) out.push_back(tensor.c());
  return out;
}
std::vector<const DLTensor*> pointers(const std::vector<Tensor>& tensors) {
  std::vector<const DLTensor*> out;
  for (const Tensor& tensor : tensors) out.push_back(tensor.c());
  return out;
}

void check_intact(const Tensor& tensor, std::string_view what) {
  if (!tensor.intact()) fail("writes past the end (or before the start) of ", what);
}
void check_intact(const std::vector<Tensor>& tensors, std::string_view what) {
  for (std::size_t i = 0; i < tensors.size(); ++i) check_intact(tensors[i], sdk::cat(what, " ", i));
}

double fan_in(const graft_param_spec& spec) {
  return spec.ndim < 2 ? 1
                       : static_cast<double>(std::max<std::int64_t>(spec.shape[spec.ndim - 1], 1));
}

double default_value(const graft_param_spec& spec, std::int64_t i, Random& random) {
  switch (spec.init) {
    case GRAFT_INIT_ONES:
      return 1;
    case GRAFT_INIT_CONSTANT:
      return spec.init_a;
    case GRAFT_INIT_NORMAL:
      return spec.init_a + spec.init_b * random.normal();
    case GRAFT_INIT_UNIFORM:
      return random.between(spec.init_a, spec.init_b);
    case GRAFT_INIT_EYE: {
      const std::int64_t rows = spec.shape[spec.ndim - 2], columns = spec.shape[spec.ndim - 1];
      const std::int64_t within = i % (rows * columns);
      return within / columns == within % columns ? 1 : 0;
    }
    default:
      return 0;
  }
}

DLDataType param_dtype(DLDataType x) {
  return sdk::same_dtype(x, sdk::float64) ? sdk::float64 : sdk::float32;
}

// What a call may not change: every input.
class Unchanged {
 public:
  explicit Unchanged(const MixerInputs& in) : in_(in), before_(in.copy()) {}
  void check() const {
    compare(in_.x, before_.x, "x");
    for (std::size_t i = 0; i < in_.params.size(); ++i)
      compare(in_.params[i], before_.params[i], sdk::cat("parameter ", i));
    for (std::size_t i = 0; i < in_.state.size(); ++i)
      compare(in_.state[i], before_.state[i], sdk::cat("state_in ", i));
    compare(in_.positions, before_.positions, "positions");
    compare(in_.pad_mask, before_.pad_mask, "pad_mask");
    compare(in_.seq_offsets, before_.seq_offsets, "seq_offsets");
  }

 private:
  static void compare(const Tensor& now, const Tensor& before, const std::string& what) {
    if (!now.there()) return;
    if (!now.same_bytes(before)) fail("changes its input ", what);
    check_intact(now, what);
  }
  const MixerInputs& in_;
  MixerInputs before_;
};

}  // namespace

const std::vector<Layer>& all_layers() {
  static const std::vector<Layer>& layers = *[] {
    auto* const all = new std::vector<Layer>;
    all->push_back(make_layer("small", 2, 1, 8, 12, 6, 0));
    all->push_back(
        make_layer("biases, no GQA, parallel residual", 2, 2, 8, 16, 4,
                   GRAFT_LAYER_QKV_BIAS | GRAFT_LAYER_O_BIAS | GRAFT_LAYER_PARALLEL_RESIDUAL));
    all->push_back(make_layer("q/k norms", 4, 2, 16, 24, 16, GRAFT_LAYER_QK_NORM));
    all->push_back(make_layer("one head", 1, 1, 16, 16, 16, 0));
    all->push_back(make_layer("no RoPE", 3, 1, 8, 20, 0, 0));
    for (Layer& layer : *all)
      layer.info.rope_inv_freq = layer.inv_freq.empty() ? nullptr : layer.inv_freq.data();
    return all;
  }();
  return layers;
}

const Layer& small_layer() { return all_layers().front(); }

MixerInputs MixerInputs::copy() const {
  MixerInputs out;
  out.x = x.copy();
  out.params = copies(params);
  out.state = copies(state);
  out.positions = positions.copy();
  out.pad_mask = pad_mask.copy();
  out.seq_offsets = seq_offsets.copy();
  out.flags = flags;
  out.want_state = want_state;
  out.want_taps = want_taps;
  return out;
}

Mixer::Mixer(Context& context, const Layer& layer, const Options& more)
    : Mixer(context, *context.library.mixers(), layer, more) {}

Mixer::Mixer(Context& context, const graft_mixer_factory& factory, const Layer& layer,
             const Options& more)
    : context_(context), layer_(layer) {
  Options options = context.options;
  for (const auto& [key, value] : more) options[key] = value;
  const CompleteConfig config(context.desc(), options);
  const Outcome outcome = outcome_of([&](graft_error* e) {
    return factory.create(context.desc().id, layer.c(), config.c(), &handle_, e);
  });
  if (!outcome.ok() && &layer != &small_layer())
    skip("refuses the layer '", layer.name, "': ", outcome.text());
  must(outcome, "create");
  if (handle_ == nullptr || handle_->v == nullptr) fail("create answers OK and gives no mixer");
  const graft_param_spec* const* specs = nullptr;
  std::uint32_t n = 0;
  must(outcome_of([&](graft_error* e) { return handle_->v->param_specs(handle_, &specs, &n, e); }),
       "param_specs");
  if (n > 0 && specs == nullptr)
    fail("param_specs announces ", n, " parameters and gives none (NULL)");
  specs_.assign(specs, specs + n);
}

Mixer::~Mixer() {
  if (handle_ != nullptr) handle_->v->destroy(handle_);
}

std::vector<Tensor> Mixer::default_params(DLDataType x_dtype, Random& random) const {
  std::vector<Tensor> out;
  for (const graft_param_spec* const spec : specs_) {
    Tensor& tensor = out.emplace_back(
        param_dtype(x_dtype), std::vector<std::int64_t>(spec->shape, spec->shape + spec->ndim));
    for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.set(i, default_value(*spec, i, random));
  }
  return out;
}

std::vector<Tensor> Mixer::random_params(DLDataType x_dtype, Random& random) const {
  std::vector<Tensor> out = default_params(x_dtype, random);
  for (std::size_t p = 0; p < out.size(); ++p) {
    if ((specs_[p]->flags & GRAFT_P_TRAINABLE) == 0) continue;
    const double size = specs_[p]->ndim < 2 ? 0.3 : 0.8 / std::sqrt(fan_in(*specs_[p]));
    for (std::int64_t i = 0; i < out[p].size(); ++i)
      out[p].set(i, out[p].at(i) + size * random.normal());
  }
  return out;
}

MixerInputs Mixer::random_inputs(std::int64_t batch, std::int64_t tokens, DLDataType dtype,
                                 Random& random) const {
  MixerInputs in;
  in.params = random_params(dtype, random);
  const std::vector<std::int64_t> shape{batch, tokens, layer_.info.model_dim};
  in.x = Tensor(dtype, shape, random.normals(batch * tokens * layer_.info.model_dim));
  return in;
}

std::vector<Tensor> Mixer::zero_state(std::int64_t batch, DLDataType dtype) {
  std::vector<Tensor> out = tensors_of(plan(batch, 1, dtype).state);
  for (Tensor& state : out) state.fill(0);
  return out;
}

Outcome Mixer::try_plan(std::int64_t batch, std::int64_t tokens, DLDataType dtype,
                        std::uint64_t flags, Plan* out) {
  graft_plan_in in{};
  in.struct_size = sizeof in;
  in.device_type = kDLCPU;
  in.dtype = dtype;
  in.flags = flags;
  in.batch = batch;
  in.tokens = tokens;
  graft_plan_out answer{};
  answer.struct_size = sizeof answer;
  const Outcome outcome =
      outcome_of([&](graft_error* e) { return handle_->v->plan(handle_, &in, &answer, e); });
  if (!outcome.ok()) return outcome;
  out->saved = read_specs(answer.saved, answer.n_saved, "saved");
  out->state = read_specs(answer.state, answer.n_state, "state");
  out->taps = read_specs(answer.taps, answer.n_taps, "tap");
  out->workspace_forward = answer.workspace_forward;
  out->workspace_backward = answer.workspace_backward;
  out->workspace_step = answer.workspace_step;
  return outcome;
}

Plan Mixer::plan(std::int64_t batch, std::int64_t tokens, DLDataType dtype, std::uint64_t flags) {
  Plan out;
  must(try_plan(batch, tokens, dtype, flags, &out),
       sdk::cat("plan for ", batch, " x ", tokens, " tokens of ", sdk::dtype_name(dtype)));
  return out;
}

MixerOutputs Mixer::allocate(const MixerInputs& in, const Plan& sizes) const {
  MixerOutputs out;
  out.y = Tensor(in.x.dtype(), in.x.shape());
  if (in.want_state && context_.has(GRAFT_CAP_STATE_IO)) out.state = tensors_of(sizes.state);
  if (in.want_taps) out.taps = tensors_of(sizes.taps);
  if ((in.flags & GRAFT_X_TRAINING) != 0) out.saved = tensors_of(sizes.saved);
  return out;
}

void Mixer::fill(Call& call, const MixerInputs& in, MixerOutputs& out, const Plan& sizes,
                 std::uint64_t workspace) const {
  call.workspace =
      Tensor(sdk::uint8, {static_cast<std::int64_t>((workspace + 255) / 256 * 256 + 256)});
  call.exec.struct_size = sizeof call.exec;
  call.exec.device_type = kDLCPU;
  call.exec.flags = in.flags;
  call.exec.workspace_bytes = workspace;
  call.exec.seed = context_.seed;
  // 256-aligned, as the ABI promises.
  const auto address = reinterpret_cast<std::uintptr_t>(call.workspace.c()->data);
  call.exec.workspace =
      workspace == 0 ? nullptr : reinterpret_cast<void*>((address + 255) / 256 * 256);
  call.params = pointers(in.params);
  call.state_in = pointers(in.state);
  call.state_out = pointers<DLTensor>(out.state);
  call.saved = pointers<DLTensor>(out.saved);
  call.taps = pointers<DLTensor>(out.taps);
  const auto list = [](auto& of) { return of.empty() ? nullptr : of.data(); };
  graft_mixer_forward& args = call.args;
  args.struct_size = sizeof args;
  args.n_params = static_cast<std::uint32_t>(call.params.size());
  args.n_state = static_cast<std::uint32_t>(sizes.state.size());
  args.n_saved = static_cast<std::uint32_t>(sizes.saved.size());
  args.n_taps = static_cast<std::uint32_t>(sizes.taps.size());
  args.x = in.x_view == nullptr ? in.x.c() : in.x_view;
  args.y = out.y.c();
  args.positions = in.positions.c();
  args.pad_mask = in.pad_mask.c();
  args.seq_offsets = in.seq_offsets.c();
  args.params = list(call.params);
  args.state_in = list(call.state_in);
  args.state_out = list(call.state_out);
  args.saved = list(call.saved);
  args.taps = list(call.taps);
}

Outcome Mixer::try_forward(Call& call) {
  return outcome_of(
      [&](graft_error* e) { return handle_->v->forward(handle_, &call.exec, &call.args, e); });
}

namespace {

// The rest of the workspace's tensor is guard too.
void check_workspace(const Mixer::Call& call) {
  check_intact(call.workspace, "the workspace");
  const auto bytes = call.workspace.bytes();
  const auto* const start = static_cast<const std::byte*>(call.exec.workspace);
  const std::byte* const end = start == nullptr ? bytes.data() : start + call.exec.workspace_bytes;
  for (const std::byte* p = end; p < bytes.data() + bytes.size(); ++p) {
    if (*p != std::byte{0xFF})
      fail("writes past the end of the workspace of ", call.exec.workspace_bytes, " bytes");
  }
}

}  // namespace

MixerOutputs Mixer::run(const MixerInputs& in, bool step) {
  const Plan sizes = plan(in.batch(), in.tokens(), in.x.dtype(), in.flags);
  MixerOutputs out = allocate(in, sizes);
  Call call;
  fill(call, in, out, sizes, step ? sizes.workspace_step : sizes.workspace_forward);
  const Unchanged unchanged(in);
  const auto function = step ? handle_->v->step : handle_->v->forward;
  must(outcome_of([&](graft_error* e) { return function(handle_, &call.exec, &call.args, e); }),
       step ? "step" : "forward");
  unchanged.check();
  check_workspace(call);
  check_intact(out.y, "y");
  check_intact(out.state, "state_out");
  check_intact(out.taps, "tap");
  check_intact(out.saved, "saved");
  return out;
}

MixerOutputs Mixer::forward(const MixerInputs& in) { return run(in, false); }

MixerOutputs Mixer::step(const MixerInputs& in) { return run(in, true); }

Gradients Mixer::backward(const MixerInputs& in, const MixerOutputs& kept, const Cotangents& from) {
  const std::uint64_t accumulate = from.accumulate_onto.empty() ? 0 : GRAFT_X_ACCUMULATE;
  const Plan sizes = plan(in.batch(), in.tokens(), in.x.dtype(), in.flags);
  Gradients out;
  if (from.want_dx) out.dx = Tensor(in.x.dtype(), in.x.shape());
  for (std::size_t i = 0; i < in.params.size(); ++i) {
    const bool frozen = !from.want_dparams || (!from.frozen.empty() && from.frozen[i]) ||
                        (specs_[i]->flags & GRAFT_P_TRAINABLE) == 0;
    out.dparams.push_back(frozen            ? Tensor()
                          : accumulate != 0 ? from.accumulate_onto[i].copy()
                                            : Tensor(in.params[i].dtype(), in.params[i].shape()));
  }
  if (from.want_dstate && context_.has(GRAFT_CAP_STATEFUL_GRAD)) {
    for (const Tensor& state : in.state)
      out.dstate.push_back(state.floating() ? Tensor(state.dtype(), state.shape()) : Tensor());
  }
  MixerOutputs none;
  Call call;
  fill(call, in, none, sizes, sizes.workspace_backward);
  call.exec.flags |= accumulate;
  std::vector<Tensor> saved = copies(kept.saved);
  call.saved = pointers<DLTensor>(saved);
  call.args.saved = call.saved.empty() ? nullptr : call.saved.data();
  std::vector<const DLTensor*> dstate_out = pointers(from.dstate), dtaps = pointers(from.dtaps);
  std::vector<DLTensor*> dparams = pointers<DLTensor>(out.dparams),
                         dstate_in = pointers<DLTensor>(out.dstate);
  graft_mixer_backward args{};
  args.struct_size = sizeof args;
  args.fwd = &call.args;
  args.dy = from.dy_view == nullptr ? from.dy.c() : from.dy_view;
  args.dstate_out = dstate_out.empty() ? nullptr : dstate_out.data();
  args.dtaps = dtaps.empty() ? nullptr : dtaps.data();
  args.dx = out.dx.c();
  args.dparams = dparams.empty() || !from.want_dparams ? nullptr : dparams.data();
  args.dstate_in = dstate_in.empty() ? nullptr : dstate_in.data();
  const Unchanged unchanged(in);
  const Tensor dy_before = from.dy.copy();
  must(outcome_of(
           [&](graft_error* e) { return handle_->v->backward(handle_, &call.exec, &args, e); }),
       "backward");
  unchanged.check();
  if (!from.dy.same_bytes(dy_before)) fail("changes its input dy");
  check_workspace(call);
  check_intact(out.dx, "dx");
  check_intact(out.dparams, "dparams");
  check_intact(out.dstate, "dstate_in");
  return out;
}

bool offers(const Context& context, DLDataType dtype) {
  const graft_desc& desc = context.desc();
  return std::any_of(desc.dtypes, desc.dtypes + desc.n_dtypes,
                     [&](DLDataType d) { return sdk::same_dtype(d, dtype); });
}

std::vector<DLDataType> exact_dtypes(const Context& context) {
  const DLDataType exact = exact_dtype(context);
  std::vector<DLDataType> out{exact};
  if (!sdk::same_dtype(exact, sdk::float32) && offers(context, sdk::float32))
    out.push_back(sdk::float32);
  return out;
}

DLDataType exact_dtype(const Context& context) {
  if (offers(context, sdk::float64)) return sdk::float64;
  if (offers(context, sdk::float32)) return sdk::float32;
  skip("computes in neither float64 nor float32");
}

}  // namespace graft::conformance
