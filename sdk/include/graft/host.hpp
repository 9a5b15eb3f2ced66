// The host as a plugin sees it: log, cancellation, and the services behind string ids.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <type_traits>

#include "graft/status.hpp"

namespace graft::sdk {
namespace detail {

// One per library, whatever the author's visibility flags: hidden, so that two plugins in one
// process never share it.
__attribute__((visibility("hidden"))) inline std::atomic<const graft_host*> current_host{nullptr};

}  // namespace detail

// The host between the first init and the last deinit, else NULL. [any]
inline const graft_host* host() noexcept { return detail::current_host.load(); }

// Writes a line to the host's log; dropped when there is no host. `level` is GRAFT_LOG_*. [any]
inline void log(int32_t level, const std::string& message) noexcept {
  const graft_host* const h = host();
  if (h != nullptr && GRAFT_HAS(graft_host, h, log) && h->log != nullptr) {
    h->log(h, level, message.c_str());
  }
}

// Has the user asked to stop? Long calls look once in a while and then throw cancelled(). [any]
inline bool should_stop() noexcept {
  const graft_host* const h = host();
  return h != nullptr && GRAFT_HAS(graft_host, h, should_stop) && h->should_stop != nullptr &&
         h->should_stop(h) != 0;
}

inline Status cancelled() { return Status(GRAFT_CANCELLED, "", "stopped on request"); }

// The host's service of that id, or NULL when this host does not have it. [any]
template <class Service>
const Service* host_extension(const char* id) noexcept {
  const graft_host* const h = host();
  if (h == nullptr || !GRAFT_HAS(graft_host, h, get_extension) || h->get_extension == nullptr) {
    return nullptr;
  }
  return static_cast<const Service*>(h->get_extension(h, id));
}

// As host_extension, for a plugin that cannot go on without it.
template <class Service>
const Service& require_host_extension(const char* id) {
  const auto* const service = host_extension<Service>(id);
  if (service == nullptr) {
    throw Status(GRAFT_FAILED_PRECONDITION, cat("host:", id), "this host does not offer it");
  }
  return *service;
}

// c = alpha op(a) op(b) + beta c through graft.host-blas/1; see graft_host_blas::gemm.
inline void gemm(bool transpose_a, bool transpose_b, double alpha, const DLTensor& a,
                 const DLTensor& b, double beta, DLTensor& c, void* stream = nullptr) {
  const auto& blas = require_host_extension<graft_host_blas>(GRAFT_HOST_EXT_BLAS);
  graft_error error = empty_error();
  check(blas.gemm(host(), transpose_a ? 1 : 0, transpose_b ? 1 : 0, alpha, &a, &b, beta, &c, stream,
                  &error),
        error, "gemm");
}

// x := a^-1 x through graft.host-blas/1. False when a is not positive definite.
inline bool spd_solve(const DLTensor& a, DLTensor& x, void* stream = nullptr) {
  const auto& blas = require_host_extension<graft_host_blas>(GRAFT_HOST_EXT_BLAS);
  graft_error error = empty_error();
  const graft_status status = blas.spd_solve(host(), &a, &x, stream, &error);
  if (status == GRAFT_FAILED_PRECONDITION) return false;
  check(status, error, "spd_solve");
  return true;
}

// Calls body(begin, end) for pieces of [begin, end) of at least `grain` items on the host's
// threads, or once on this one when the host has none to give. An exception of the body stops what
// has not begun and is thrown again here.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, Body&& body) {
  if (begin >= end) return;
  const auto* const pool = host_extension<graft_host_parallel>(GRAFT_HOST_EXT_PARALLEL);
  if (pool == nullptr) {
    body(begin, end);
    return;
  }
  struct Shared {
    std::remove_reference_t<Body>* body;
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::exception_ptr first;
  } shared;
  shared.body = &body;
  pool->parallel_for(
      host(), begin, end, grain,
      [](void* arg, int64_t from, int64_t to, int32_t) noexcept {
        auto& s = *static_cast<Shared*>(arg);
        if (s.failed.load()) return;
        try {
          (*s.body)(from, to);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(s.mutex);
          if (!s.failed.exchange(true)) s.first = std::current_exception();
        }
      },
      &shared);
  if (shared.first) std::rethrow_exception(shared.first);
}

// Memory of a device from the host, given back in the destructor.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(DLDevice device, void* stream, uint64_t bytes, uint64_t align = 64)
      : device_(device), stream_(stream) {
    const auto& memory = require_host_extension<graft_host_memory>(GRAFT_HOST_EXT_MEMORY);
    data_ = memory.alloc(host(), device, stream, bytes, align);
    if (data_ == nullptr) {
      throw Status(GRAFT_RESOURCE_EXHAUSTED, "host:graft.host-memory/1",
                   cat("could not give ", bytes, " bytes aligned to ", align));
    }
  }
  HostBuffer(HostBuffer&& other) noexcept
      : device_(other.device_),
        stream_(other.stream_),
        data_(std::exchange(other.data_, nullptr)) {}
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(stream_, other.stream_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~HostBuffer() {
    const auto* const memory = host_extension<graft_host_memory>(GRAFT_HOST_EXT_MEMORY);
    if (data_ != nullptr && memory != nullptr) memory->free(host(), device_, stream_, data_);
  }
  void* data() const noexcept { return data_; }

 private:
  DLDevice device_{kDLCPU, 0};
  void* stream_ = nullptr;
  void* data_ = nullptr;
};

}  // namespace graft::sdk
