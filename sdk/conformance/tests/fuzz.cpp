// Random configurations and calls.
#include <chrono>

#include "kit/checks.h"
#include "kit/sequences.h"

namespace graft::conformance {
namespace {

constexpr auto kTime = std::chrono::milliseconds(1500);

// Some of the options, each at a value its schema allows.
Options random_options(const graft_desc& desc, Random& random) {
  Options out;
  for (std::uint32_t i = 0; i < desc.n_options; ++i) {
    const graft_option& option = *desc.options[i];
    if (random.below(3) != 0) continue;
    if (option.def.type == GRAFT_BOOL)
      out.insert_or_assign(option.key, sdk::Value::of(random.below(2) == 1));
    if (option.def.type == GRAFT_STRING && option.one_of != nullptr) {
      std::int64_t n = 0;
      while (option.one_of[n] != nullptr) ++n;
      if (n > 0)
        out.insert_or_assign(option.key,
                             sdk::Value::of(std::string(option.one_of[random.below(n)])));
    }
    if (option.def.type == GRAFT_INT && option.min.type != 0) {
      // Near the lower end: the upper may be more heads than memory.
      const std::int64_t high = option.max.type != 0
                                    ? std::min<std::int64_t>(option.max.u.i, option.min.u.i + 40)
                                    : option.min.u.i + 40;
      out.insert_or_assign(
          option.key, sdk::Value::of(option.min.u.i + random.below(high - option.min.u.i + 1)));
    }
  }
  return out;
}

void one_call(Context& context, Random& random) {
  const auto& layers = all_layers();
  const Layer& layer =
      layers[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(layers.size())))];
  const Options options = random_options(context.desc(), random);
  std::optional<Mixer> mixer;
  try {
    mixer.emplace(context, layer, options);
  } catch (const std::exception&) {
    return;  // refused, which a random configuration may be
  }
  const DLDataType dtype = context.desc().dtypes[random.below(context.desc().n_dtypes)];
  const std::int64_t batch = random.below(4), tokens = random.below(90);
  MixerInputs in = mixer->random_inputs(batch, tokens, dtype, random);
  if (context.has(GRAFT_CAP_STATE_IO) && random.below(2) == 0)
    in.state = mixer->zero_state(batch, dtype);
  if (context.has(GRAFT_CAP_PAD_MASK) && random.below(2) == 0) {
    in.pad_mask = Tensor(sdk::uint8, {batch, tokens});
    for (std::int64_t i = 0; i < batch * tokens; ++i)
      in.pad_mask.set(i, static_cast<double>(random.below(2)));
  }
  if (context.has(GRAFT_CAP_BACKWARD) && random.below(2) == 0) in.flags = GRAFT_X_TRAINING;
  const MixerOutputs out = mixer->forward(in);
  check_finite(out.y, "y");
  if (in.flags == 0) return;
  Cotangents from;
  from.dy = Tensor(dtype, in.x.shape(), random.normals(in.x.size()));
  const Gradients gradients = mixer->backward(in, out, from);
  check_finite(gradients.dx, "dx");
  for (const Tensor& gradient : gradients.dparams) check_finite(gradient, "a parameter's gradient");
}

void calls(Context& context) {
  const auto end = std::chrono::steady_clock::now() + kTime;
  std::int64_t round = 0;
  for (; std::chrono::steady_clock::now() < end; ++round) {
    Random random(context.seed + static_cast<std::uint64_t>(round) * 1000003);
    try {
      one_call(context, random);
    } catch (const Failed& problem) {
      fail("round ", round, ": ", problem.what());
    }
  }
  context.note(round, " random calls");
}

}  // namespace

std::vector<Test> fuzz_tests() {
  return {
      {"fuzz.calls", Kind::mixer,
       "Random options, blocks, sizes, states, pads and types give finite results or are refused.",
       calls}};
}

}  // namespace graft::conformance
