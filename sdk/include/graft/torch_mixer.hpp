// A token mixer written with LibTorch: its author declares parameters, states and taps and writes
// one function from tensors to tensors; the backward pass comes from autograd inside the plugin.
//
//   class LinearAttention final : public graft::sdk::TorchMixer {
//    public:
//     void param_specs(graft::sdk::ParamSpecs& specs) override { specs.add("q_proj.weight", ...); }
//     void tensors(const graft_plan_in& in, graft::sdk::Plan& plan) override {
//       plan.state.add("state", "batch,heads,key,value", {in.batch, heads_, dk_, dv_}, float32);
//     }
//     TorchOutput compute(const TorchInput& in) override {
//       const at::Tensor q = at::linear(in.x, in.param("q_proj.weight")); ...
//       return {.y = y, .state = {state}};
//     }
//   };
//
// What crosses the ABI are still borrowed DLTensors: inputs are seen through views (no copy, any
// strides), outputs are copied into the host's tensors once. compute() allocates with LibTorch as
// it likes; no workspace is asked for.
//
// The backward pass needs the graph of the forward pass. By default it runs compute() again on the
// same inputs: one forward more, no memory between the calls. A mixer constructed with
// Activations::kept keeps the graph of the last training forward instead, for as long as it is the
// last one: a saved tensor "ticket" tells backward() whether the graph is the one it asks for, and
// when it is not (another forward came between, the tensors moved) compute() runs again. Both ways
// give the same gradients.
//
// Gradients flow to x, to trainable parameters, to the incoming state, and from y, from the
// outgoing state and from taps. A NULL gradient is not computed: without dx and with frozen
// parameters a backward is that much cheaper. An input that does not reach any output gets zeros.
// Second derivatives are not offered. So a TorchMixer may claim GRAFT_CAP_BACKWARD, STEP, STRIDED
// TAPS_ONLY and, where its compute() does its part, STATE_IO, STATEFUL_GRAD and PAD_MASK. No global
// random numbers: a mixer that wants some makes a generator from TorchInput::exec's seed and
// offset.
//
// CPU tensors of float32, float64, float16 and bfloat16. Needs LibTorch 2.8 or newer; plugins that
// include this are tied to the LibTorch they were built with (GRAFT_BUILD_TAGS).
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "graft/plugin.hpp"

namespace graft::sdk {

// ---------------------------------------------------------------- DLTensor and at::Tensor

inline at::ScalarType scalar_type(DLDataType dtype, std::string_view name) {
  static constexpr std::pair<DLDataType, at::ScalarType> known[] = {
      {float64, at::kDouble},    {float32, at::kFloat},       {float16, at::kHalf},
      {bfloat16, at::kBFloat16}, {int64, at::kLong},          {int32, at::kInt},
      {uint8, at::kByte},        {{kDLBool, 8, 1}, at::kBool}};
  for (const auto& [ours, theirs] : known) {
    if (same_dtype(dtype, ours)) return theirs;
  }
  throw Status(GRAFT_UNIMPLEMENTED, cat("tensor:", name),
               cat("dtype ", dtype_name(dtype), " is not supported"));
}

// The memory of a DLTensor as an at::Tensor, without a copy; valid as long as the memory is. Throws
// a Status with where = "tensor:<name>" for a dtype or device it cannot show.
inline at::Tensor torch_view(const DLTensor& tensor, std::string_view name) {
  check_device(tensor, name, kDLCPU);
  const auto type = scalar_type(tensor.dtype, name);
  const at::IntArrayRef shape(tensor.shape, static_cast<std::size_t>(tensor.ndim));
  if (numel(tensor) == 0) return at::empty(shape, type);
  if (tensor.data == nullptr) {
    throw Status(GRAFT_INVALID_ARGUMENT, cat("tensor:", name),
                 cat("has no data for shape ", shape_string(tensor)));
  }
  std::vector<int64_t> strides;
  for (int32_t i = 0; i < tensor.ndim; ++i) strides.push_back(stride_of(tensor, i));
  return at::from_blob(data_address(tensor), shape, strides, type);
}

// ---------------------------------------------------------------- what an author sees

struct TorchInput {
  at::Tensor x;                   // [B,T,model]
  std::vector<at::Tensor> state;  // as declared in tensors(); empty = zero state
  at::Tensor positions;           // [B,T] int64; undefined = the host gave none
  at::Tensor pad_mask;            // [B,T] bool, true = real; undefined = all real
  bool want_y = true;             // false: the host reads taps and state only (CAP_TAPS_ONLY)
  bool want_state = false;        // the host will read the outgoing state
  bool training = false;          // GRAFT_X_TRAINING
  graft_exec exec{};

  // The parameter of that name as the host holds it (a GRAFT_P_FP32 one is float32 whatever x is).
  const at::Tensor& param(std::string_view name) const {
    const auto found = specs->find(name);
    if (!found) throw Status(GRAFT_INTERNAL, cat("param:", name), "is not one of this mixer's");
    return params[*found];
  }
  // The same in x's dtype: a weight of a matrix product.
  at::Tensor weight(std::string_view name) const { return param(name).to(x.scalar_type()); }
  bool has_param(std::string_view name) const { return specs->find(name).has_value(); }
  // Is the i-th tap of tensors() asked for?
  bool want_tap(std::size_t i) const { return i < wanted_taps.size() && wanted_taps[i]; }

  const ParamSpecs* specs = nullptr;
  std::vector<at::Tensor> params;  // in param_specs order
  std::vector<bool> wanted_taps;
};

struct TorchOutput {  // defaults, so that {.y = y} draws no warning
  at::Tensor y = {};  // [B,T,model], any floating dtype; undefined unless want_y
  std::vector<at::Tensor> state =
      {};  // in the order of tensors(); may be left empty unless want_state
  std::vector<at::Tensor> taps = {};  // likewise; entries that are not wanted may be undefined
};

enum class Activations {
  recomputed,  // backward() runs compute() again
  kept,        // the graph of the last training forward is kept until its backward
};

class TorchMixer : public Mixer {
 public:
  explicit TorchMixer(Activations activations = Activations::recomputed)
      : activations_(activations) {}

  // Declares plan.state and plan.taps for calls of this size; saved tensors and workspace are the
  // base's affair.
  virtual void tensors(const graft_plan_in& in, Plan& plan) = 0;
  // The mixer itself. Differentiable LibTorch operations (or torch::autograd::Function) on its
  // arguments; must not change them in place, and must not keep them.
  virtual TorchOutput compute(const TorchInput& in) = 0;

  void plan(const graft_plan_in& in, Plan& out) final;
  void forward(const graft_exec& exec, const graft_mixer_forward& call) final;
  void backward(const graft_exec& exec, const graft_mixer_backward& call) final;
  // A forward over one token that starts from a state; compute() sees T == 1.
  void step(const graft_exec& exec, const graft_mixer_forward& call) override {
    forward(exec, call);
  }

 private:
  // The graph of one call: its leaves and what grew from them.
  struct Graph {
    TorchInput in;
    TorchOutput out;
    std::vector<const void*> memory;  // of the leaves
  };

  TorchInput view_inputs(const graft_exec& exec, const graft_mixer_forward& call) const;
  void check_call(const graft_exec& exec, const graft_mixer_forward& call) const;
  static void check_outputs(const DLTensor* const* tensors,
                            const std::vector<const graft_tensor_spec*>& specs,
                            std::string_view name);
  void check_gradients(const graft_mixer_backward& call) const;
  static std::vector<const void*> memory_of(const TorchInput& in);
  TorchOutput compute_checked(const TorchInput& in);
  Graph build_graph(TorchInput in);
  Graph graph_for_backward(TorchInput in, const graft_mixer_forward& call);
  static void write_outputs(const TorchOutput& out, const graft_mixer_forward& call);
  void keep(Graph graph, DLTensor* const* saved);

  const Activations activations_;
  graft_plan_in planned_for_{};
  Plan planned_;
  std::vector<const graft_tensor_spec*> state_specs_, tap_specs_;  // point into planned_
  int64_t last_ticket_ = 0;
  std::optional<Graph> kept_;
};

// ---------------------------------------------------------------- below the surface

namespace detail {

inline at::Tensor leaf(const at::Tensor& view, bool wants_gradient) {
  at::Tensor x = view.detach();
  if (wants_gradient && at::isFloatingType(x.scalar_type())) x.requires_grad_(true);
  return x;
}

inline void copy_out(const at::Tensor& from, DLTensor& to, std::string_view name) {
  const at::Tensor target = torch_view(to, name);
  if (from.sizes() != target.sizes()) {
    throw Status(GRAFT_INTERNAL, cat("tensor:", name),
                 cat("the mixer computed shape ", shape_string(from.sizes()), ", the host's has ",
                     shape_string(to)));
  }
  target.copy_(from.detach());
}

// `gradient` undefined: zero.
inline void write_gradient(const at::Tensor& gradient, bool accumulate, DLTensor& to,
                           std::string_view name) {
  const at::Tensor target = torch_view(to, name);
  if (accumulate) {
    if (gradient.defined()) target.add_(gradient);
  } else if (gradient.defined()) {
    target.copy_(gradient);
  } else {
    target.zero_();
  }
}

inline DLTensor* entry(DLTensor* const* tensors, std::size_t i) noexcept {
  return tensors == nullptr ? nullptr : tensors[i];
}
inline const DLTensor* entry(const DLTensor* const* tensors, std::size_t i) noexcept {
  return tensors == nullptr ? nullptr : tensors[i];
}

// The outputs that a gradient came for, with those gradients.
struct Cotangents {
  std::vector<at::Tensor> outputs, gradients;

  void add(const std::vector<at::Tensor>& from, std::size_t i, const DLTensor* gradient,
           std::string_view name) {
    if (gradient == nullptr || i >= from.size() || !from[i].defined() || !from[i].requires_grad()) {
      return;
    }
    outputs.push_back(from[i]);
    gradients.push_back(torch_view(*gradient, name).to(from[i].scalar_type()));
  }
};

// The inputs whose gradient the host wants, and where it goes.
struct Wanted {
  struct Target {
    DLTensor* tensor;
    bool accumulate;
    std::string name;
    std::optional<std::size_t> input;  // position in `inputs`; none: the input has no gradient
  };
  std::vector<at::Tensor> inputs;
  std::vector<Target> targets;

  void add(const at::Tensor& input, DLTensor* target, bool accumulate, std::string name) {
    if (target == nullptr) return;
    std::optional<std::size_t> position;
    if (input.defined() && input.requires_grad()) {
      position = inputs.size();
      inputs.push_back(input);
    }
    targets.push_back({target, accumulate, std::move(name), position});
  }

  void write(const std::vector<at::Tensor>& gradients) const {
    for (const auto& t : targets) {
      const bool has = t.input && *t.input < gradients.size();
      write_gradient(has ? gradients[*t.input] : at::Tensor(), t.accumulate, *t.tensor, t.name);
    }
  }
};

}  // namespace detail

inline void TorchMixer::plan(const graft_plan_in& in, Plan& out) {
  if (in.device_type != kDLCPU) {
    throw Status(GRAFT_UNIMPLEMENTED, "plan.device_type",
                 cat("this mixer runs on the CPU, not on device type ", in.device_type));
  }
  planned_for_ = in;
  planned_ = Plan{};
  tensors(in, planned_);
  const auto state_specs = planned_.state.c(), tap_specs = planned_.taps.c();
  state_specs_.assign(state_specs.begin(), state_specs.end());
  tap_specs_.assign(tap_specs.begin(), tap_specs.end());
  out = planned_;
  if (activations_ == Activations::kept && (in.flags & GRAFT_X_TRAINING) != 0) {
    out.saved.add("ticket", "one", {1}, int64, "which kept graph belongs to this forward");
  }
}

inline void TorchMixer::check_call(const graft_exec& exec, const graft_mixer_forward& call) const {
  if (exec.device_type != kDLCPU) {
    throw Status(GRAFT_UNIMPLEMENTED, "exec.device_type",
                 cat("this mixer runs on the CPU, not on device type ", exec.device_type));
  }
  if (call.seq_offsets != nullptr) {
    throw Status(GRAFT_UNIMPLEMENTED, "tensor:seq_offsets", "packed sequences are not supported");
  }
  const DLTensor& x = require(call.x, "x");
  check_shape(x, "x", {planned_for_.batch, planned_for_.tokens, -1});
  check_dtype(x, "x", planned_for_.dtype);
  for (const auto& [tensor, name, dtype] : {std::tuple(call.positions, "positions", int64),
                                            std::tuple(call.pad_mask, "pad_mask", uint8)}) {
    if (tensor == nullptr) continue;
    check_shape(*tensor, name, {planned_for_.batch, planned_for_.tokens});
    check_dtype(*tensor, name, dtype);
    check_device(*tensor, name, kDLCPU);
  }
  // What is written only after everything was computed: wrong outputs are told before.
  if (call.y != nullptr) {
    check_shape(*call.y, "y", {x.shape, static_cast<std::size_t>(x.ndim)});
    check_dtype(*call.y, "y", planned_for_.dtype);
    check_device(*call.y, "y", kDLCPU);
  }
  check_outputs(call.state_out, state_specs_, "state_out");
  check_outputs(call.taps, tap_specs_, "taps");
}

inline void TorchMixer::check_outputs(const DLTensor* const* tensors,
                                      const std::vector<const graft_tensor_spec*>& specs,
                                      std::string_view name) {
  if (tensors == nullptr) return;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (tensors[i] == nullptr) continue;
    const graft_tensor_spec& spec = *specs[i];
    check_shape(*tensors[i], name, {spec.shape, static_cast<std::size_t>(spec.ndim)});
    check_dtype(*tensors[i], name, spec.dtype);
    check_device(*tensors[i], name, kDLCPU);
  }
}

// Views of everything that goes into one call.
inline TorchInput TorchMixer::view_inputs(const graft_exec& exec,
                                          const graft_mixer_forward& call) const {
  check_call(exec, call);
  TorchInput in;
  in.exec = exec;
  in.training = (exec.flags & GRAFT_X_TRAINING) != 0;
  in.specs = &specs();
  in.x = torch_view(*call.x, "x");
  for (std::size_t i = 0; i < specs().size(); ++i) {
    const ParamSpec& spec = specs()[i];
    const DLTensor& param = require(call.params[i], spec.name());
    check_shape(param, spec.name(), spec.shape());
    check_dtype(param, spec.name(), same_dtype(planned_for_.dtype, float64) ? float64 : float32);
    in.params.push_back(torch_view(param, spec.name()));
  }
  if (call.state_in != nullptr) {
    for (const graft_tensor_spec* const spec : state_specs_) {
      const std::size_t i = in.state.size();
      const DLTensor& state = require(call.state_in[i], spec->name);
      check_shape(state, spec->name, {spec->shape, static_cast<std::size_t>(spec->ndim)});
      check_dtype(state, spec->name, spec->dtype);
      in.state.push_back(torch_view(state, spec->name));
    }
  }
  if (call.positions != nullptr)
    in.positions = torch_view(*call.positions, "positions").to(at::kLong);
  if (call.pad_mask != nullptr) in.pad_mask = torch_view(*call.pad_mask, "pad_mask").ne(0);
  in.want_y = call.y != nullptr;
  in.want_state = call.state_out != nullptr;
  for (uint32_t i = 0; i < call.n_taps; ++i) {
    in.wanted_taps.push_back(detail::entry(call.taps, i) != nullptr);
  }
  return in;
}

inline std::vector<const void*> TorchMixer::memory_of(const TorchInput& in) {
  std::vector<const void*> memory{in.x.const_data_ptr()};
  for (const auto& tensor : in.params) memory.push_back(tensor.const_data_ptr());
  for (const auto& tensor : in.state) memory.push_back(tensor.const_data_ptr());
  return memory;
}

inline TorchOutput TorchMixer::compute_checked(const TorchInput& in) {
  TorchOutput out = compute(in);
  const auto complete = [](const char* what, std::size_t got, std::size_t declared) {
    if (got == declared) return;
    throw Status(GRAFT_INTERNAL, what, cat("the mixer declared ", declared, " and computed ", got));
  };
  if (in.want_y && !out.y.defined())
    throw Status(GRAFT_INTERNAL, "tensor:y", "the mixer computed no output");
  if (in.want_state) complete("state", out.state.size(), planned_.state.size());
  for (std::size_t i = 0; i < in.wanted_taps.size(); ++i) {
    if (in.want_tap(i)) complete("taps", out.taps.size(), planned_.taps.size());
  }
  return out;
}

inline TorchMixer::Graph TorchMixer::build_graph(TorchInput in) {
  Graph graph;
  graph.memory = memory_of(in);
  in.x = detail::leaf(in.x, true);
  for (std::size_t i = 0; i < in.params.size(); ++i)
    in.params[i] = detail::leaf(in.params[i], true);
  for (auto& state : in.state) state = detail::leaf(state, true);
  const c10::InferenceMode no_inference(false);
  const c10::AutoGradMode with_gradients(true);
  graph.out = compute_checked(in);
  graph.in = std::move(in);
  return graph;
}

inline void TorchMixer::write_outputs(const TorchOutput& out, const graft_mixer_forward& call) {
  const at::NoGradGuard no_gradients;
  if (call.y != nullptr) detail::copy_out(out.y, *call.y, "y");
  for (std::size_t i = 0; call.state_out != nullptr && i < out.state.size(); ++i) {
    if (call.state_out[i] != nullptr)
      detail::copy_out(out.state[i], *call.state_out[i], "state_out");
  }
  for (std::size_t i = 0; i < out.taps.size() && i < call.n_taps; ++i) {
    DLTensor* const tap = detail::entry(call.taps, i);
    if (tap != nullptr) detail::copy_out(out.taps[i], *tap, "tap");
  }
}

inline void TorchMixer::keep(Graph graph, DLTensor* const* saved) {
  data<int64_t>(require(saved[0], "ticket"), "ticket")[0] = ++last_ticket_;
  kept_ = std::move(graph);
}

inline void TorchMixer::forward(const graft_exec& exec, const graft_mixer_forward& call) {
  TorchInput in = view_inputs(exec, call);
  kept_.reset();
  if (activations_ == Activations::kept && in.training && call.saved != nullptr &&
      call.n_saved > 0) {
    in.want_state = true;  // dstate_out may come in spite of no state_out
    check_shape(require(call.saved[0], "ticket"), "ticket", {1});
    check_dtype(*call.saved[0], "ticket", int64);
    Graph graph = build_graph(std::move(in));
    write_outputs(graph.out, call);
    keep(std::move(graph), call.saved);
    return;
  }
  const at::NoGradGuard no_gradients;
  write_outputs(compute_checked(in), call);
}

// The kept graph when it is the one of this forward, else a new one.
inline TorchMixer::Graph TorchMixer::graph_for_backward(TorchInput in,
                                                        const graft_mixer_forward& call) {
  const bool ours = kept_ && call.saved != nullptr && call.n_saved > 0 &&
                    data<int64_t>(require(call.saved[0], "ticket"), "ticket")[0] == last_ticket_ &&
                    kept_->memory == memory_of(in);
  if (!ours) return build_graph(std::move(in));
  Graph graph = std::move(*kept_);
  kept_.reset();
  return graph;
}

// Each gradient is of the shape and type of what it belongs to.
inline void TorchMixer::check_gradients(const graft_mixer_backward& call) const {
  const graft_mixer_forward& fwd = *call.fwd;
  const auto as = [](const DLTensor* gradient, const DLTensor& of, std::string_view name) {
    if (gradient == nullptr) return;
    check_shape(*gradient, name, {of.shape, static_cast<std::size_t>(of.ndim)});
    check_dtype(*gradient, name, of.dtype);
    check_device(*gradient, name, kDLCPU);
  };
  as(&require(call.dy, "dy"), *fwd.x, "dy");
  as(call.dx, *fwd.x, "dx");
  for (std::size_t i = 0; i < specs().size(); ++i) {
    as(detail::entry(call.dparams, i), *fwd.params[i], cat("d", specs()[i].name()));
  }
  check_outputs(call.dstate_in, state_specs_, "dstate_in");
  check_outputs(call.dstate_out, state_specs_, "dstate_out");
  check_outputs(call.dtaps, tap_specs_, "dtaps");
}

inline void TorchMixer::backward(const graft_exec& exec, const graft_mixer_backward& call) {
  const graft_mixer_forward& fwd = *call.fwd;
  TorchInput in = view_inputs(exec, fwd);
  check_gradients(call);
  // The graph has to reach as far as gradients come from.
  in.want_y = true;
  in.want_state = call.dstate_out != nullptr;
  in.wanted_taps.assign(planned_.taps.size(), false);
  for (std::size_t i = 0; i < in.wanted_taps.size() && i < fwd.n_taps; ++i) {
    in.wanted_taps[i] = detail::entry(call.dtaps, i) != nullptr;
  }
  const Graph graph = graph_for_backward(std::move(in), fwd);
  detail::Cotangents from;
  from.add({graph.out.y}, 0, &require(call.dy, "dy"), "dy");
  for (std::size_t i = 0; i < planned_.state.size(); ++i) {
    from.add(graph.out.state, i, detail::entry(call.dstate_out, i), "dstate_out");
  }
  for (std::size_t i = 0; i < planned_.taps.size() && i < fwd.n_taps; ++i) {
    from.add(graph.out.taps, i, detail::entry(call.dtaps, i), "dtaps");
  }
  detail::Wanted to;
  to.add(graph.in.x, call.dx, false, "dx");
  const bool accumulate = (exec.flags & GRAFT_X_ACCUMULATE) != 0;
  for (std::size_t i = 0; i < specs().size(); ++i) {
    to.add(graph.in.params[i], detail::entry(call.dparams, i), accumulate, specs()[i].name());
  }
  for (std::size_t i = 0; i < graph.in.state.size(); ++i) {
    to.add(graph.in.state[i], detail::entry(call.dstate_in, i), false, "dstate_in");
  }
  std::vector<at::Tensor> gradients;
  if (!from.outputs.empty() && !to.inputs.empty()) {
    const c10::InferenceMode no_inference(false);
    gradients =
        torch::autograd::grad(from.outputs, to.inputs, from.gradients, std::nullopt, false, true);
  }
  const at::NoGradGuard no_gradients;
  to.write(gradients);
}

}  // namespace graft::sdk
