#include "core/abi/strict.h"

#include <spdlog/spdlog.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "core/base/error.h"

namespace graft {
namespace {

constexpr std::uintptr_t kTensorAlignment = 64, kWorkspaceAlignment = 256;

bool is_aligned(const void* data, std::uintptr_t alignment) {
  return reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
}

bool has_elements(const DLTensor& tensor) {
  for (std::int32_t i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] == 0) return false;
  return true;
}

bool is_row_major(const DLTensor& tensor) {
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

constexpr const char* kBusy = "while another call runs that must not run beside it";

// The keys of calls under way, and the threads they are on.
struct Busy {
  std::mutex mutex;
  std::map<const void*, std::thread::id> threads;
  // Never destroyed: libraries may be closed by static destructors.
  static Busy& all() {
    static Busy& busy = *new Busy;
    return busy;
  }
};

}  // namespace

bool strict_mode() {
  static const bool strict = [] {
    const char* const value = std::getenv("GRAFT_HOST_STRICT");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return strict;
}

void blame_plugin(const std::string& who, const std::string& what) {
  fail(ErrorKind::plugin, who + ": " + what);
}

void blame_host(const std::string& who, const std::string& what) {
  fail(ErrorKind::internal, "the host: calls " + who + ": " + what);
}

void check_promised(const DLTensor* tensor, const std::string& who, const std::string& name) {
  if (tensor == nullptr) return;
  const auto broken = [&](const char* how) { blame_host(who, "tensor " + name + " " + how); };
  if (tensor->ndim < 0) broken("has a negative number of axes");
  if (tensor->ndim > 0 && (tensor->shape == nullptr || tensor->strides == nullptr))
    broken("is without shape or strides");
  if (tensor->byte_offset != 0) broken("has a byte_offset");
  if (!has_elements(*tensor)) return;
  if (!is_row_major(*tensor)) broken("is not row-major");
  if (tensor->data == nullptr) broken("is without data");
  if (!is_aligned(tensor->data, kTensorAlignment)) broken("is not aligned to 64 bytes");
}

void check_promised(const graft_exec& exec, const std::string& who) {
  if (exec.workspace_bytes > 0 && exec.workspace == nullptr)
    blame_host(who, "a workspace of " + std::to_string(exec.workspace_bytes) + " bytes is NULL");
  if (!is_aligned(exec.workspace, kWorkspaceAlignment))
    blame_host(who, "the workspace is not aligned to 256 bytes");
}

OneAtATime::OneAtATime(const void* key, const std::string& who) {
  if (!strict_mode()) return;
  Busy& busy = Busy::all();
  const std::lock_guard<std::mutex> lock(busy.mutex);
  if (!busy.threads.emplace(key, std::this_thread::get_id()).second) blame_host(who, kBusy);
  key_ = key;
}

OneAtATime::~OneAtATime() {
  if (key_ == nullptr) return;
  Busy& busy = Busy::all();
  const std::lock_guard<std::mutex> lock(busy.mutex);
  busy.threads.erase(key_);
}

void OneAtATime::log_if_busy(const void* key, const std::string& who) noexcept {
  if (!strict_mode()) return;
  Busy& busy = Busy::all();
  const std::lock_guard<std::mutex> lock(busy.mutex);
  const auto found = busy.threads.find(key);
  if (found != busy.threads.end() && found->second != std::this_thread::get_id())
    spdlog::error("the host: calls {}: {}", who, kBusy);
}

}  // namespace graft
