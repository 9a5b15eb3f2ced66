// The memory of one call, carved piece by piece. Without memory it only counts: plan() and the call
// run the same carving code, so that what is planned and what is used cannot drift apart.
#pragma once

#include <cstdint>

namespace graft::mixers {

class Arena {
 public:
  explicit Arena(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}

  // `n` elements, 64-byte aligned, contents undefined; nullptr while counting, and for nothing.
  template <class T>
  T* take(int64_t n) {
    constexpr uint64_t kAlign = 64;
    const uint64_t begin = used_;
    used_ += (static_cast<uint64_t>(n) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return memory_ == nullptr || n == 0 ? nullptr : reinterpret_cast<T*>(memory_ + begin);
  }
  uint64_t used() const { return used_; }

 private:
  char* memory_;
  uint64_t used_ = 0;
};

}  // namespace graft::mixers
