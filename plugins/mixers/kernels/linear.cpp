#include "linear.h"

#include "isa.h"

namespace graft::linear {

GRAFT_ISA_TABLES(Kernels)

const Kernels* find_kernels(std::string_view isa) { return graft::kernels::table_of(kTables, isa); }

const Kernels& kernels() {
  static const Kernels& best = graft::kernels::best_table(kTables);
  return best;
}

int64_t heads_at_once(const HeadShape& shape, int64_t heads, int64_t sequences, int threads) {
  return graft::kernels::heads_at_once(shape.features * shape.value_dim, heads, sequences, threads);
}

}  // namespace graft::linear
