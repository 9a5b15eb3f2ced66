// What kernels read and write.
#pragma once

#include <cstdint>

namespace graft::kernels {

// A number as bfloat16 stores it: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

// The rows of one head inside a tensor [.., T, .., width]: row t starts at data + t * stride and is
// contiguous.
template <class T>
struct Rows {
  T* data = nullptr;  // nullptr: absent
  int64_t stride = 0;
};

}  // namespace graft::kernels
