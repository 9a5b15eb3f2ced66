// What a token may not reach: the tokens before it.
#include "kit/checks.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kTokens = 70;
// Within a chunk and at chunk borders.
constexpr std::int64_t kChanged[] = {1, 15, 16, 40, 63, 64, 69};

// Everything before token `t` is as it was, to the last bit: no arithmetic on later tokens may have
// been involved.
void check_past(const Tensor& now, const Tensor& before, std::int64_t t, const std::string& what) {
  check_equal(tokens(now, 0, t), tokens(before, 0, t),
              sdk::cat(what, " before token ", t, ", which alone was changed"));
}

void outputs(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(kBatch, kTokens, dtype, random);
  const MixerOutputs before = mixer.forward(in);
  const std::int64_t model = mixer.layer().info.model_dim;
  for (const std::int64_t t : kChanged) {
    const Tensor kept = in.x.copy();
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t c = 0; c < model; ++c)
        in.x.set((b * kTokens + t) * model + c, random.normal());
    }
    const MixerOutputs after = mixer.forward(in);
    check_past(after.y, before.y, t, "y");
    for (std::size_t i = 0; i < after.taps.size(); ++i) {
      check_past(after.taps[i], before.taps[i], t, sdk::cat("tap ", i));
    }
    if (tokens(after.y, t, kTokens).same_bytes(tokens(before.y, t, kTokens))) {
      context.note("token ", t, " changed nothing in y at all");
    }
    in.x = kept.copy();
  }
}

void gradients(Context& context) {
  if (!context.has(GRAFT_CAP_BACKWARD)) skip("does not train (GRAFT_CAP_BACKWARD)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(kBatch, kTokens, dtype, random);
  in.flags = GRAFT_X_TRAINING;
  const MixerOutputs kept = mixer.forward(in);
  const std::int64_t model = mixer.layer().info.model_dim;
  for (const std::int64_t t : kChanged) {
    Cotangents from;
    from.dy = Tensor(dtype, in.x.shape());
    from.dy.fill(0);
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t c = 0; c < model; ++c)
        from.dy.set((b * kTokens + t) * model + c, random.normal());
    }
    const Tensor later = tokens(mixer.backward(in, kept, from).dx, t + 1, kTokens);
    for (std::int64_t i = 0; i < later.size(); ++i) {
      if (later.at(i) != 0)
        fail("dy at token ", t, " alone gives dx ", later.at(i), " behind it, expected exactly 0");
    }
  }
}

}  // namespace

std::vector<Test> causality_tests() {
  return {
      {"causality.outputs", Kind::mixer, "A token changes nothing of what comes out before it.",
       outputs},
      {"causality.gradients", Kind::mixer, "A gradient at a token reaches no token behind it.",
       gradients},
  };
}

}  // namespace graft::conformance
