// What kernels read and write.
#pragma once

#include <cstdint>

namespace graft::kernels {

// The rows of one head inside a tensor [.., T, .., width]: row t starts at data + t * stride and is
// contiguous.
template <class T>
struct Rows {
  T* data = nullptr;  // nullptr: absent
  int64_t stride = 0;
};

}  // namespace graft::kernels
