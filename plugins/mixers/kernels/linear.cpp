#include "linear.h"

#include "isa.h"

namespace graft::linear {

GRAFT_ISA_TABLES(Kernels)

const Kernels* find_kernels(std::string_view isa) { return graft::kernels::table_of(kTables, isa); }

const Kernels& kernels() {
  static const Kernels& best = graft::kernels::best_table(kTables);
  return best;
}

}  // namespace graft::linear
