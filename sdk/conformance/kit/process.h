// What a plugin has to leave as it was: the parts of a process that belong to all of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace graft::conformance {

struct ProcessState {
  std::vector<std::string> signals;  // per signal, its handler and flags
  std::string floating_point;        // rounding, traps, flush to zero
  std::string directory, locale;
  std::map<std::string, std::string> environment;
  std::uint32_t umask = 0;
  int threads = 0;
};
ProcessState process_state();

// "" or what of it changed: "the locale, from C to de_DE". Not the number of threads.
std::string changes(const ProcessState& before, const ProcessState& after);

// Entries of a folder of /proc/self: "task" (threads), "fd" (open files; the one that reads them
// is not counted).
int count_own(const char* folder);
// Bytes of memory in use, after giving back what malloc holds free.
std::int64_t resident_bytes();
// Processor time of all threads.
double cpu_seconds();

}  // namespace graft::conformance
