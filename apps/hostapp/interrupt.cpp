#include "apps/hostapp/interrupt.h"

#include <atomic>
#include <csignal>

namespace graft {
namespace {

std::atomic<bool> flag{false};
static_assert(std::atomic<bool>::is_always_lock_free, "used in a signal handler");

void on_signal(int signal) {
  flag = true;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void catch_interrupts() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

bool interrupted() { return flag; }

}  // namespace graft
