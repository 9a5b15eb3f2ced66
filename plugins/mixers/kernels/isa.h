// Which instruction set a kernel runs with. Kernels are compiled once per set (graft_add_kernels in
// CMakeLists.txt); each family of them has one table of functions per set, which GRAFT_ISA_TABLES
// lists.
//
// The widest set of the processor is used. GRAFT_ISA in the environment names a narrower one; a
// name that is unknown, or that this processor cannot run, is refused with a line on stderr and the
// names that would do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace graft::kernels {

// From narrow to wide.
inline constexpr std::string_view kIsas[] = {"baseline", "avx2", "avx512"};

// Whether this processor (and this build) runs it.
bool runs(std::string_view isa) noexcept;

// The widest set that runs, or the one that GRAFT_ISA names. Read once.
std::string_view chosen_isa();

// Heads of a sequence that a thread best does at once, at most kHeadsAtOnce: as many as leave work
// for every thread and keep their states, of `state_size` numbers each, in the second-level cache.
inline constexpr int64_t kHeadsAtOnce = 16;
int64_t heads_at_once(int64_t state_size, int64_t heads, int64_t sequences, int threads);

// The table of `isa`, or nullptr when it is unknown or this processor cannot run it.
template <class Table>
const Table* table_of(std::span<const Table* const> tables, std::string_view isa) {
  if (!runs(isa)) return nullptr;
  for (const Table* table : tables) {
    if (table->isa == isa) return table;
  }
  return nullptr;
}
// That of chosen_isa(); of the widest narrower set where a family has none of that set.
template <class Table>
const Table& best_table(std::span<const Table* const> tables) {
  const Table* best = tables.front();
  for (std::string_view isa : kIsas) {
    if (const Table* found = table_of(tables, isa)) best = found;
    if (isa == chosen_isa()) break;
  }
  return *best;
}

template <class Table, std::size_t n>
const Table* table_of(const Table* const (&tables)[n], std::string_view isa) {
  return table_of(std::span<const Table* const>(tables), isa);
}
template <class Table, std::size_t n>
const Table& best_table(const Table* const (&tables)[n]) {
  return best_table(std::span<const Table* const>(tables));
}

}  // namespace graft::kernels

// Declares kTable of each set's namespace, and kTables.
#if defined(__x86_64__)
#define GRAFT_ISA_TABLES(Table) \
  namespace baseline {          \
  extern const Table kTable;    \
  }                             \
  namespace avx2 {              \
  extern const Table kTable;    \
  }                             \
  namespace avx512 {            \
  extern const Table kTable;    \
  }                             \
  static constexpr const Table* kTables[] = {&baseline::kTable, &avx2::kTable, &avx512::kTable};
#else
#define GRAFT_ISA_TABLES(Table) \
  namespace baseline {          \
  extern const Table kTable;    \
  }                             \
  static constexpr const Table* kTables[] = {&baseline::kTable};
#endif
