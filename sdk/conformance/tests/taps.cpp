// The intermediates a mixer names.
#include <cstring>
#include <optional>

#include "kit/checks.h"
#include "kit/sequences.h"

namespace graft::conformance {
namespace {

std::optional<std::size_t> find_tap(const Plan& plan, const char* name) {
  for (std::size_t i = 0; i < plan.taps.size(); ++i) {
    if (plan.taps[i].name == name) return i;
  }
  return std::nullopt;
}

std::optional<std::size_t> find_role(const Mixer& mixer, const char* role) {
  for (std::size_t i = 0; i < mixer.specs().size(); ++i) {
    if (mixer.specs()[i]->role != nullptr && std::strcmp(mixer.specs()[i]->role, role) == 0)
      return i;
  }
  return std::nullopt;
}

void shapes(Context& context) {
  Mixer mixer(context);
  const Plan plan = mixer.plan(3, 7, exact_dtype(context));
  if (plan.taps.empty()) skip("names no taps");
  for (const Plan::Spec& tap : plan.taps) {
    if (tap.name.empty()) fail("a tap has no name");
    const bool by_token = tap.shape.size() >= 2 && tap.shape[0] == 3 && tap.shape[1] == 7;
    if (!by_token)
      fail("tap '", tap.name, "' has shape ", sdk::shape_string(tap.shape),
           ", expected [3, 7, ...]");
    const std::size_t axes = tap.name == GRAFT_TAP_HEAD_OUTPUT ? 4
                             : tap.name == GRAFT_TAP_PRE_OUTPUT ||
                                     tap.name == GRAFT_TAP_LOG_DECAY ||
                                     tap.name == GRAFT_TAP_WRITE_GATE
                                 ? 3
                                 : tap.shape.size();
    if (tap.shape.size() != axes)
      fail("tap '", tap.name, "' has ", tap.shape.size(), " axes, expected ", axes);
  }
}

void pre_output(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const auto tap = find_tap(mixer.plan(2, 9, dtype), GRAFT_TAP_PRE_OUTPUT);
  const auto weight = find_role(mixer, GRAFT_ROLE_OUTPUT),
             bias = find_role(mixer, GRAFT_ROLE_OUTPUT_BIAS);
  if (!tap) skip("has no tap " GRAFT_TAP_PRE_OUTPUT);
  if (!weight) skip("has no parameter of role " GRAFT_ROLE_OUTPUT);
  const MixerInputs in = mixer.random_inputs(2, 9, dtype, random);
  const MixerOutputs out = mixer.forward(in);
  const Tensor &w = in.params[*weight], &pre = out.taps[*tap];
  const std::int64_t model = mixer.layer().info.model_dim, width = w.size() / model;
  if (pre.size() != 18 * width)
    fail("tap pre_output has ", pre.size(), " elements, expected ", 18 * width,
         " for an output projection of ", sdk::shape_string(w.shape()));
  Tensor expected(dtype, out.y.shape());
  for (std::int64_t t = 0; t < 18; ++t) {
    for (std::int64_t c = 0; c < model; ++c) {
      double sum = bias ? in.params[*bias].at(c) : 0;
      for (std::int64_t i = 0; i < width; ++i) sum += w.at(c * width + i) * pre.at(t * width + i);
      expected.set(t * model + c, sum);
    }
  }
  check_close(out.y, expected, context.tolerance * tolerance(dtype, 9),
              "y and the output projection of pre_output");
}

void only(Context& context) {
  if (!context.has(GRAFT_CAP_TAPS_ONLY)) skip("always computes y (GRAFT_CAP_TAPS_ONLY)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const MixerInputs in = mixer.random_inputs(2, 40, dtype, random);
  const MixerOutputs with = mixer.forward(in);
  const Plan sizes = mixer.plan(2, 40, dtype);
  MixerOutputs without = mixer.allocate(in, sizes);
  without.y = Tensor();
  Mixer::Call call;
  mixer.fill(call, in, without, sizes, sizes.workspace_forward);
  must(mixer.try_forward(call), "forward without y");
  for (std::size_t i = 0; i < with.taps.size(); ++i) {
    check_close(without.taps[i], with.taps[i], context.tolerance * tolerance(dtype, 40),
                sdk::cat("tap '", sizes.taps[i].name, "' without y and with it"));
  }
  for (std::size_t i = 0; i < with.state.size(); ++i) {
    check_close(without.state[i], with.state[i], context.tolerance * tolerance(dtype, 40),
                sdk::cat("state ", i, " without y and with it"));
  }
}

// Each tap alone, the others NULL, and no state.
void some(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 40, dtype, random);
  const MixerOutputs all = mixer.forward(in);
  if (all.taps.empty()) skip("names no taps");
  const Plan sizes = mixer.plan(2, 40, dtype);
  const double allowed = context.tolerance * tolerance(dtype, 40);
  in.want_state = false;
  for (std::size_t wanted = 0; wanted < all.taps.size(); ++wanted) {
    MixerOutputs out = mixer.allocate(in, sizes);
    Mixer::Call call;
    mixer.fill(call, in, out, sizes, sizes.workspace_forward);
    for (std::size_t i = 0; i < call.taps.size(); ++i) {
      if (i != wanted) call.taps[i] = nullptr;
    }
    const std::string when = sdk::cat("where only tap '", sizes.taps[wanted].name, "' is wanted");
    must(mixer.try_forward(call), "forward " + when);
    check_close(out.y, all.y, allowed, "y " + when);
    check_close(out.taps[wanted], all.taps[wanted], allowed, "the tap " + when);
  }
}

// A decay multiplies a state by 1 at most; a write gate writes a share.
void ranges(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const Plan plan = mixer.plan(2, 30, dtype);
  const auto decay = find_tap(plan, GRAFT_TAP_LOG_DECAY),
             gate = find_tap(plan, GRAFT_TAP_WRITE_GATE);
  if (!decay && !gate) skip("has neither of the taps log_decay and write_gate");
  const MixerOutputs out = mixer.forward(mixer.random_inputs(2, 30, dtype, random));
  if (decay) {
    for (const double value : out.taps[*decay].values()) {
      if (!(value <= 0)) fail("tap log_decay holds ", value, ", the log of a factor above 1");
    }
  }
  if (gate) {
    for (const double value : out.taps[*gate].values()) {
      if (!(value >= 0)) fail("tap write_gate holds ", value, ", expected 0 or more");
    }
  }
}

}  // namespace

std::vector<Test> taps_tests() {
  return {
      {"taps.shapes", Kind::mixer,
       "Taps have names and begin with batch and tokens; the well-known ones have their axes.",
       shapes},
      {"taps.pre_output", Kind::mixer, "The output projection of pre_output is y.", pre_output},
      {"taps.only", Kind::mixer, "A forward without y gives the same taps and states.", only},
      {"taps.some", Kind::mixer, "Each tap can be had alone, and y is the same.", some},
      {"taps.ranges", Kind::mixer, "log_decay is never above 0, write_gate never below.", ranges},
  };
}

}  // namespace graft::conformance
