// What an instance takes, it gives back.
#include "kit/doing.h"
#include "kit/mixer.h"
#include "kit/process.h"

namespace graft::conformance {
namespace {

// A life of an instance: made, planned, run forward and back, destroyed.
void live(Context& context, Random& random) {
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(1, 8, exact_dtype(context), random);
  if (context.has(GRAFT_CAP_BACKWARD)) in.flags = GRAFT_X_TRAINING;
  const MixerOutputs out = mixer.forward(in);
  if (!context.has(GRAFT_CAP_BACKWARD)) return;
  Cotangents from;
  from.dy = Tensor(in.x.dtype(), in.x.shape(), random.normals(in.x.size()));
  mixer.backward(in, out, from);
}

void live_often(Context& context, int rounds) {
  Random random(context.seed);
  for (int i = 0; i < rounds; ++i) live(context, random);
}

void check_same(const char* what, std::int64_t before, std::int64_t after, int rounds) {
  if (after > before)
    fail(after - before, " more ", what, " after ", rounds, " lives of an instance");
}

void balance(Context& context) {
  constexpr int kFirst = 20, kRounds = 300;
  live_often(context, kFirst);  // runtimes start their threads
  const int files = count_own("fd"), threads = count_own("task");
  const std::int64_t blocks = context.library.host().blocks_out();
  if (blocks != 0)
    fail(blocks, " blocks of " GRAFT_HOST_EXT_MEMORY " are not given back after ", kFirst,
         " lives of an instance");
  live_often(context, kRounds);
  check_same("blocks of " GRAFT_HOST_EXT_MEMORY, 0, context.library.host().blocks_out(), kRounds);
  check_same("open files", files, count_own("fd"), kRounds);
  check_same("threads", threads, count_own("task"), kRounds);
}

void memory(Context& context) {
  constexpr int kFirst = 200, kRounds = 400;
  constexpr std::int64_t kAllowed = std::int64_t{4} << 20;
  live_often(context, kFirst);
  const std::int64_t before = resident_bytes();
  live_often(context, kRounds);
  const std::int64_t grown = resident_bytes() - before;
  context.note("resident memory: ", before >> 10, " KiB, ", grown >> 10, " KiB more after ",
               kRounds, " lives");
  if (grown > kAllowed)
    fail("resident memory grows by ", grown >> 10, " KiB over ", kRounds, " lives of an instance; ",
         kAllowed >> 10, " KiB allowed");
}

}  // namespace

std::vector<Test> resource_tests() {
  return {
      {"resource.balance", Kind::mixer,
       "Host memory, open files and threads are given back with an instance.", balance},
      {"resource.memory", Kind::mixer, "Memory stays flat over hundreds of instances.", memory},
  };
}

}  // namespace graft::conformance
