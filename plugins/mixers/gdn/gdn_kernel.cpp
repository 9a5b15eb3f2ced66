#include "gdn_kernel.h"

#include "isa.h"

namespace graft::gdn {

GRAFT_ISA_TABLES(Kernels)

const Kernels* find_kernels(std::string_view isa) { return kernels::table_of(kTables, isa); }

const Kernels& kernels() {
  static const Kernels& best = kernels::best_table(kTables);
  return best;
}

int64_t heads_at_once(const HeadShape& shape, int64_t heads, int64_t sequences, int threads) {
  return kernels::heads_at_once(shape.key_dim * shape.value_dim, heads, sequences, threads);
}

}  // namespace graft::gdn
