// What a mixer holds after it was destroyed: nothing.
#include <dirent.h>
#include <unistd.h>

#include <fstream>

#include "kit/checks.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

constexpr int kRounds = 200;
constexpr std::int64_t kAllowedGrowth = 4 << 20;

std::int64_t entries_of(const char* folder) {
  std::int64_t n = 0;
  if (DIR* const dir = ::opendir(folder)) {
    while (::readdir(dir) != nullptr) ++n;
    ::closedir(dir);
  }
  return n;
}

std::int64_t resident_bytes() {
  std::int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

void one_round(Context& context, const DLDataType dtype, Random& random) {
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 17, dtype, random);
  if (context.has(GRAFT_CAP_BACKWARD)) in.flags = GRAFT_X_TRAINING;
  const MixerOutputs out = mixer.forward(in);
  if (in.flags == 0) return;
  Cotangents from;
  from.dy = Tensor(dtype, in.x.shape(), random.normals(in.x.size()));
  mixer.backward(in, out, from);
}

void balance(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  one_round(context, dtype, random);
  const std::int64_t files = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  for (int n = 0; n < kRounds / 4; ++n) one_round(context, dtype, random);
  if (const std::int64_t blocks = context.library.host().blocks_out(); blocks != 0)
    fail(blocks, " blocks of host memory were not given back");
  if (const std::int64_t now = entries_of("/proc/self/fd"); now > files)
    fail(now - files, " files stay open after ", kRounds / 4, " instances");
  if (const std::int64_t now = entries_of("/proc/self/task"); now > threads)
    fail(now - threads, " threads stay after ", kRounds / 4, " instances");
}

void memory(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  // The first rounds warm allocators and caches up.
  for (int n = 0; n < kRounds; ++n) one_round(context, dtype, random);
  const std::int64_t before = resident_bytes();
  for (int n = 0; n < 2 * kRounds; ++n) one_round(context, dtype, random);
  const std::int64_t growth = resident_bytes() - before;
  context.note("resident memory grew by ", growth / 1024, " KiB over ", 2 * kRounds, " instances");
  if (growth > kAllowedGrowth) {
    fail("resident memory grew by ", growth / 1024, " KiB over ", 2 * kRounds,
         " instances made and destroyed, ", kAllowedGrowth / 1024, " KiB allowed");
  }
}

}  // namespace

std::vector<Test> resource_tests() {
  return {
      {"resource.balance", Kind::mixer, "Instances give back host memory, files and threads.",
       balance},
      {"resource.memory", Kind::mixer,
       "Hundreds of instances made and destroyed leave the process's size as it was.", memory},
  };
}

}  // namespace graft::conformance
