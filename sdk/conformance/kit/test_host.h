// The host a plugin meets in the kit: counts what it hands out and remembers what it hears.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "graft/graft.h"

namespace graft::conformance {

class TestHost {
 public:
  explicit TestHost(std::uint32_t abi);
  TestHost(const TestHost&) = delete;
  TestHost& operator=(const TestHost&) = delete;

  const graft_host* c() const { return &host_; }

  // Threads of graft.host-parallel/1; what they compute may not depend on them where a plugin says
  // so.
  void set_threads(int threads) { threads_ = threads; }
  int threads() const { return threads_; }
  void ask_to_stop(bool stop) { stop_ = stop; }

  struct Line {
    std::int32_t level;
    std::string text;
  };
  std::vector<Line> take_log();
  // Blocks of graft.host-memory/1 that were not given back.
  std::int64_t blocks_out() const { return blocks_out_; }

 private:
  static TestHost& self(const graft_host* host) { return *static_cast<TestHost*>(host->ctx); }
  static void log(const graft_host* host, std::int32_t level, const char* message);
  static std::int32_t should_stop(const graft_host* host);
  static const void* get_extension(const graft_host* host, const char* id);
  static void* alloc(const graft_host* host, DLDevice device, void* stream, std::uint64_t bytes,
                     std::uint64_t align);
  static void release(const graft_host* host, DLDevice device, void* stream, void* p);
  static std::int32_t num_threads(const graft_host* host);
  static void parallel_for(const graft_host* host, std::int64_t begin, std::int64_t end,
                           std::int64_t grain,
                           void (*body)(void*, std::int64_t, std::int64_t, std::int32_t),
                           void* arg);

  static const graft_host_memory kMemory;
  static const graft_host_parallel kParallel;

  graft_host host_{};
  std::atomic<int> threads_{1};
  std::atomic<bool> stop_{false};
  std::atomic<std::int64_t> blocks_out_{0};
  std::mutex mutex_;
  std::vector<Line> lines_;
};

// graft.host-blas/1 in plain loops: float64 sums, whatever the type.
extern const graft_host_blas kPlainBlas;

}  // namespace graft::conformance
