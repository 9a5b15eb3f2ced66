/* What the plugins of this folder share: which mutant this is, errors, tensors.
 *
 * A mutant is the healthy plugin, compiled with -DMUTATION=MUTANT_<NAME>. MUTANT_IS(NAME) marks the
 * one place where it differs.
 */
#ifndef GRAFT_CONFORMANCE_MUTANTS_BASE_H_
#define GRAFT_CONFORMANCE_MUTANTS_BASE_H_
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "graft/graft.h"

enum {
  MUTANT_NONE,
#define MUTANT(kind, name, test, what) MUTANT_##name,
#include "mutants.def"
#undef MUTANT
};
#ifndef MUTATION
#define MUTATION MUTANT_NONE
#endif
#define MUTANT_IS(name) (MUTATION == MUTANT_##name)

/* ---------------------------------------------------------------- errors */

#define TRY(call)                            \
  do {                                       \
    const graft_status status_ = (call);     \
    if (status_ != GRAFT_OK) return status_; \
  } while (0)

/* Says what went wrong and where; gives back the status to return. */
__attribute__((format(printf, 4, 5))) static inline graft_status fail(graft_error* error,
                                                                      graft_status code,
                                                                      const char* where,
                                                                      const char* format, ...) {
  if (MUTANT_IS(NO_MESSAGE)) return code;
  if (error == NULL || !GRAFT_HAS(graft_error, error, message)) return code;
  error->code = code;
  snprintf(error->where, sizeof error->where, "%s", where);
  va_list values;
  va_start(values, format);
  vsnprintf(error->message, sizeof error->message, format, values);
  va_end(values);
  return code;
}

/* ---------------------------------------------------------------- tensors */

static const DLDataType kFloat32 = {kDLFloat, 32, 1};
static const DLDataType kFloat64 = {kDLFloat, 64, 1};
static const DLDataType kUint8 = {kDLUInt, 8, 1};
static const DLDataType kInt64 = {kDLInt, 64, 1};

static inline bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

static inline bool is_real_dtype(DLDataType dtype) {
  return same_dtype(dtype, kFloat32) || same_dtype(dtype, kFloat64);
}

static inline int64_t count_of(const DLTensor* tensor) {
  int64_t n = 1;
  for (int32_t axis = 0; axis < tensor->ndim; ++axis) n *= tensor->shape[axis];
  return n;
}

/* Elements of float32 and float64 tensors: what is computed with them is computed in double. */
static inline double get(const DLTensor* tensor, int64_t i) {
  return tensor->dtype.bits == 64 ? ((const double*)tensor->data)[i]
                                  : (double)((const float*)tensor->data)[i];
}
static inline void put(DLTensor* tensor, int64_t i, double value) {
  if (tensor->dtype.bits == 64) {
    ((double*)tensor->data)[i] = value;
  } else {
    ((float*)tensor->data)[i] = (float)value;
  }
}

/* "[2,3,8]" */
static inline const char* shape_text(char* out, size_t size, int32_t ndim, const int64_t* shape) {
  size_t used = (size_t)snprintf(out, size, "[");
  for (int32_t axis = 0; axis < ndim && used < size; ++axis) {
    used += (size_t)snprintf(out + used, size - used, axis == 0 ? "%lld" : ",%lld",
                             (long long)shape[axis]);
  }
  if (used < size) snprintf(out + used, size - used, "]");
  return out;
}

static inline bool is_contiguous(const DLTensor* tensor) {
  int64_t stride = 1;
  for (int32_t axis = tensor->ndim; axis-- > 0;) {
    if (tensor->strides != NULL && tensor->shape[axis] > 1 && tensor->strides[axis] != stride)
      return false;
    stride *= tensor->shape[axis];
  }
  return true;
}

static inline graft_status expect_shape(graft_error* error, const char* where,
                                        const DLTensor* tensor, int32_t ndim,
                                        const int64_t* shape) {
  bool same = tensor->ndim == ndim;
  for (int32_t axis = 0; same && axis < ndim; ++axis) same = tensor->shape[axis] == shape[axis];
  if (same) return GRAFT_OK;
  char wanted[96], got[96];
  return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected shape %s, got %s",
              shape_text(wanted, sizeof wanted, ndim, shape),
              shape_text(got, sizeof got, tensor->ndim, tensor->shape));
}

/* A tensor on the CPU, of this type and shape, without gaps. */
static inline graft_status expect(graft_error* error, const char* where, const DLTensor* tensor,
                                  DLDataType dtype, int32_t ndim, const int64_t* shape) {
  if (tensor == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected a tensor, got NULL");
  if (tensor->device.device_type != kDLCPU) {
    return fail(error, GRAFT_INVALID_ARGUMENT, where,
                "expected a tensor on the CPU, got one on device type %d",
                (int)tensor->device.device_type);
  }
  if (!same_dtype(tensor->dtype, dtype)) {
    return fail(error, GRAFT_INVALID_ARGUMENT, where,
                "expected dtype code %d of %d bits, got code %d of %d bits and %d lanes",
                dtype.code, dtype.bits, tensor->dtype.code, tensor->dtype.bits,
                tensor->dtype.lanes);
  }
  if (!MUTANT_IS(ANY_SHAPE)) TRY(expect_shape(error, where, tensor, ndim, shape));
  if (!is_contiguous(tensor)) {
    return fail(error, GRAFT_INVALID_ARGUMENT, where,
                "expected a contiguous tensor: copy it before the call");
  }
  if (tensor->data == NULL && count_of(tensor) > 0)
    return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected data, got NULL");
  return GRAFT_OK;
}

#endif /* GRAFT_CONFORMANCE_MUTANTS_BASE_H_ */
