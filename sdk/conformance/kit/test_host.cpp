#include "kit/test_host.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <utility>

namespace graft::conformance {

const graft_host_memory TestHost::kMemory{sizeof(graft_host_memory), 0, &TestHost::alloc,
                                          &TestHost::release};
const graft_host_parallel TestHost::kParallel{sizeof(graft_host_parallel), 0,
                                              &TestHost::num_threads, &TestHost::parallel_for};

TestHost::TestHost(std::uint32_t abi) {
  host_.struct_size = sizeof host_;
  host_.abi = abi;
  host_.name = "graft-conformance";
  host_.version = "1";
  host_.ctx = this;
  host_.log = &TestHost::log;
  host_.should_stop = &TestHost::should_stop;
  host_.get_extension = &TestHost::get_extension;
}

std::vector<TestHost::Line> TestHost::take_log() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(lines_, {});
}

void TestHost::log(const graft_host* host, std::int32_t level, const char* message) {
  TestHost& me = self(host);
  const std::lock_guard<std::mutex> lock(me.mutex_);
  me.lines_.push_back({level, message == nullptr ? "" : message});
}

std::int32_t TestHost::should_stop(const graft_host* host) { return self(host).stop_ ? 1 : 0; }

const void* TestHost::get_extension(const graft_host*, const char* id) {
  if (id == nullptr) return nullptr;
  const std::string_view wanted = id;
  if (wanted == GRAFT_HOST_EXT_MEMORY) return &kMemory;
  if (wanted == GRAFT_HOST_EXT_PARALLEL) return &kParallel;
  if (wanted == GRAFT_HOST_EXT_BLAS) return &kPlainBlas;
  return nullptr;
}

void* TestHost::alloc(const graft_host* host, DLDevice device, void*, std::uint64_t bytes,
                      std::uint64_t align) {
  align = std::max<std::uint64_t>(align, 64);
  if (device.device_type != kDLCPU || !std::has_single_bit(align) ||
      bytes > (std::uint64_t{1} << 40))
    return nullptr;
  void* const p =
      std::aligned_alloc(align, std::max<std::uint64_t>((bytes + align - 1) / align, 1) * align);
  if (p != nullptr) ++self(host).blocks_out_;
  return p;
}

void TestHost::release(const graft_host* host, DLDevice, void*, void* p) {
  if (p == nullptr) return;
  --self(host).blocks_out_;
  std::free(p);
}

std::int32_t TestHost::num_threads(const graft_host* host) { return self(host).threads_; }

void TestHost::parallel_for(const graft_host* host, std::int64_t begin, std::int64_t end,
                            std::int64_t grain,
                            void (*body)(void*, std::int64_t, std::int64_t, std::int32_t),
                            void* arg) {
  if (begin >= end) return;
  const std::int64_t items = end - begin, least = std::max<std::int64_t>(grain, 1);
  const auto workers =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(items / least, 1, self(host).threads_));
  if (workers == 1) return body(arg, begin, end, 0);
  std::vector<std::thread> pool;
  const auto from = [&](std::int64_t worker) { return begin + items * worker / workers; };
  for (std::int32_t worker = 1; worker < workers; ++worker) {
    pool.emplace_back([=] { body(arg, from(worker), from(worker + 1), worker); });
  }
  body(arg, begin, from(1), 0);
  for (std::thread& thread : pool) thread.join();
}

}  // namespace graft::conformance
