// A padded token is as if it was not there.
#include <limits>

#include "kit/checks.h"
#include "kit/sequences.h"

namespace graft::conformance {
namespace {

constexpr std::int64_t kTokens = 23;

// Sequences of different lengths, and the same ones spread over rows of one length with pads
// between.
struct Padded {
  MixerInputs in;                             // [B,T] with NaN at pads
  std::vector<std::vector<std::int64_t>> at;  // of each row's real tokens
  std::vector<MixerInputs> alone;             // each row's real tokens, a batch of one
};

void need_mask(const Context& context) {
  if (!context.has(GRAFT_CAP_PAD_MASK)) skip("takes no pad mask (GRAFT_CAP_PAD_MASK)");
}

Padded make(const Mixer& mixer, DLDataType dtype, Random& random,
            const std::vector<std::vector<std::int64_t>>& at) {
  const auto batch = static_cast<std::int64_t>(at.size());
  const std::int64_t model = mixer.layer().info.model_dim;
  Padded out;
  out.at = at;
  out.in = mixer.random_inputs(batch, kTokens, dtype, random);
  out.in.x.fill(std::numeric_limits<double>::quiet_NaN());
  out.in.pad_mask = Tensor(sdk::uint8, {batch, kTokens});
  out.in.pad_mask.fill(0);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::vector<std::int64_t>& real = at[static_cast<std::size_t>(b)];
    MixerInputs& alone = out.alone.emplace_back();
    alone.params = copies(out.in.params);
    alone.x = Tensor(dtype, {1, static_cast<std::int64_t>(real.size()), model});
    for (std::size_t n = 0; n < real.size(); ++n) {
      out.in.pad_mask.set(b * kTokens + real[n], 1);
      for (std::int64_t c = 0; c < model; ++c) {
        const double value = random.normal();
        out.in.x.set((b * kTokens + real[n]) * model + c, value);
        alone.x.set(static_cast<std::int64_t>(n) * model + c, value);
      }
    }
  }
  return out;
}

std::vector<std::int64_t> range(std::int64_t from, std::int64_t to) {
  std::vector<std::int64_t> out;
  for (std::int64_t t = from; t < to; ++t) out.push_back(t);
  return out;
}

// The places of `tensor` [B,T,...] that are real in row b, in a row; fails where a pad's place is
// not 0.
Tensor real_places(const Tensor& tensor, const Padded& padded, std::int64_t b,
                   const std::string& what) {
  const std::vector<std::int64_t>& real = padded.at[static_cast<std::size_t>(b)];
  const std::int64_t width = tensor.size() / (tensor.shape()[0] * kTokens);
  std::vector<std::int64_t> shape = tensor.shape();
  shape[0] = 1;
  shape[1] = static_cast<std::int64_t>(real.size());
  Tensor out(tensor.dtype(), shape);
  std::int64_t n = 0;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const bool is_real = padded.in.pad_mask.at(b * kTokens + t) != 0;
    for (std::int64_t c = 0; c < width; ++c) {
      const double value = tensor.at((b * kTokens + t) * width + c);
      if (is_real) out.set(n * width + c, value);
      if (!is_real && value != 0)
        fail(what, " at the pad ", t, " of row ", b, " is ", value, ", expected 0");
    }
    n += is_real ? 1 : 0;
  }
  return out;
}

// Where the rows begin and who counts: the padded batch may get the host's positions, while its
// rows alone are always counted by the mixer.
struct Start {
  bool from_state = false, host_counts = false;
};

void begin(Context& context, Mixer& mixer, Padded& padded, Random& random, Start start) {
  constexpr std::int64_t kBefore = 9;
  const std::int64_t batch = padded.in.batch();
  if (start.from_state) {
    if (!context.has(GRAFT_CAP_STATE_IO)) skip("does not go on from states (GRAFT_CAP_STATE_IO)");
    MixerInputs before = mixer.random_inputs(batch, kBefore, padded.in.x.dtype(), random);
    before.params = copies(padded.in.params);
    padded.in.state = mixer.forward(before).state;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (const Tensor& state : padded.in.state)
        padded.alone[static_cast<std::size_t>(b)].state.push_back(row(state, b));
    }
  }
  if (!start.host_counts) return;
  padded.in.positions = Tensor(sdk::int64, {batch, kTokens});
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t next = start.from_state ? kBefore : 0;
    for (std::int64_t i = b * kTokens; i < (b + 1) * kTokens; ++i) {
      // At pads anything from 0 on is legal.
      const bool is_real = padded.in.pad_mask.at(i) != 0;
      padded.in.positions.set(i, static_cast<double>(is_real ? next++ : random.below(1000)));
    }
  }
}

void check_outputs_in(Context& context, DLDataType dtype,
                      const std::vector<std::vector<std::int64_t>>& at, Start start) {
  Random random(context.seed);
  Mixer mixer(context);
  Padded padded = make(mixer, dtype, random, at);
  begin(context, mixer, padded, random, start);
  const MixerOutputs out = mixer.forward(padded.in);
  const double allowed = context.tolerance * tolerance(dtype, kTokens);
  for (std::size_t row_index = 0; row_index < at.size(); ++row_index) {
    const auto b = static_cast<std::int64_t>(row_index);
    const MixerOutputs alone = mixer.forward(padded.alone[row_index]);
    check_close(real_places(out.y, padded, b, "y"), alone.y, allowed,
                sdk::cat("y of row ", b, " with and without its pads"));
    for (std::size_t i = 0; i < out.taps.size(); ++i) {
      const std::string name = sdk::cat("tap ", i);
      check_close(real_places(out.taps[i], padded, b, name), alone.taps[i], allowed,
                  sdk::cat(name, " of row ", b, " with and without its pads"));
    }
    for (std::size_t i = 0; i < out.state.size(); ++i) {
      check_close(row(out.state[i], b), alone.state[i], allowed,
                  sdk::cat("state ", i, " of row ", b, " with and without its pads"));
    }
  }
}

void check_outputs(Context& context, const std::vector<std::vector<std::int64_t>>& at,
                   Start start = {}) {
  need_mask(context);
  for (const DLDataType dtype : exact_dtypes(context)) check_outputs_in(context, dtype, at, start);
}

void left(Context& context) {
  check_outputs(context, {range(9, kTokens), range(0, kTokens), range(1, kTokens)});
}
void right(Context& context) {
  check_outputs(context, {range(0, 14), range(0, kTokens), range(0, 1)});
}
void inside(Context& context) {
  check_outputs(context, {{0, 1, 5, 6, 7, 15, 16, 22}, range(3, 19), {2, 3, 17}});
}
void one_row(Context& context) {
  check_outputs(context, {range(9, kTokens)});
  check_outputs(context, {range(0, 9)});
}
void all_pads(Context& context) { check_outputs(context, {range(0, kTokens), {}, range(4, 9)}); }

const std::vector<std::vector<std::int64_t>>& every_kind() {
  static const std::vector<std::vector<std::int64_t>> at{
      range(9, kTokens), range(0, 14), {0, 1, 5, 6, 7, 15, 16, 22}, {}, range(0, kTokens)};
  return at;
}

void from_state(Context& context) { check_outputs(context, every_kind(), {.from_state = true}); }

void positions(Context& context) {
  check_outputs(context, every_kind(), {.host_counts = true});
  if (!context.has(GRAFT_CAP_STATE_IO)) return;
  check_outputs(context, every_kind(), {.from_state = true, .host_counts = true});
}

void none(Context& context) {
  need_mask(context);
  for (const DLDataType dtype : exact_dtypes(context)) {
    Random random(context.seed);
    Mixer mixer(context);
    MixerInputs in = mixer.random_inputs(2, kTokens, dtype, random);
    const MixerOutputs without = mixer.forward(in);
    in.pad_mask = Tensor(sdk::uint8, {2, kTokens});
    in.pad_mask.fill(1);
    const MixerOutputs with = mixer.forward(in);
    const double allowed = context.tolerance * tolerance(dtype, kTokens);
    check_close(with.y, without.y, allowed, "y with a mask of ones and without a mask");
    for (std::size_t i = 0; i < with.state.size(); ++i) {
      check_close(with.state[i], without.state[i], allowed,
                  sdk::cat("state ", i, " with a mask of ones and without a mask"));
    }
  }
}

void step(Context& context) {
  need_mask(context);
  if (!context.has(GRAFT_CAP_STEP)) skip("does not decode step by step (GRAFT_CAP_STEP)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  const MixerInputs all = mixer.random_inputs(2, 12, dtype, random);
  const MixerOutputs before = mixer.forward(piece(all, 0, 11, {}));
  MixerInputs last = piece(all, 11, 12, before.state);
  const MixerOutputs expected = mixer.step(last);
  last.pad_mask = Tensor(sdk::uint8, {2, 1}, std::vector<double>{1, 0});
  for (std::int64_t c = 0; c < mixer.layer().info.model_dim; ++c) {
    last.x.set(mixer.layer().info.model_dim + c, std::numeric_limits<double>::quiet_NaN());
  }
  const MixerOutputs got = mixer.step(last);
  const double allowed = context.tolerance * tolerance(dtype, 12);
  check_close(row(got.y, 0), row(expected.y, 0), allowed, "y of a row whose neighbour is a pad");
  for (std::size_t i = 0; i < got.state.size(); ++i) {
    check_close(row(got.state[i], 0), row(expected.state[i], 0), allowed,
                sdk::cat("state ", i, " of a row whose neighbour is a pad"));
    check_equal(row(got.state[i], 1), row(before.state[i], 1),
                sdk::cat("state ", i, " over a pad"));
  }
}

void gradients_in(Context& context, DLDataType dtype) {
  Random random(context.seed);
  Mixer mixer(context);
  Padded padded =
      make(mixer, dtype, random, {range(9, kTokens), {0, 1, 5, 6, 15, 22}, range(0, 4)});
  padded.in.flags = GRAFT_X_TRAINING;
  Cotangents from;
  from.dy = Tensor(dtype, padded.in.x.shape(), random.normals(padded.in.x.size()));
  const Tensor dy_real = from.dy.copy();
  const std::int64_t model = mixer.layer().info.model_dim;
  for (std::int64_t i = 0; i < padded.in.pad_mask.size(); ++i) {
    for (std::int64_t c = 0; c < model && padded.in.pad_mask.at(i) == 0; ++c) {
      from.dy.set(i * model + c, std::numeric_limits<double>::quiet_NaN());
    }
  }
  const Gradients got = mixer.backward(padded.in, mixer.forward(padded.in), from);
  const double allowed = context.tolerance * gradient_tolerance(dtype, kTokens);
  std::vector<std::vector<double>> sums(mixer.specs().size());
  for (std::int64_t b = 0; b < 3; ++b) {
    MixerInputs& alone = padded.alone[static_cast<std::size_t>(b)];
    alone.flags = GRAFT_X_TRAINING;
    const std::vector<std::int64_t>& real = padded.at[static_cast<std::size_t>(b)];
    Cotangents own;
    own.dy = Tensor(dtype, alone.x.shape());
    for (std::size_t n = 0; n < real.size(); ++n) {
      for (std::int64_t c = 0; c < model; ++c) {
        own.dy.set(static_cast<std::int64_t>(n) * model + c,
                   dy_real.at((b * kTokens + real[n]) * model + c));
      }
    }
    const Gradients expected = mixer.backward(alone, mixer.forward(alone), own);
    check_close(real_places(got.dx, padded, b, "dx"), expected.dx, allowed,
                sdk::cat("dx of row ", b, " with and without its pads"));
    for (std::size_t p = 0; p < sums.size(); ++p) {
      if (!expected.dparams[p].there()) continue;
      const std::vector<double> values = expected.dparams[p].values();
      sums[p].resize(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) sums[p][i] += values[i];
    }
  }
  for (std::size_t p = 0; p < sums.size(); ++p) {
    if (!got.dparams[p].there()) continue;
    const std::string problem = not_close(got.dparams[p].values(), sums[p], allowed);
    if (!problem.empty())
      fail("the gradient of '", mixer.specs()[p]->name,
           "' with pads and the sum of the rows without: ", problem);
  }
}

void gradients(Context& context) {
  need_mask(context);
  if (!context.has(GRAFT_CAP_BACKWARD)) skip("does not train (GRAFT_CAP_BACKWARD)");
  for (const DLDataType dtype : exact_dtypes(context)) gradients_in(context, dtype);
}

}  // namespace

std::vector<Test> padding_tests() {
  return {
      {"padding.left", Kind::mixer,
       "Rows padded on the left are as they are without pads, NaN in the pads or not.", left},
      {"padding.right", Kind::mixer,
       "Rows padded on the right are as they are without pads, and so is their state.", right},
      {"padding.inside", Kind::mixer, "Pads between tokens are as if they were not there.", inside},
      {"padding.one_row", Kind::mixer, "A batch of one row is padded like any other.", one_row},
      {"padding.all", Kind::mixer, "A row of pads alone gives zeros and leaves the zero state.",
       all_pads},
      {"padding.none", Kind::mixer, "A mask without pads is no mask.", none},
      {"padding.from_state", Kind::mixer,
       "Rows with pads go on from their states, and a row of pads alone leaves its state.",
       from_state},
      {"padding.positions", Kind::mixer,
       "The host's positions of real tokens are those the mixer counts; at pads they mean nothing.",
       positions},
      {"padding.step", Kind::mixer, "A step over a pad leaves that row's state alone.", step},
      {"padding.gradients", Kind::mixer, "Pads get no gradient and give none.", gradients},
  };
}

}  // namespace graft::conformance
