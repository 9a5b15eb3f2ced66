#include "gdn_kernel.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace graft::gdn {

namespace baseline {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

const Kernels* best_kernels() {
  if (const char* wanted = std::getenv("GRAFT_GDN_ISA")) {
    if (const Kernels* found = find_kernels(wanted)) return found;
  }
  for (const char* isa : {"avx512", "avx2"}) {
    if (const Kernels* found = find_kernels(isa)) return found;
  }
  return &baseline::kKernels;
}

}  // namespace

const Kernels* find_kernels(const char* isa) {
  if (std::strcmp(isa, "baseline") == 0) return &baseline::kKernels;
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx2") == 0 && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma")) {
    return &avx2::kKernels;
  }
  if (std::strcmp(isa, "avx512") == 0 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return &avx512::kKernels;
  }
#endif
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels* const best = best_kernels();
  return *best;
}

}  // namespace graft::gdn
