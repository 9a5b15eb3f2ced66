#include "projection.h"

#include <algorithm>
#include <type_traits>

#include "graft/host.hpp"
#include "graft/tensor.hpp"
#include "lanes.h"
#include "matvec.h"

namespace graft::mixers {
namespace {

// A contiguous matrix for the length of one GEMM.
template <class T>
struct MatrixView {
  int64_t shape[2], strides[2];
  DLTensor tensor;

  MatrixView(const T* data, int64_t rows, int64_t columns)
      : shape{rows, columns}, strides{columns, 1}, tensor{const_cast<T*>(data),
                                                          {kDLCPU, 0},
                                                          2,
                                                          sdk::dtype_of<T>(),
                                                          shape,
                                                          strides,
                                                          0} {}
  MatrixView(const MatrixView&) = delete;
};

// c = op(a) op(b) [+ c], op(a) [m,k], op(b) [k,n], all contiguous. By the host; one that offers no
// GEMM gets plain loops.
template <class T>
struct Gemm {
  bool transpose_a, transpose_b;
  int64_t m, n, k;
  const T *a, *b;
  bool add;
  T* c;

  void run() const {
    if (sdk::host_extension<graft_host_blas>(GRAFT_HOST_EXT_BLAS) == nullptr) return by_itself();
    const MatrixView<T> left(a, transpose_a ? k : m, transpose_a ? m : k);
    const MatrixView<T> right(b, transpose_b ? n : k, transpose_b ? k : n);
    MatrixView<T> out(c, m, n);
    sdk::gemm(transpose_a, transpose_b, 1, left.tensor, right.tensor, add ? 1 : 0, out.tensor);
  }

 private:
  void by_itself() const {
    for_each_unit(m, n * k, [&](int64_t i, int64_t) {
      T* row = c + i * n;
      if (!add) std::fill_n(row, n, T(0));
      for (int64_t l = 0; l < k; ++l) {
        const T left = transpose_a ? a[l * m + i] : a[i * k + l];
        for (int64_t j = 0; j < n; ++j)
          row[j] += left * (transpose_b ? b[j * k + l] : b[l * n + j]);
      }
    });
  }
};

template <class T>
void few_rows(const Projection<T>& p, int64_t rows, const T* x, T* y) {
  constexpr int64_t kColumns = 64;
  const int64_t units = (p.out + kColumns - 1) / kColumns;
  for_each_unit(units, 4 * kColumns * p.in, [&](int64_t unit, int64_t) {
    const int64_t end = std::min(p.out, (unit + 1) * kColumns);
    for (int64_t first = 0; first < rows; first += kMatvecRows) {
      const MatvecCall<T> call{p.in,
                               p.out,
                               std::min(kMatvecRows, rows - first),
                               p.weight,
                               p.bias,
                               x + first * p.in,
                               y + first * p.out};
      if constexpr (std::is_same_v<T, double>) {
        matvec().f64(call, unit * kColumns, end);
      } else {
        matvec().f32(call, unit * kColumns, end);
      }
    }
  });
}

}  // namespace

template <class T>
void project(const Projection<T>& p, int64_t rows, const T* x, T* y) {
  constexpr int64_t kFewRows = 8;
  if (rows <= kFewRows) return few_rows(p, rows, x, y);
  const bool with_bias = p.bias != nullptr;
  for (int64_t r = 0; with_bias && r < rows; ++r) std::copy_n(p.bias, p.out, y + r * p.out);
  Gemm<T>{false, true, rows, p.out, p.in, x, p.weight, with_bias, y}.run();
}

template <class T>
void project_backward_input(const Projection<T>& p, int64_t rows, const T* dy, bool add, T* dx) {
  if (dx == nullptr || rows == 0) return;
  Gemm<T>{false, false, rows, p.in, p.out, dy, p.weight, add, dx}.run();
}

template <class T>
void project_backward_params(const Projection<T>& p, int64_t rows, const T* x, const T* dy,
                             const ProjectionGradient<T>& d) {
  if (d.bias != nullptr) sum_rows(rows, p.out, dy, d.accumulate, d.bias);
  if (d.weight == nullptr) return;
  if (rows == 0) {
    if (!d.accumulate) std::fill_n(d.weight, p.out * p.in, T(0));
    return;
  }
  Gemm<T>{true, false, p.out, p.in, rows, dy, x, d.accumulate, d.weight}.run();
}

template <class T>
void sum_rows(int64_t rows, int64_t width, const T* in, bool accumulate, T* out) {
  constexpr int64_t kColumns = 64;
  for_each_unit((width + kColumns - 1) / kColumns, rows * kColumns, [&](int64_t unit, int64_t) {
    const int64_t begin = unit * kColumns, end = std::min(width, begin + kColumns);
    if (!accumulate) std::fill(out + begin, out + end, T(0));
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = in + r * width;
      for (int64_t c = begin; c < end; ++c) out[c] += row[c];
    }
  });
}

#define GRAFT_FOR_TYPE(T)                                                                     \
  template void project<T>(const Projection<T>&, int64_t, const T*, T*);                      \
  template void project_backward_input<T>(const Projection<T>&, int64_t, const T*, bool, T*); \
  template void project_backward_params<T>(const Projection<T>&, int64_t, const T*, const T*, \
                                           const ProjectionGradient<T>&);                     \
  template void sum_rows<T>(int64_t, int64_t, const T*, bool, T*);
GRAFT_FOR_TYPE(float)
GRAFT_FOR_TYPE(double)
#undef GRAFT_FOR_TYPE

}  // namespace graft::mixers
