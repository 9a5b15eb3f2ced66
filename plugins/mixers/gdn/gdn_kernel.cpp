#include "gdn_kernel.h"

#include "isa.h"

namespace graft::gdn {

GRAFT_ISA_TABLES(Kernels)

const Kernels* find_kernels(std::string_view isa) { return kernels::table_of(kTables, isa); }

const Kernels& kernels() {
  static const Kernels& best = kernels::best_table(kTables);
  return best;
}

}  // namespace graft::gdn
