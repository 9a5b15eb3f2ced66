// The products of matvec.h for one instruction set; see vector-inl.h.
#include "matvec.h"
#include "vector-inl.h"

namespace graft::mixers::GRAFT_ISA {
namespace {

using namespace kernels::GRAFT_ISA;

// kRows dot products with one row of W. Two vectors at a time: the additions of one do not wait for
// those of the other.
template <class T, unsigned kRows>
inline void dots(const MatvecCall<T>& call, int64_t column) {
  constexpr int64_t n = kLanes<T>;
  const T* w = call.weight + column * call.in;
  Vector<T> even[kRows] = {}, odd[kRows] = {};
  int64_t c = 0;
  for (; c + 2 * n <= call.in; c += 2 * n) {
    for (unsigned r = 0; r < kRows; ++r) {
      const T* x = call.x + r * call.in + c;
      even[r] += vec(w + c) * vec(x);
      odd[r] += vec(w + c + n) * vec(x + n);
    }
  }
  for (unsigned r = 0; r < kRows; ++r) {
    const T* x = call.x + r * call.in;
    T total = sum<T>(even[r] + odd[r]);
    for (int64_t i = c; i < call.in; ++i) total += w[i] * x[i];
    call.y[r * call.out + column] = total + (call.bias == nullptr ? T(0) : call.bias[column]);
  }
}

template <class T>
void columns(const MatvecCall<T>& call, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; ++column) {
    switch (call.rows) {
      case 1:
        dots<T, 1>(call, column);
        break;
      case 2:
        dots<T, 2>(call, column);
        break;
      case 3:
        dots<T, 3>(call, column);
        break;
      default:
        dots<T, 4>(call, column);
        break;
    }
  }
}

}  // namespace

extern const Matvec kTable;
const Matvec kTable = {GRAFT_ISA_NAME, columns<float>, columns<double>};

}  // namespace graft::mixers::GRAFT_ISA
