#include "rows_pass.h"

#include <algorithm>

#include "lanes.h"
#include "projection.h"

namespace graft::mixers {
namespace {

constexpr int64_t kRowCost = 8;  // of an entry, in multiply-adds: silu, norm, rotation

int64_t lane_size(int64_t dim) { return 4 * (dim + 64); }

template <class T>
const kernels::RowKernels<T>& table() {
  return kernels::rowwise().of<T>();
}

// The sums of a norm's gradient over the pieces of rows.
template <class T>
struct Partials {
  T* data;
  int64_t pieces, dim;

  Partials(int64_t rows, int64_t dim_, T* scratch)
      : data(scratch + lanes_for(row_pieces(rows)) * lane_size(dim_)),
        pieces(row_pieces(rows)),
        dim(dim_) {
    std::fill_n(data, pieces * dim, T(0));
  }
  T* of(int64_t piece) const { return data + piece * dim; }
  void finish(bool accumulate, T* out) const {
    if (out != nullptr) sum_rows(pieces, dim, data, accumulate, out);
  }
};

}  // namespace

int64_t row_scratch_size(int64_t rows, int64_t dim) {
  return lanes_for(row_pieces(rows)) * lane_size(dim) + row_pieces(rows) * dim;
}

template <class T>
void features(const kernels::FeatureRows<T>& op, int64_t rows, const T* in, T* out, T* scratch) {
  for_each_piece(rows, kRowCost * op.dim, [&](int64_t, int64_t begin, int64_t end, int64_t lane) {
    table<T>().features(op, begin, end, in, out, scratch + lane * lane_size(op.dim));
  });
}

template <class T>
void features_backward(const kernels::FeatureRows<T>& op, int64_t rows, const T* in, const T* d_out,
                       T* d_in, bool accumulate, T* d_norm_weight, T* scratch) {
  const Partials<T> partials(rows, op.dim, scratch);
  for_each_piece(rows, 2 * kRowCost * op.dim,
                 [&](int64_t piece, int64_t begin, int64_t end, int64_t lane) {
                   table<T>().features_backward(op, begin, end, in, d_out, d_in, partials.of(piece),
                                                scratch + lane * lane_size(op.dim));
                 });
  partials.finish(accumulate, d_norm_weight);
}

template <class T>
void gated_norm(const kernels::GatedNormRows<T>& op, int64_t rows, const T* in, T* out,
                T* scratch) {
  for_each_piece(rows, kRowCost * op.dim, [&](int64_t, int64_t begin, int64_t end, int64_t lane) {
    table<T>().gated_norm(op, begin, end, in, out, scratch + lane * lane_size(op.dim));
  });
}

template <class T>
void gated_norm_backward(const kernels::GatedNormRows<T>& op, int64_t rows, const T* in,
                         const T* d_out, T* d_in, T* d_gate, bool accumulate, T* d_norm_weight,
                         T* scratch) {
  const Partials<T> partials(rows, op.dim, scratch);
  for_each_piece(
      rows, 2 * kRowCost * op.dim, [&](int64_t piece, int64_t begin, int64_t end, int64_t lane) {
        table<T>().gated_norm_backward(op, begin, end, in, d_out, d_in, d_gate, partials.of(piece),
                                       scratch + lane * lane_size(op.dim));
      });
  partials.finish(accumulate, d_norm_weight);
}

#define GRAFT_FOR_TYPE(T)                                                                         \
  template void features<T>(const kernels::FeatureRows<T>&, int64_t, const T*, T*, T*);           \
  template void features_backward<T>(const kernels::FeatureRows<T>&, int64_t, const T*, const T*, \
                                     T*, bool, T*, T*);                                           \
  template void gated_norm<T>(const kernels::GatedNormRows<T>&, int64_t, const T*, T*, T*);       \
  template void gated_norm_backward<T>(const kernels::GatedNormRows<T>&, int64_t, const T*,       \
                                       const T*, T*, T*, bool, T*, T*);
GRAFT_FOR_TYPE(float)
GRAFT_FOR_TYPE(double)
#undef GRAFT_FOR_TYPE

}  // namespace graft::mixers
