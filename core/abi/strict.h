#pragma once

#include <string>

#include "graft/graft.h"

namespace graft {

// GRAFT_HOST_STRICT=1 in the environment: checks that cost time and memory, for the authors of
// plugins and of this host. Who breaks the ABI is named: "plugin 'org.example.x' (mixer 'x'),
// forward: wrote past the end of y" is Error(plugin), "the host: calls ..." is Error(internal).
bool strict_mode();

// `who` is "plugin 'org.example.x' (mixer 'x'), forward".
[[noreturn]] void blame_plugin(const std::string& who, const std::string& what);
[[noreturn]] void blame_host(const std::string& who, const std::string& what);

// Checks that a tensor passed to a plugin is as the ABI promises (row-major with strides
// filled, byte_offset 0, aligned to 64 bytes). `name` is what the plugin calls it: "x".
void check_promised(const DLTensor* tensor, const std::string& who, const std::string& name);
// Room for the workspace, and its alignment.
void check_promised(const graft_exec& exec, const std::string& who);

// In strict mode blames the host for a second call between construction and destruction that has
// the same key: [inst] calls into one instance, [main] calls into one library.
class OneAtATime {
 public:
  OneAtATime(const void* key, const std::string& who);
  ~OneAtATime();
  OneAtATime(const OneAtATime&) = delete;
  OneAtATime& operator=(const OneAtATime&) = delete;

  // For destructors, which cannot throw: logs a call of that key on another thread.
  static void log_if_busy(const void* key, const std::string& who) noexcept;

 private:
  const void* key_ = nullptr;
};

}  // namespace graft
