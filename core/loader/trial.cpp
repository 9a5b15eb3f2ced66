#include "core/loader/trial.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/abi/host_services.h"
#include "core/abi/library.h"
#include "core/base/error.h"
#include "core/loader/open_library.h"

namespace graft {
namespace {

[[noreturn]] void run_child(const std::filesystem::path& file) {
  const int nowhere = ::open("/dev/null", O_RDWR);
  if (nowhere >= 0) {
    ::dup2(nowhere, STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
  }
  try {
    HostServices host;
    PluginLibrary::negotiate(open_library(file), file, host);
  } catch (...) {
    // The parent meets the same refusal and has the words for it.
  }
  // No exit handlers: they belong to the parent.
  ::_exit(0);
}

// Waits for the child, at most `limit`; false when it still runs.
bool ended_within(pid_t child, std::chrono::milliseconds limit) {
  const auto descriptor = static_cast<int>(::syscall(SYS_pidfd_open, child, 0));
  if (descriptor < 0) return true;  // an old kernel: waitpid() waits as long as it takes
  pollfd poll_on{descriptor, POLLIN, 0};
  const int ready = ::poll(&poll_on, 1, static_cast<int>(limit.count()));
  ::close(descriptor);
  return ready != 0;
}

}  // namespace

std::string trial_in_child(const std::filesystem::path& file, std::chrono::milliseconds limit) {
  const pid_t child = ::fork();
  if (child < 0) {
    fail(ErrorKind::internal,
         std::string("cannot start a process to try a plugin in: ") + std::strerror(errno));
  }
  if (child == 0) run_child(file);
  const bool ended = ended_within(child, limit);
  if (!ended) ::kill(child, SIGKILL);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!ended) {
    return "does not come back from being opened within " + std::to_string(limit.count() / 1000) +
           " seconds";
  }
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return "crashes when it is opened (signal " + std::to_string(number) + ", " +
           ::strsignal(number) + ")";
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) {
    return "ends the process when it is opened (exit code " + std::to_string(WEXITSTATUS(status)) +
           ")";
  }
  return "";
}

}  // namespace graft
