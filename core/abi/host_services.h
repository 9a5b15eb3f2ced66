#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/abi/abi_range.h"
#include "graft/graft.h"

namespace graft {

// What plugins get from the host: a log (spdlog's default logger), a look at the stop flag, and
// services behind string ids: CPU memory, a thread pool, dense algebra. Thread-safe once made.
// Outlives every library it was given to; a plugin that calls it later still finds a host, whose
// services are gone.
class HostServices {
 public:
  struct Settings {
    std::string name = "graft";
    std::string version;      // empty = graft's own
    std::string build_tags;   // compared with each plugin's; empty = those graft was compiled with
    AbiRange abi = kHostAbi;  // offered to each plugin
    std::function<bool()> should_stop;              // empty = never
    const graft_host_blas* blas = nullptr;          // NULL = not offered
    const graft_host_parallel* parallel = nullptr;  // NULL = everything on the caller's thread
  };

  HostServices() : HostServices(Settings{}) {}
  explicit HostServices(Settings settings);
  ~HostServices();
  HostServices(const HostServices&) = delete;
  HostServices& operator=(const HostServices&) = delete;

  const std::string& name() const;
  const std::string& version() const;
  const std::string& build_tags() const;
  const AbiRange& abi() const;

  // The host as the library `label` sees it: its log lines begin with that. Lives for ever, since a
  // plugin gives no sign of when it looks at it last.
  const graft_host* c_host(const std::string& label, std::uint32_t abi);

  // As a plugin would ask.
  const void* extension(const char* id) const;

 private:
  struct Shared;
  Shared* shared_;
};

// From before a plugin's init to behind its deinit. In strict mode a plugin that calls the host
// while nobody holds a lease for its id is logged as misbehaving.
class HostLease {
 public:
  explicit HostLease(std::string plugin_id);
  ~HostLease();
  HostLease(const HostLease&) = delete;
  HostLease& operator=(const HostLease&) = delete;

 private:
  std::string plugin_id_;
};

// The build tags graft itself was compiled with: "compiler=gcc-12;cxx11abi=1;libtorch=2.11.0".
std::string host_build_tags();

// Where two lists of build tags contradict each other: "libtorch=2.8.0, but this graft has
// libtorch=2.11.0". Empty when they do not. A tag only one side has, and the compiler, are no
// contradiction.
std::string build_tags_conflict(const std::string& plugin, const std::string& host);

}  // namespace graft
