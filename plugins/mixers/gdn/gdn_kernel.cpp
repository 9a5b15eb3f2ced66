#include "gdn_kernel.h"

#include <algorithm>

#include "isa.h"

namespace graft::gdn {

GRAFT_ISA_TABLES(Kernels)

const Kernels* find_kernels(std::string_view isa) { return kernels::table_of(kTables, isa); }

const Kernels& kernels() {
  static const Kernels& best = kernels::best_table(kTables);
  return best;
}

int64_t heads_at_once(const HeadShape& shape, int64_t heads, int64_t sequences, int threads) {
  constexpr int64_t kStatesInCache = 64 * 1024;  // numbers
  constexpr int64_t kGroupsPerThread = 3;  // so that none waits long for the last one
  const int64_t groups_wanted =
      (kGroupsPerThread * threads + sequences - 1) / std::max<int64_t>(sequences, 1);
  const int64_t shared = (heads + groups_wanted - 1) / std::max<int64_t>(groups_wanted, 1);
  const int64_t fitting = kStatesInCache / std::max<int64_t>(shape.key_dim * shape.value_dim, 1);
  return std::clamp<int64_t>(shared, 1, std::clamp<int64_t>(fitting, 1, kHeadsAtOnce));
}

}  // namespace graft::gdn
