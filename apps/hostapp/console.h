#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "core/base/progress.h"

namespace graft {

// Standard error of the process: log lines, and below them the progress of the phase at work. A log
// line takes the progress line off first, from whichever thread it comes.
class Console {
 public:
  // verbosity: -1 warnings only and no progress, 0 usual, 1 debug, 2 trace.
  explicit Console(int verbosity);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // A phase begins, and with that the one before it ended. `units` 0 = no telling how long it is;
  // `done` of them were done by an earlier process.
  void begin(const std::string& phase, std::int64_t units, const std::string& unit,
             std::int64_t done = 0);
  void advance(std::int64_t units, const std::string& note);
  // The last phase ended.
  void finish();
  // Makes room for what somebody else writes.
  void clear();

 private:
  bool quiet_;
  std::recursive_mutex mutex_;
  std::unique_ptr<Progress> progress_;
};

}  // namespace graft
