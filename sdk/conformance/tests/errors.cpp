// Wrong calls are refused, and say what is wrong; the next right call is as if nothing had been.
#include <algorithm>
#include <cstring>
#include <functional>

#include "kit/checks.h"
#include "kit/doing.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

constexpr std::int64_t kBatch = 2, kTokens = 11;

// What went wrong in many small attempts; shown together.
class Problems {
 public:
  template <class... Parts>
  void add(const Parts&... parts) {
    all_.push_back(sdk::cat(parts...));
  }
  void fail_if_any() const {
    if (all_.empty()) return;
    constexpr std::size_t kShown = 12;
    std::string text;
    for (std::size_t i = 0; i < std::min(kShown, all_.size()); ++i) text += "\n      " + all_[i];
    if (all_.size() > kShown) text += sdk::cat("\n      and ", all_.size() - kShown, " more");
    fail(all_.size(), all_.size() == 1 ? " problem:" : " problems:", text);
  }

 private:
  std::vector<std::string> all_;
};

void check_refusal(Problems& problems, const std::string& call, const Outcome& outcome) {
  if (outcome.ok()) return problems.add(call, " answers OK; expected a refusal");
  if (outcome.where.empty() || outcome.message.empty())
    problems.add(call, " is refused (", outcome.text(), ") without saying ",
                 outcome.where.empty() ? "where" : "why");
}

// ---------------------------------------------------------------- tensors that are not right

// A tensor's header that says something wrong of the same memory. It never covers more of it than
// guard zones can bear.
struct WrongTensor {
  std::string how;
  std::vector<std::int64_t> shape;
  DLDataType dtype;
  DLDevice device;

  DLTensor header(const DLTensor& right, std::vector<std::int64_t>& strides) {
    strides.assign(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    DLTensor out = right;
    out.ndim = static_cast<std::int32_t>(shape.size());
    out.shape = shape.data();
    out.strides = strides.data();
    out.dtype = dtype;
    out.device = device;
    return out;
  }
};

std::vector<WrongTensor> wrong_shapes(const DLTensor& right) {
  const std::vector<std::int64_t> shape(right.shape, right.shape + right.ndim);
  std::vector<WrongTensor> out;
  const auto add = [&](const char* how, std::vector<std::int64_t> wrong) {
    out.push_back({how, std::move(wrong), right.dtype, right.device});
  };
  std::vector<std::int64_t> more = shape;
  more.insert(more.begin(), 1);
  add("an axis too many", more);
  if (shape.empty()) return out;
  add("an axis too few", {shape.begin() + 1, shape.end()});
  std::vector<std::int64_t> shorter = shape;
  --shorter.front();
  add("a first axis too short by one", shorter);
  shorter = shape;
  --shorter.back();
  if (shape.size() > 1) add("a last axis too short by one", shorter);
  return out;
}

std::vector<WrongTensor> wrong_tensors(const DLTensor& right) {
  const std::vector<std::int64_t> shape(right.shape, right.shape + right.ndim);
  std::vector<WrongTensor> out = wrong_shapes(right);
  const bool real = right.dtype.code == kDLFloat || right.dtype.code == kDLBfloat;
  const DLDataType dtype = real ? sdk::int32 : sdk::float32;
  out.push_back({sdk::cat("dtype ", sdk::dtype_name(dtype)), shape, dtype, right.device});
  out.push_back({"a CUDA device", shape, right.dtype, {kDLCUDA, 0}});
  return out;
}

// One tensor of a call, and how to put another in its place.
struct Place {
  std::string name;
  const DLTensor* right;
  bool may_be_missing;
  std::function<void(const DLTensor*)> put;
};

template <class Slots>
void add_places(std::vector<Place>& out, const std::string& name, Slots& slots, bool optional) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    out.push_back({sdk::cat(name, " ", i), slots[i], optional, [&slots, i](const DLTensor* tensor) {
                     slots[i] = const_cast<DLTensor*>(tensor);
                   }});
  }
}

// ---------------------------------------------------------------- a right call, to be broken

// A forward pass with all that the mixer takes, and what it gave.
class Rig {
 public:
  explicit Rig(Context& context)
      : context_(context), mixer_(context), in_(inputs()), sizes_(plan()), out_(fresh()) {
    mixer_.fill(call_, in_, out_, sizes_, sizes_.workspace_forward);
    must(mixer_.try_forward(call_), "forward");
    expected_ = std::move(out_);
    out_ = fresh();
    mixer_.fill(call_, in_, out_, sizes_, sizes_.workspace_forward);
    before_ = in_.copy();
  }

  Mixer& mixer() { return mixer_; }
  const MixerInputs& in() const { return in_; }
  const Plan& sizes() const { return sizes_; }
  Mixer::Call& call() { return call_; }
  // What forward saved for a backward.
  MixerOutputs& expected() { return expected_; }

  std::vector<Place> places() {
    std::vector<Place> out;
    graft_mixer_forward& args = call_.args;
    const bool y_optional =
        context_.has(GRAFT_CAP_TAPS_ONLY) && (in_.flags & GRAFT_X_TRAINING) == 0;
    out.push_back({"x", args.x, false, [&](const DLTensor* t) { args.x = t; }});
    out.push_back(
        {"y", args.y, y_optional, [&](const DLTensor* t) { args.y = const_cast<DLTensor*>(t); }});
    out.push_back(
        {"positions", args.positions, true, [&](const DLTensor* t) { args.positions = t; }});
    if (args.pad_mask != nullptr)
      out.push_back(
          {"pad_mask", args.pad_mask, true, [&](const DLTensor* t) { args.pad_mask = t; }});
    add_places(out, "parameter", call_.params, false);
    add_places(out, "state_in", call_.state_in, false);
    add_places(out, "state_out", call_.state_out, true);
    add_places(out, "saved", call_.saved, false);
    add_places(out, "tap", call_.taps, true);
    return out;
  }

  // The call as it stands has to be refused, and to leave all else alone.
  void expect_refusal(Problems& problems, const std::string& how) {
    doing("forward with " + how);
    out_.y.poison();
    const Outcome outcome = mixer_.try_forward(call_);
    check_refusal(problems, "forward with " + how, outcome);
    if (!outcome.ok() && touched()) ++touched_;
    if (!out_.y.intact() || !all_intact(out_.state) || !all_intact(out_.saved) ||
        !all_intact(out_.taps))
      problems.add("forward with ", how, " writes past an output");
    if (!in_.x.same_bytes(before_.x)) problems.add("forward with ", how, " changes x");
  }

  // The right call, as if nothing had been.
  void expect_as_before(Problems& problems, const std::string& after) {
    doing("a right forward after one with " + after);
    const MixerOutputs again = mixer_.forward(in_);
    try {
      compare(again.y, expected_.y, "y");
      for (std::size_t i = 0; i < again.state.size(); ++i)
        compare(again.state[i], expected_.state[i], "state_out");
      for (std::size_t i = 0; i < again.taps.size(); ++i)
        compare(again.taps[i], expected_.taps[i], "a tap");
    } catch (const Failed& problem) {
      problems.add("after ", after, ", a right forward gives another result: ", problem.what());
    }
  }

  void note_touched() {
    if (touched_ > 0)
      context_.note(touched_, " refused calls had written to y first, which is allowed");
  }

 private:
  MixerInputs inputs() {
    Random random(context_.seed);
    MixerInputs in = mixer_.random_inputs(kBatch, kTokens, exact_dtype(context_), random);
    if (context_.has(GRAFT_CAP_BACKWARD)) in.flags |= GRAFT_X_TRAINING;
    if (context_.has(GRAFT_CAP_DETERMINISTIC)) in.flags |= GRAFT_X_DETERMINISTIC;
    in.positions = Tensor(sdk::int64, {kBatch, kTokens});
    for (std::int64_t i = 0; i < kBatch * kTokens; ++i)
      in.positions.set(i, static_cast<double>(i % kTokens));
    if (context_.has(GRAFT_CAP_PAD_MASK)) {
      in.pad_mask = Tensor(sdk::uint8, {kBatch, kTokens});
      in.pad_mask.fill(1);
    }
    if (!context_.has(GRAFT_CAP_STATE_IO)) return in;
    for (const Plan::Spec& spec : mixer_.plan(kBatch, kTokens, in.x.dtype(), in.flags).state) {
      in.state.emplace_back(spec.dtype, spec.shape);
      in.state.back().fill(0);
    }
    return in;
  }
  Plan plan() { return mixer_.plan(kBatch, kTokens, in_.x.dtype(), in_.flags); }
  MixerOutputs fresh() const { return mixer_.allocate(in_, sizes_); }

  static bool all_intact(const std::vector<Tensor>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.intact(); });
  }
  bool touched() const {
    const auto bytes = out_.y.bytes();
    return std::any_of(bytes.begin(), bytes.end(),
                       [](std::byte b) { return b != std::byte{0xFF}; });
  }
  void compare(const Tensor& got, const Tensor& wanted, const char* what) const {
    if (context_.has(GRAFT_CAP_DETERMINISTIC)) return check_equal(got, wanted, what);
    check_close(got, wanted, context_.tolerance * tolerance(in_.x.dtype(), kTokens), what);
  }

  Context& context_;
  Mixer mixer_;
  MixerInputs in_, before_;
  Plan sizes_;
  MixerOutputs out_, expected_;
  Mixer::Call call_;
  int touched_ = 0;
};

void tensors(Context& context) {
  Rig rig(context);
  Problems problems;
  for (const Place& place : rig.places()) {
    if (!place.may_be_missing) {
      place.put(nullptr);
      rig.expect_refusal(problems, place.name + " NULL");
    }
    for (WrongTensor& wrong : wrong_tensors(*place.right)) {
      std::vector<std::int64_t> strides;
      const DLTensor header = wrong.header(*place.right, strides);
      place.put(&header);
      rig.expect_refusal(problems, place.name + " with " + wrong.how);
    }
    place.put(place.right);
    rig.expect_as_before(problems, "wrong calls with " + place.name);
  }
  rig.note_touched();
  problems.fail_if_any();
}

void counts(Context& context) {
  Rig rig(context);
  Problems problems;
  Mixer::Call& call = rig.call();
  graft_mixer_forward& args = call.args;
  // One entry more than there are, so that nobody reads past an array.
  const auto extend = [](auto& list, auto& pointer) {
    if (list.empty()) return;
    list.push_back(list.back());
    pointer = list.data();
  };
  extend(call.params, args.params);
  extend(call.state_in, args.state_in);
  extend(call.state_out, args.state_out);
  extend(call.saved, args.saved);
  extend(call.taps, args.taps);
  for (const auto& [name, count] :
       {std::pair("n_params", &args.n_params), std::pair("n_state", &args.n_state),
        std::pair("n_saved", &args.n_saved), std::pair("n_taps", &args.n_taps)}) {
    const std::uint32_t right = *count;
    if (right == 0) continue;
    for (const std::uint32_t wrong : {right - 1, right + 1}) {
      *count = wrong;
      rig.expect_refusal(problems, sdk::cat(name, " = ", wrong, " (", right, " are right)"));
    }
    *count = right;
    rig.expect_as_before(problems, sdk::cat("a wrong ", name));
  }
  problems.fail_if_any();
}

void workspace(Context& context) {
  Rig rig(context);
  if (rig.sizes().workspace_forward == 0) skip("asks for no workspace");
  Problems problems;
  --rig.call().exec.workspace_bytes;
  rig.expect_refusal(problems, "a workspace one byte short");
  rig.expect_as_before(problems, "a short workspace");
  problems.fail_if_any();
}

// ---------------------------------------------------------------- plan

Outcome plan_with(const Mixer& mixer, const graft_plan_in& in) {
  graft_plan_out out{};
  out.struct_size = sizeof out;
  return outcome_of(
      [&](graft_error* e) { return mixer.get()->v->plan(mixer.get(), &in, &out, e); });
}

void check_unimplemented(Problems& problems, const std::string& call, const Outcome& outcome) {
  if (outcome.status != GRAFT_UNIMPLEMENTED) {
    problems.add(call, ": expected GRAFT_UNIMPLEMENTED (", GRAFT_UNIMPLEMENTED, "), got ",
                 outcome.text());
  } else if (outcome.message.empty()) {
    problems.add(call, " is refused without a message");
  }
}

bool declares(const graft_desc& desc, DLDeviceType device) {
  return std::find(desc.devices, desc.devices + desc.n_devices, device) !=
         desc.devices + desc.n_devices;
}

void plans(Context& context) {
  const Mixer mixer(context);
  Problems problems;
  graft_plan_in right{};
  right.struct_size = sizeof right;
  right.device_type = kDLCPU;
  right.dtype = exact_dtype(context);
  right.batch = kBatch;
  right.tokens = kTokens;
  for (const DLDataType dtype :
       {sdk::float16, sdk::bfloat16, sdk::float32, sdk::float64, sdk::int32}) {
    graft_plan_in in = right;
    in.dtype = dtype;
    if (!offers(context, dtype))
      check_unimplemented(problems,
                          sdk::cat("plan with dtype ", sdk::dtype_name(dtype), ", not declared"),
                          plan_with(mixer, in));
  }
  for (const DLDeviceType device : {kDLCUDA, kDLMetal}) {
    graft_plan_in in = right;
    in.device_type = device;
    if (!declares(context.desc(), device))
      check_unimplemented(
          problems, sdk::cat("plan with device type ", static_cast<int>(device), ", not declared"),
          plan_with(mixer, in));
  }
  for (const auto& [batch, tokens] :
       {std::pair<std::int64_t, std::int64_t>{-1, kTokens}, {kBatch, -1}}) {
    graft_plan_in in = right;
    in.batch = batch;
    in.tokens = tokens;
    check_refusal(problems, sdk::cat("plan for ", batch, " x ", tokens, " tokens"),
                  plan_with(mixer, in));
  }
  must(plan_with(mixer, right), "a right plan after wrong ones");
  problems.fail_if_any();
}

// ---------------------------------------------------------------- backward

// The arguments of a right backward, to be broken.
struct BackwardCall {
  Tensor dy, dx;
  std::vector<Tensor> gradients;
  std::vector<DLTensor*> dparams;
  Mixer::Call forward;
  MixerOutputs none;
  graft_mixer_backward args{};

  explicit BackwardCall(Context& context, Rig& rig) {
    Random random(context.seed + 1);
    const MixerInputs& in = rig.in();
    dy = Tensor(in.x.dtype(), in.x.shape(), random.normals(in.x.size()));
    dx = Tensor(in.x.dtype(), in.x.shape());
    gradients.reserve(in.params.size());  // pointers go into it
    for (std::size_t i = 0; i < in.params.size(); ++i) {
      const bool trainable = (rig.mixer().specs()[i]->flags & GRAFT_P_TRAINABLE) != 0;
      gradients.push_back(trainable ? Tensor(in.params[i].dtype(), in.params[i].shape())
                                    : Tensor());
      dparams.push_back(gradients.back().c());
    }
    rig.mixer().fill(forward, in, none, rig.sizes(), rig.sizes().workspace_backward);
    for (Tensor& saved : rig.expected().saved) forward.saved.push_back(saved.c());
    forward.args.saved = forward.saved.empty() ? nullptr : forward.saved.data();
    args.struct_size = sizeof args;
    args.fwd = &forward.args;
    args.dy = dy.c();
    args.dx = dx.c();
    args.dparams = dparams.empty() ? nullptr : dparams.data();
  }

  Outcome run(const Mixer& mixer) {
    graft_mixer* const handle = mixer.get();
    return outcome_of(
        [&](graft_error* e) { return handle->v->backward(handle, &forward.exec, &args, e); });
  }
};

void backward(Context& context) {
  if (!context.has(GRAFT_CAP_BACKWARD)) skip("has no backward (GRAFT_CAP_BACKWARD)");
  Rig rig(context);
  Problems problems;
  BackwardCall call(context, rig);
  must(call.run(rig.mixer()), "backward");
  const Tensor expected = call.dx.copy();
  const auto refused = [&](const std::string& how) {
    doing("backward with " + how);
    check_refusal(problems, "backward with " + how, call.run(rig.mixer()));
  };
  std::vector<Place> places;
  places.push_back({"dy", call.dy.c(), false, [&](const DLTensor* t) { call.args.dy = t; }});
  places.push_back({"dx", call.dx.c(), true,
                    [&](const DLTensor* t) { call.args.dx = const_cast<DLTensor*>(t); }});
  for (std::size_t i = 0; i < call.dparams.size(); ++i) {
    if (call.dparams[i] == nullptr) continue;
    places.push_back(
        {sdk::cat("dparams ", i), call.dparams[i], true,
         [&call, i](const DLTensor* t) { call.dparams[i] = const_cast<DLTensor*>(t); }});
  }
  for (const Place& place : places) {
    if (!place.may_be_missing) {
      place.put(nullptr);
      refused(place.name + " NULL");
    }
    for (WrongTensor& wrong : wrong_tensors(*place.right)) {
      std::vector<std::int64_t> strides;
      const DLTensor header = wrong.header(*place.right, strides);
      place.put(&header);
      refused(place.name + " with " + wrong.how);
    }
    place.put(place.right);
  }
  doing("a right backward after wrong ones");
  must(call.run(rig.mixer()), "a right backward after wrong ones");
  const double allowed = context.tolerance * gradient_tolerance(rig.in().x.dtype(), kTokens);
  check_close(call.dx, expected, allowed, "dx of a right backward after wrong ones");
  problems.fail_if_any();
}

// ---------------------------------------------------------------- the error struct

// It says the status, stays the caller's in size, and ends its texts.
void check_filled(const char* call, graft_status status, const graft_error& error) {
  if (status == GRAFT_OK) fail(call, " answers OK; expected a refusal");
  if (error.code != status)
    fail(call, " answers ", status, ", and graft_error.code is ", error.code);
  if (error.struct_size != sizeof error)
    fail(call, " changes graft_error.struct_size to ", error.struct_size);
  if (::strnlen(error.where, sizeof error.where) == sizeof error.where ||
      ::strnlen(error.message, sizeof error.message) == sizeof error.message)
    fail(call, " leaves a text of graft_error without its end");
}

template <class Call>
void check_error(const char* what, Call&& call) {
  graft_error error = sdk::empty_error();
  doing(what);
  const graft_status status = call(&error);
  check_filled(what, status, error);
  doing(sdk::cat(what, ", and no graft_error"));
  if (call(nullptr) != status) fail(what, " answers differently without a graft_error");
}

void error_struct(Context& context) {
  Rig rig(context);
  const graft_mixer_factory& factory = *context.library.mixers();
  const CompleteConfig config(context.desc(), context.options);
  graft_mixer* const handle = rig.mixer().get();
  graft_mixer* made = nullptr;
  check_error("create of an unknown id", [&](graft_error* e) {
    return factory.create("org.example.no-such-mixer", small_layer().c(), config.c(), &made, e);
  });
  if (made != nullptr) fail("create of an unknown id is refused, and sets *out");
  graft_plan_in in{};
  in.struct_size = sizeof in;
  in.device_type = kDLCPU;
  in.dtype = sdk::int32;
  check_error("plan with dtype int32", [&](graft_error* e) {
    graft_plan_out out{};
    out.struct_size = sizeof out;
    return handle->v->plan(handle, &in, &out, e);
  });
  rig.mixer().plan(kBatch, kTokens, rig.in().x.dtype(), rig.in().flags);
  rig.call().args.x = nullptr;
  check_error("forward without x", [&](graft_error* e) {
    return handle->v->forward(handle, &rig.call().exec, &rig.call().args, e);
  });
}

}  // namespace

std::vector<Test> error_tests() {
  return {
      {"error.tensors", Kind::mixer,
       "Each tensor of forward is refused when its shape, dtype or device is wrong.", tensors},
      {"error.counts", Kind::mixer, "Counts of tensors that are off by one are refused.", counts},
      {"error.workspace", Kind::mixer, "A workspace one byte short is refused.", workspace},
      {"error.plan", Kind::mixer,
       "What is not declared is GRAFT_UNIMPLEMENTED, and negative sizes are refused.", plans},
      {"error.backward", Kind::mixer,
       "Each gradient of backward is refused when its shape, dtype or device is wrong.", backward},
      {"error.struct", Kind::mixer,
       "A refusal fills the caller's graft_error as it is, and does without one.", error_struct},
  };
}

}  // namespace graft::conformance
