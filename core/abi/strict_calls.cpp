#include "core/abi/strict_calls.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "core/abi/guarded_call.h"
#include "core/abi/strict.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

bool is_cpu(const graft_exec& exec) { return exec.device_type == kDLCPU; }

template <class Spec>
GuardedCall::NameOf names_of(const char* kind, std::span<const Spec* const> specs) {
  return [kind, specs](std::uint32_t i) { return kind + (" " + quoted(specs[i]->name)); };
}

bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// ---------------------------------------------------------------- the host's side of a mixer's
// call

class MixerPromises {
 public:
  MixerPromises(const std::string& who, const MixerShapes& shapes) : who_(who), shapes_(shapes) {}

  void check(const graft_exec& exec, const graft_mixer_forward& call) const {
    check_counts(call);
    if (call.x == nullptr) blame_host(who_, "x is NULL");
    if (call.params == nullptr && call.n_params > 0) blame_host(who_, "params is NULL");
    if (call.seq_offsets != nullptr) blame_host(who_, "seq_offsets is not NULL");
    needs(call.pad_mask == nullptr, GRAFT_CAP_PAD_MASK, "pad_mask", "GRAFT_CAP_PAD_MASK");
    needs(call.state_in == nullptr, GRAFT_CAP_STATE_IO, "state_in", "GRAFT_CAP_STATE_IO");
    needs(call.state_out == nullptr, GRAFT_CAP_STATE_IO, "state_out", "GRAFT_CAP_STATE_IO");
    const bool training = (exec.flags & GRAFT_X_TRAINING) != 0;
    if (training && call.saved == nullptr && call.n_saved > 0)
      blame_host(who_, "saved is NULL, but the call is one of training");
    check_params(call);
    check_all(call.state_in, shapes_.state, "state_in");
    check_all(call.state_out, shapes_.state, "state_out");
    check_all(call.saved, shapes_.saved, "saved");
    check_all(call.taps, shapes_.taps, "tap");
  }

  void needs(bool fine, std::uint64_t cap, const char* what, const char* cap_name) const {
    if (fine || (shapes_.caps & cap) != 0) return;
    blame_host(who_, std::string(what) + " is given to a mixer without " + cap_name);
  }

 private:
  void check_counts(const graft_mixer_forward& call) const {
    const auto equal = [&](std::uint32_t given, std::size_t expected, const char* name) {
      if (given == expected) return;
      blame_host(who_, std::string(name) + " is " + std::to_string(given) + "; there are " +
                           std::to_string(expected) + " by param_specs and the last plan");
    };
    equal(call.n_params, shapes_.params.size(), "n_params");
    equal(call.n_state, shapes_.state.size(), "n_state");
    equal(call.n_saved, shapes_.saved.size(), "n_saved");
    equal(call.n_taps, shapes_.taps.size(), "n_taps");
  }

  template <class Spec>
  void check_shape(const DLTensor& tensor, const Spec& spec, const char* kind) const {
    if (tensor.ndim == spec.ndim &&
        std::equal(tensor.shape, tensor.shape + tensor.ndim, spec.shape))
      return;
    blame_host(who_, std::string(kind) + " " + quoted(spec.name) +
                         " has another shape than the mixer asked for");
  }

  void check_params(const graft_mixer_forward& call) const {
    const bool wide = call.x->dtype.bits == 64;
    for (std::uint32_t i = 0; i < call.n_params; ++i) {
      const DLTensor* const tensor = call.params[i];
      const std::string name = "parameter " + quoted(shapes_.params[i]->name);
      if (tensor == nullptr) blame_host(who_, name + " is NULL");
      if (tensor->dtype.code != kDLFloat || tensor->dtype.bits != (wide ? 64 : 32))
        blame_host(who_, name + " is not " + (wide ? "float64, as x" : "float32"));
      check_shape(*tensor, *shapes_.params[i], "parameter");
    }
  }

  template <class Tensor>
  void check_all(Tensor* const* tensors, std::span<const graft_tensor_spec* const> specs,
                 const char* kind) const {
    for (std::size_t i = 0; tensors != nullptr && i < specs.size(); ++i) {
      if (tensors[i] == nullptr) continue;
      check_shape(*tensors[i], *specs[i], kind);
      if (!same_dtype(tensors[i]->dtype, specs[i]->dtype))
        blame_host(who_, std::string(kind) + " " + quoted(specs[i]->name) +
                             " has another type than the mixer asked for");
    }
  }

  const std::string& who_;
  const MixerShapes& shapes_;
};

// A forward's inputs on guarded copies; what it writes is NULL.
graft_mixer_forward guarded_inputs(GuardedCall& guard, const MixerShapes& shapes,
                                   const graft_mixer_forward& args) {
  graft_mixer_forward seen = args;
  seen.x = guard.input(args.x, "x");
  seen.positions = guard.input(args.positions, "positions");
  seen.pad_mask = guard.input(args.pad_mask, "pad_mask");
  seen.params = guard.inputs(args.params, args.n_params, names_of("parameter", shapes.params));
  seen.state_in = guard.inputs(args.state_in, args.n_state, names_of("state_in", shapes.state));
  seen.y = nullptr;
  seen.state_out = seen.saved = seen.taps = nullptr;
  return seen;
}

// ---------------------------------------------------------------- the plugin's side of an
// objective

// metric() as an objective sees it: called on run()'s thread, with one number.
class StrictMetric {
 public:
  explicit StrictMetric(const graft_objective_args& args) : host_(args) {}

  void install(graft_objective_args& args) {
    if (host_.metric == nullptr) return;
    args.metric_ctx = this;
    args.metric = [](void* ctx, const char* name, const DLTensor* scalar) {
      static_cast<StrictMetric*>(ctx)->metric(name, scalar);
    };
  }
  // What it did wrong, or "".
  const std::string& fault() const { return fault_; }

 private:
  void metric(const char* name, const DLTensor* scalar) {
    if (std::this_thread::get_id() != thread_) {
      fault_ = "calls metric() on another thread than run()'s";
    } else if (name == nullptr || scalar == nullptr || scalar->data == nullptr) {
      fault_ = "calls metric() without a name or number (NULL)";
    } else if (scalar->ndim != 0 || scalar->dtype.code != kDLFloat || scalar->dtype.bits < 32) {
      fault_ = "gives metric " + quoted(name) + " that is no scalar of float32 or float64";
    } else {
      host_.metric(host_.metric_ctx, name, scalar);
    }
  }

  const graft_objective_args& host_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::string fault_;
};

void check_signals(const std::string& who, std::span<const graft_signal_need> needs,
                   const graft_objective_args& args) {
  if (args.n_signals != needs.size())
    blame_host(who, "n_signals is " + std::to_string(args.n_signals) + "; the objective has " +
                        std::to_string(needs.size()) + " needs");
  if (args.loss == nullptr) blame_host(who, "loss is NULL");
  for (std::size_t i = 0; i < needs.size(); ++i)
    if ((needs[i].flags & GRAFT_NEED_REQUIRED) != 0 &&
        (args.signals == nullptr || args.signals[i] == nullptr))
      blame_host(who, "the signal " + quoted(needs[i].name) + " is not given");
}

}  // namespace

void strict_forward(const std::string& who, const MixerShapes& shapes, const graft_exec& exec,
                    const graft_mixer_forward& args, const ForwardCall& call) {
  const MixerPromises promises(who, shapes);
  promises.check(exec, args);
  promises.needs(args.y != nullptr, GRAFT_CAP_TAPS_ONLY, "y = NULL", "GRAFT_CAP_TAPS_ONLY");
  if (!is_cpu(exec)) return call(exec, args);

  GuardedCall guard(who);
  graft_mixer_forward seen = guarded_inputs(guard, shapes, args);
  seen.y = guard.output(args.y, "y");
  std::vector<DLTensor*> state_out;
  for (std::uint32_t i = 0; args.state_out != nullptr && i < args.n_state; ++i) {
    const DLTensor* const out = args.state_out[i];
    const DLTensor* const from = args.state_in == nullptr ? nullptr : args.state_in[i];
    const std::string name = "state_out " + quoted(shapes.state[i]->name);
    const bool in_place = out != nullptr && from != nullptr && out->data == from->data;
    state_out.push_back(in_place ? guard.inout(out, name) : guard.output(out, name));
  }
  if (args.state_out != nullptr) seen.state_out = state_out.data();
  seen.saved = guard.outputs(args.saved, args.n_saved, names_of("saved", shapes.saved));
  seen.taps = guard.outputs(args.taps, args.n_taps, names_of("tap", shapes.taps));
  graft_exec own = exec;
  own.workspace = guard.workspace(exec);
  call(own, seen);
  guard.finish();
}

void strict_backward(const std::string& who, const MixerShapes& shapes, const graft_exec& exec,
                     const graft_mixer_backward& args, const BackwardCall& call) {
  const MixerPromises promises(who, shapes);
  promises.check(exec, *args.fwd);
  if (args.dy == nullptr) blame_host(who, "dy is NULL");
  promises.needs(args.dstate_out == nullptr && args.dstate_in == nullptr, GRAFT_CAP_STATEFUL_GRAD,
                 "a gradient of the state", "GRAFT_CAP_STATEFUL_GRAD");
  if (!is_cpu(exec)) return call(exec, args);

  GuardedCall guard(who);
  const graft_mixer_forward& fwd = *args.fwd;
  graft_mixer_forward seen_fwd = guarded_inputs(guard, shapes, fwd);
  const auto saved = guard.inputs(fwd.saved, fwd.n_saved, names_of("saved", shapes.saved));
  seen_fwd.saved = const_cast<DLTensor* const*>(saved);
  graft_mixer_backward seen = args;
  seen.fwd = &seen_fwd;
  seen.dy = guard.input(args.dy, "dy");
  seen.dstate_out =
      guard.inputs(args.dstate_out, fwd.n_state, names_of("gradient of state_out", shapes.state));
  seen.dtaps = guard.inputs(args.dtaps, fwd.n_taps, names_of("gradient of tap", shapes.taps));
  seen.dx = guard.output(args.dx, "dx");
  const bool accumulate = (exec.flags & GRAFT_X_ACCUMULATE) != 0;
  const auto dparam = names_of("gradient of parameter", shapes.params);
  seen.dparams = accumulate ? guard.inouts(args.dparams, fwd.n_params, dparam)
                            : guard.outputs(args.dparams, fwd.n_params, dparam);
  seen.dstate_in =
      guard.outputs(args.dstate_in, fwd.n_state, names_of("gradient of state_in", shapes.state));
  graft_exec own = exec;
  own.workspace = guard.workspace(exec);
  call(own, seen);
  guard.finish();
}

void strict_params(const std::string& who, std::span<const graft_param_spec* const> specs,
                   std::span<DLTensor* const> params, const ParamsCall& call) {
  GuardedCall guard(who);
  DLTensor* const* const seen = guard.inouts(
      params.data(), static_cast<std::uint32_t>(params.size()), names_of("parameter", specs));
  call({seen, params.size()});
  guard.finish();
}

void strict_objective(const std::string& who, std::span<const graft_signal_need> needs,
                      const graft_exec& exec, const graft_objective_args& args,
                      const ObjectiveCall& call) {
  check_signals(who, needs, args);
  if (!is_cpu(exec)) return call(exec, args);
  GuardedCall guard(who);
  const auto name = [&](const char* kind) {
    return [=](std::uint32_t i) { return kind + quoted(needs[i].name); };
  };
  graft_objective_args seen = args;
  seen.signals = guard.inputs(args.signals, args.n_signals, name("signal "));
  seen.grads = guard.outputs(args.grads, args.n_signals, name("gradient of signal "));
  seen.loss = guard.output(args.loss, "the loss");
  StrictMetric metric(args);
  metric.install(seen);
  graft_exec own = exec;
  own.workspace = guard.workspace(exec);
  call(own, seen);
  if (!metric.fault().empty()) blame_plugin(who, metric.fault());
  guard.finish();
}

}  // namespace graft
