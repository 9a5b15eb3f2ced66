#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace graft {

// What went wrong, as far as a caller can act on it. The values are hostapp's exit codes.
enum class ErrorKind : int {
  internal = 1,      // a bug of ours, or the machine's (out of memory, disk full)
  usage = 2,         // a flag, a key or a value of the configuration
  input = 3,         // a file the user gave: a model, a text, a checkpoint
  plugin = 4,        // a plugin that cannot be loaded, or refuses the job
  interrupted = 130  // the user stopped it; resumable
};

// The one exception type of the host. The message names the thing (file, key, tensor, role), what
// was expected and found, and the way out; it is shown to the user as it is.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }
  int exit_code() const noexcept { return static_cast<int>(kind_); }

 private:
  ErrorKind kind_;
};

[[noreturn]] inline void fail(ErrorKind kind, const std::string& message) {
  throw Error(kind, message);
}

}  // namespace graft
