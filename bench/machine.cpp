#include "machine.h"

#include "isa.h"

namespace graft::bench {

GRAFT_ISA_TABLES(Limits)

const Limits& limits() {
  static const Limits& best = kernels::best_table(kTables);
  return best;
}

}  // namespace graft::bench
