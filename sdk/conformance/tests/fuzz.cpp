// Random options, blocks, sizes and flags, for a while.
#include <chrono>
#include <cmath>

#include "kit/checks.h"
#include "kit/component.h"
#include "kit/doing.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

constexpr std::chrono::milliseconds kTime(2000);

bool coin(Random& random) { return random.below(2) == 0; }

std::int64_t random_integer(const graft_option& option, Random& random) {
  // Near the default and the lower bound: a width of 65536 is legal, and slow.
  constexpr std::int64_t kRoom = 12;
  const std::int64_t least = option.min.type == GRAFT_INT ? option.min.u.i : option.def.u.i;
  const std::int64_t most = option.max.type == GRAFT_INT ? option.max.u.i : least + kRoom;
  const std::int64_t from = coin(random) ? least : std::max(least, option.def.u.i - kRoom / 2);
  return from + random.below(std::min(most, from + kRoom) - from + 1);
}

double random_real(const graft_option& option, Random& random) {
  if (option.min.type == GRAFT_FLOAT && option.max.type == GRAFT_FLOAT)
    return random.between(option.min.u.f, option.max.u.f);
  const double value = option.def.u.f * random.between(0.5, 2);
  if (option.min.type == GRAFT_FLOAT && value < option.min.u.f) return option.min.u.f;
  if (option.max.type == GRAFT_FLOAT && value > option.max.u.f) return option.max.u.f;
  return value;
}

std::string random_choice(const graft_option& option, Random& random) {
  std::int64_t n = 0;
  while (option.one_of[n] != nullptr) ++n;
  return option.one_of[random.below(n)];
}

// Half of the options at their defaults; lists and free strings stay there.
Options random_options(Context& context, Random& random) {
  Options out = context.options;
  for (const graft_option* const option : schema_of(context.desc())) {
    if (out.contains(option->key) || coin(random)) continue;
    if (option->def.type == GRAFT_BOOL)
      out.insert_or_assign(option->key, sdk::Value::of(coin(random)));
    if (option->def.type == GRAFT_INT)
      out.insert_or_assign(option->key, sdk::Value::of(random_integer(*option, random)));
    if (option->def.type == GRAFT_FLOAT)
      out.insert_or_assign(option->key, sdk::Value::of(random_real(*option, random)));
    if (option->def.type == GRAFT_STRING && option->one_of != nullptr && *option->one_of != nullptr)
      out.insert_or_assign(option->key, sdk::Value::of(random_choice(*option, random)));
  }
  return out;
}

const Layer& random_layer(Random& random) {
  const std::vector<Layer>& all = all_layers();
  return all[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(all.size())))];
}

void add_pads(MixerInputs& in, Random& random) {
  in.pad_mask = Tensor(sdk::uint8, {in.batch(), in.tokens()});
  for (std::int64_t i = 0; i < in.pad_mask.size(); ++i)
    in.pad_mask.set(i, random.below(4) == 0 ? 0 : 1);
}

void add_positions(MixerInputs& in, Random& random) {
  in.positions = Tensor(sdk::int64, {in.batch(), in.tokens()});
  for (std::int64_t b = 0; b < in.batch(); ++b) {
    std::int64_t at = random.below(50);
    for (std::int64_t t = 0; t < in.tokens(); ++t) {
      in.positions.set(b * in.tokens() + t, static_cast<double>(at));
      at += 1 + random.below(3);
    }
  }
}

// A state as some sequence left it.
void add_state(Mixer& mixer, MixerInputs& in, Random& random) {
  MixerInputs earlier = mixer.random_inputs(in.batch(), 1 + random.below(9), in.x.dtype(), random);
  MixerOutputs out = mixer.forward(earlier);
  in.state = std::move(out.state);
}

MixerInputs random_call(Context& context, Mixer& mixer, Random& random) {
  const graft_desc& desc = context.desc();
  const DLDataType dtype = desc.dtypes[random.below(desc.n_dtypes)];
  const std::int64_t batch = random.below(4), tokens = random.below(coin(random) ? 5 : 90);
  MixerInputs in = mixer.random_inputs(batch, tokens, dtype, random);
  if (context.has(GRAFT_CAP_PAD_MASK) && coin(random)) add_pads(in, random);
  if (coin(random)) add_positions(in, random);
  if (context.has(GRAFT_CAP_STATE_IO) && coin(random)) add_state(mixer, in, random);
  if (context.has(GRAFT_CAP_BACKWARD) && coin(random)) in.flags |= GRAFT_X_TRAINING;
  if (coin(random)) in.flags |= GRAFT_X_DETERMINISTIC;
  in.want_state = coin(random);
  in.want_taps = coin(random);
  return in;
}

void check_all_finite(const std::vector<Tensor>& tensors, const char* what) {
  for (std::size_t i = 0; i < tensors.size(); ++i) check_finite(tensors[i], sdk::cat(what, " ", i));
}

void random_backward(Context& context, Mixer& mixer, const MixerInputs& in, const MixerOutputs& out,
                     Random& random) {
  Cotangents from;
  from.dy = Tensor(in.x.dtype(), in.x.shape(), random.normals(in.x.size()));
  for (std::size_t i = 0; i < in.params.size(); ++i) from.frozen.push_back(coin(random));
  from.want_dx = coin(random);
  const Gradients gradients = mixer.backward(in, out, from);
  check_finite(gradients.dx, "dx");
  check_all_finite(gradients.dparams, "dparams");
  if (context.has(GRAFT_CAP_STATEFUL_GRAD)) check_all_finite(gradients.dstate, "dstate_in");
}

// False: the mixer refused block or options, with a message.
bool round_of(Context& context, Random& random) {
  const Layer& layer = random_layer(random);
  const Options options = random_options(context, random);
  {
    const CompleteConfig config(context.desc(), options);
    graft_mixer* made = nullptr;
    const Outcome outcome = outcome_of([&](graft_error* e) {
      return context.library.mixers()->create(context.desc().id, layer.c(), config.c(), &made, e);
    });
    if (!outcome.ok() && outcome.message.empty())
      fail("create on the layer '", layer.name, "' is refused without a message");
    if (!outcome.ok()) return false;
    made->v->destroy(made);
  }
  Mixer mixer(context, layer, options);
  const MixerInputs in = random_call(context, mixer, random);
  const MixerOutputs out = mixer.forward(in);
  check_finite(out.y, "y");
  check_all_finite(out.state, "state_out");
  check_all_finite(out.taps, "tap");
  if ((in.flags & GRAFT_X_TRAINING) != 0) random_backward(context, mixer, in, out, random);
  return true;
}

// A round's seed is all it depends on; the first round's is that of the run.
void calls(Context& context) {
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t seed = context.seed;
  int rounds = 0, refused = 0;
  do {
    doing(sdk::cat("a random round; --seed ", seed, " repeats it"));
    Random random(seed);
    try {
      if (!round_of(context, random)) ++refused;
    } catch (const Failed& problem) {
      fail(problem.what(), " (a random round; --seed ", seed, " repeats it)");
    }
    seed = random.bits() >> 1;
    ++rounds;
  } while (std::chrono::steady_clock::now() - start < kTime);
  context.note(rounds, " rounds, ", refused, " of them refused when the mixer is made");
}

}  // namespace

std::vector<Test> fuzz_tests() {
  return {{"fuzz.calls", Kind::mixer,
           "Random options, blocks, sizes and flags give finite outputs or an error.", calls}};
}

}  // namespace graft::conformance
