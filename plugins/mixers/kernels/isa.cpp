#include "isa.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace graft::kernels {

bool runs(std::string_view isa) noexcept {
  if (isa == "baseline") return true;
#if defined(__x86_64__)
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  }
#endif
  return false;
}

namespace {

std::string_view widest() {
  std::string_view best = kIsas[0];
  for (std::string_view isa : kIsas) {
    if (runs(isa)) best = isa;
  }
  return best;
}

std::string_view choose() {
  const char* wanted = std::getenv("GRAFT_ISA");
  if (wanted == nullptr || *wanted == '\0') return widest();
  for (std::string_view isa : kIsas) {
    if (isa == wanted && runs(isa)) return isa;
  }
  std::string have;
  for (std::string_view isa : kIsas) {
    if (runs(isa)) have.append(have.empty() ? "" : ", ").append(isa);
  }
  std::fprintf(
      stderr, "GRAFT_ISA: '%s' is not an instruction set that this processor runs (%s); using %s\n",
      wanted, have.c_str(), std::string(widest()).c_str());
  return widest();
}

}  // namespace

int64_t heads_at_once(int64_t state_size, int64_t heads, int64_t sequences, int threads) {
  constexpr int64_t kStatesInCache = 64 * 1024;  // numbers
  constexpr int64_t kGroupsPerThread = 3;        // so that none waits long for the last one
  const int64_t rows = std::max<int64_t>(sequences, 1);
  const int64_t groups = std::max<int64_t>((kGroupsPerThread * threads + rows - 1) / rows, 1);
  const int64_t shared = (heads + groups - 1) / groups;
  const int64_t fitting = kStatesInCache / std::max<int64_t>(state_size, 1);
  return std::clamp<int64_t>(shared, 1, std::clamp<int64_t>(fitting, 1, kHeadsAtOnce));
}

std::string_view chosen_isa() {
  static const std::string_view isa = choose();
  return isa;
}

}  // namespace graft::kernels
