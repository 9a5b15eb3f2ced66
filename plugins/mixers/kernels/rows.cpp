#include "rows.h"

#include "isa.h"

namespace graft::kernels {

GRAFT_ISA_TABLES(Rowwise)

const Rowwise* find_rowwise(std::string_view isa) { return kernels::table_of(kTables, isa); }

const Rowwise& rowwise() {
  static const Rowwise& best = kernels::best_table(kTables);
  return best;
}

}  // namespace graft::kernels
