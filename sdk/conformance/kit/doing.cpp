#include "kit/doing.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace graft::conformance {
namespace {

constexpr std::size_t kRoom = 512;
char* current = nullptr;  // NULL in a process that no parent waits for

}  // namespace

void doing(std::string_view what) {
  if (current == nullptr) return;
  const std::size_t n = std::min(what.size(), kRoom - 1);
  std::memcpy(current, what.data(), n);
  current[n] = '\0';
}

SharedNote::SharedNote() {
  void* const p = ::mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(p);
}

SharedNote::~SharedNote() { ::munmap(memory_, kRoom); }

void SharedNote::take_over() { current = memory_; }

std::string SharedNote::text() const { return std::string(memory_, ::strnlen(memory_, kRoom)); }

}  // namespace graft::conformance
