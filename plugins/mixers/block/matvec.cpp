#include "matvec.h"

#include "isa.h"

namespace graft::mixers {

GRAFT_ISA_TABLES(Matvec)

const Matvec& matvec() {
  static const Matvec& best = kernels::best_table(kTables);
  return best;
}

}  // namespace graft::mixers
