// y = x W^T for a few rows of x: each row of W is read once, from memory at the speed of memory.
#pragma once

#include <cstdint>

namespace graft::mixers {

template <class T>
struct MatvecCall {
  int64_t in = 0, out = 0, rows = 0;  // rows <= kMatvecRows
  const T* weight = nullptr;          // [out,in]
  const T* bias = nullptr;            // [out] or nullptr
  const T* x = nullptr;               // [rows,in]
  T* y = nullptr;                     // [rows,out]
};
inline constexpr int64_t kMatvecRows = 4;

struct Matvec {
  const char* isa;
  // Columns [begin, end) of y.
  void (*f32)(const MatvecCall<float>&, int64_t begin, int64_t end);
  void (*f64)(const MatvecCall<double>&, int64_t begin, int64_t end);
};

// Of the instruction set that isa.h picks.
const Matvec& matvec();

}  // namespace graft::mixers
