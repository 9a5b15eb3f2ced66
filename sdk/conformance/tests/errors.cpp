// Wrong calls: refused with a reason, without a trace.
#include <functional>

#include "kit/checks.h"
#include "kit/sequences.h"

namespace graft::conformance {
namespace {

// A right call, ready to be broken.
class Attempt {
 public:
  Attempt(Context& context, std::uint64_t flags = 0)
      : context_(context), mixer_(context), random_(context.seed) {
    dtype_ = exact_dtype(context);
    in_ = mixer_.random_inputs(2, 11, dtype_, random_);
    in_.flags = flags;
    if (context.has(GRAFT_CAP_STATE_IO)) in_.state = mixer_.zero_state(2, dtype_);
    expected_ = mixer_.forward(in_);
  }

  MixerInputs& in() { return in_; }
  Mixer& mixer() { return mixer_; }
  DLDataType dtype() const { return dtype_; }

  // `spoil` changes the arguments of a right call; the call has to be refused.
  void check(const std::string& what,
             const std::function<void(Mixer::Call&, MixerOutputs&)>& spoil) {
    const Plan sizes = mixer_.plan(2, 11, dtype_, in_.flags);
    MixerOutputs out = mixer_.allocate(in_, sizes);
    Mixer::Call call;
    mixer_.fill(call, in_, out, sizes, sizes.workspace_forward);
    spoil(call, out);
    const Outcome outcome = mixer_.try_forward(call);
    if (outcome.ok()) fail("a forward with ", what, " answers OK");
    if (outcome.message.empty())
      fail("a forward with ", what, " is refused with status ", outcome.status, " and no message");
    if (outcome.where.empty())
      fail("a forward with ", what, " is refused (", outcome.message, ") without saying where");
    const MixerOutputs after = mixer_.forward(in_);
    check_equal(after.y, expected_.y, sdk::cat("y of a right call after one with ", what));
  }

 private:
  Context& context_;
  Mixer mixer_;
  Random random_;
  DLDataType dtype_;
  MixerInputs in_;
  MixerOutputs expected_;
};

// Copies of a DLTensor with one thing wrong; they live as long as this.
struct Spoilt {
  std::vector<std::int64_t> shape, strides;
  DLTensor tensor;

  explicit Spoilt(const DLTensor& right)
      : shape(right.shape, right.shape + right.ndim),
        strides(right.strides, right.strides + right.ndim),
        tensor(right) {
    tensor.shape = shape.data();
    tensor.strides = strides.data();
  }
};

// Every way in which one tensor can be wrong. `put` places the spoilt tensor (or NULL) into the
// call.
void check_tensor(Attempt& attempt, const std::string& name, const DLTensor& right, bool required,
                  const std::function<void(Mixer::Call&, const DLTensor*)>& put) {
  if (required) {
    attempt.check(name + " NULL", [&](Mixer::Call& call, MixerOutputs&) { put(call, nullptr); });
  }
  // One element less on the last axis: memory is there for whoever does not look.
  Spoilt narrow(right);
  narrow.shape.back() -= 1;
  attempt.check(name + " of another shape",
                [&](Mixer::Call& call, MixerOutputs&) { put(call, &narrow.tensor); });
  Spoilt flat(right);
  flat.tensor.ndim -= 1;
  attempt.check(name + " of one axis less",
                [&](Mixer::Call& call, MixerOutputs&) { put(call, &flat.tensor); });
  Spoilt typed(right);
  typed.tensor.dtype = sdk::same_dtype(right.dtype, sdk::int64) ? sdk::int32 : sdk::int64;
  attempt.check(name + " of another type",
                [&](Mixer::Call& call, MixerOutputs&) { put(call, &typed.tensor); });
  Spoilt elsewhere(right);
  elsewhere.tensor.device.device_type = kDLCUDA;
  attempt.check(name + " on another device",
                [&](Mixer::Call& call, MixerOutputs&) { put(call, &elsewhere.tensor); });
}

void tensors(Context& context) {
  Attempt attempt(context);
  check_tensor(attempt, "x", *attempt.in().x.c(), true,
               [](Mixer::Call& call, const DLTensor* t) { call.args.x = t; });
  Tensor y(attempt.dtype(), attempt.in().x.shape());
  const bool y_required = !context.has(GRAFT_CAP_TAPS_ONLY);
  check_tensor(attempt, "y", *y.c(), y_required, [](Mixer::Call& call, const DLTensor* t) {
    call.args.y = const_cast<DLTensor*>(t);
  });
  for (std::size_t i = 0; i < attempt.in().params.size(); ++i) {
    check_tensor(attempt, sdk::cat("parameter '", attempt.mixer().specs()[i]->name, "'"),
                 *attempt.in().params[i].c(), true,
                 [i](Mixer::Call& call, const DLTensor* t) { call.params[i] = t; });
  }
  for (std::size_t i = 0; i < attempt.in().state.size(); ++i) {
    check_tensor(attempt, sdk::cat("state_in ", i), *attempt.in().state[i].c(), true,
                 [i](Mixer::Call& call, const DLTensor* t) { call.state_in[i] = t; });
  }
  if (context.has(GRAFT_CAP_PAD_MASK)) {
    Tensor mask(sdk::uint8, {2, 11});
    mask.fill(1);
    check_tensor(attempt, "pad_mask", *mask.c(), false,
                 [](Mixer::Call& call, const DLTensor* t) { call.args.pad_mask = t; });
  }
}

void counts(Context& context) {
  Attempt attempt(context);
  if (attempt.mixer().n_params() > 0) {
    attempt.check("n_params one too few",
                  [](Mixer::Call& call, MixerOutputs&) { --call.args.n_params; });
  }
  attempt.check("n_params one too many", [](Mixer::Call& call, MixerOutputs&) {
    call.params.push_back(call.args.x);
    call.args.params = call.params.data();
    ++call.args.n_params;
  });
}

void workspace(Context& context) {
  Attempt attempt(context);
  if (attempt.mixer().plan(2, 11, attempt.dtype()).workspace_forward == 0)
    skip("needs no workspace");
  attempt.check("a workspace one byte short",
                [](Mixer::Call& call, MixerOutputs&) { --call.exec.workspace_bytes; });
  attempt.check("no workspace", [](Mixer::Call& call, MixerOutputs&) {
    call.exec.workspace_bytes = 0;
    call.exec.workspace = nullptr;
  });
}

void check_plan(Mixer& mixer, std::int64_t batch, std::int64_t tokens, DLDataType dtype,
                graft_status expected, const std::string& what) {
  Plan ignored;
  const Outcome outcome = mixer.try_plan(batch, tokens, dtype, 0, &ignored);
  if (outcome.ok()) fail("plans for ", what);
  if (expected != GRAFT_OK && outcome.status != expected)
    fail("plan for ", what, ": expected status ", expected, ", got ", outcome.text());
  if (outcome.message.empty()) fail("plan for ", what, " is refused without a message");
}

void plan(Context& context) {
  Mixer mixer(context);
  const DLDataType dtype = exact_dtype(context);
  check_plan(mixer, 2, 11, sdk::int32, GRAFT_UNIMPLEMENTED, "int32");
  for (const DLDataType type : {sdk::float16, sdk::bfloat16, sdk::float32, sdk::float64}) {
    if (!offers(context, type))
      check_plan(mixer, 2, 11, type, GRAFT_UNIMPLEMENTED,
                 sdk::dtype_name(type) + ", which is not declared");
  }
  check_plan(mixer, -1, 11, dtype, GRAFT_OK, "-1 rows");
  check_plan(mixer, 2, -1, dtype, GRAFT_OK, "-1 tokens");
  Random random(context.seed);
  check_finite(mixer.forward(mixer.random_inputs(1, 3, dtype, random)).y, "y after refused plans");
}

}  // namespace

std::vector<Test> error_tests() {
  return {
      {"error.tensors", Kind::mixer,
       "A tensor that is missing, or of another shape, type or device, is refused by name, and the "
       "mixer works on.",
       tensors},
      {"error.counts", Kind::mixer, "Another number of parameters is refused.", counts},
      {"error.workspace", Kind::mixer, "A workspace smaller than planned is refused.", workspace},
      {"error.plan", Kind::mixer,
       "Types that are not declared and sizes below zero are refused by plan().", plan},
  };
}

}  // namespace graft::conformance
