/* A token mixer in one C11 file: linear attention whose heads forget, each at its own rate.
 *
 *   q, k, v = x Wq^T, x Wk^T, x Wv^T       in heads of `dim`
 *   S_t = a S_{t-1} + k_t v_t^T            the state of a head, dim x dim;  a = sigmoid(decay)
 *   o_t = S_t^T q_t / sqrt(dim)
 *   y = o Wo^T
 *
 * It needs graft.h and a C compiler; matrix products are the host's. Copy it and change the
 * recurrence: recur() and its derivative, recur_back(), are where the arithmetic is. Everything is
 * computed in float64 row by row, whatever the tensors are kept in: a kernel of yours that does not
 * has this one to be compared with. A token that is padding is as if it were not there.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graft/graft.h"

/* ---------------------------------------------------------------- the library's host */

static const graft_host* host;      /* NULL before the first init */
static const graft_host_blas* blas; /* its matrix products */
static int init_count;

/* Says what went wrong and where, as printf would; gives back the status to return. */
static graft_status fail(graft_error* error, graft_status code, const char* where,
                         const char* message, ...) {
  if (error != NULL && GRAFT_HAS(graft_error, error, message)) {
    va_list values;
    va_start(values, message);
    error->code = code;
    snprintf(error->where, sizeof error->where, "%s", where);
    vsnprintf(error->message, sizeof error->message, message, values);
    va_end(values);
  }
  return code;
}

/* ---------------------------------------------------------------- one instance */

enum { WQ, WK, WV, WO, DECAY, N_PARAMS };
enum { Q, K, V, O, N_SAVED };
enum { HEAD_OUTPUT, PRE_OUTPUT, N_TAPS }; /* one and the same here: nothing stands between */

typedef struct mixer {
  graft_mixer base; /* what the host holds */
  int64_t model, heads, dim;
  graft_param_spec params[N_PARAMS];
  const graft_param_spec* param_list[N_PARAMS];
  /* of the last plan() */
  int64_t batch, tokens;
  DLDataType dtype;
  graft_tensor_spec state, saved[N_SAVED], taps[N_TAPS];
  const graft_tensor_spec *state_list[1], *saved_list[N_SAVED], *tap_list[N_TAPS];
} mixer;

static mixer* self_of(graft_mixer* m) { return (mixer*)m->self; }
static int64_t width(const mixer* self) { return self->heads * self->dim; }
static int64_t rows(const mixer* self) { return self->batch * self->tokens; }
static uint64_t item_bytes(const mixer* self) { return self->dtype.bits / 8; }

static void destroy(graft_mixer* m) { free(self_of(m)); }

/* [params] */
/* Names are the keys of a checkpoint, for ever. Roles are what initializers go by. */
static void declare(mixer* self, int i, const char* name, const char* role, const char* axes,
                    int64_t size0, int64_t size1, const char* doc) {
  self->params[i] = (graft_param_spec){
      .struct_size = sizeof(graft_param_spec),
      .flags = GRAFT_P_TRAINABLE,
      .name = name,
      .role = role,
      .axes = axes,
      .domain = "",
      .doc = doc,
      .shape = {size0, size1},
      .ndim = 2,
      .heads = (int32_t)self->heads,
      .head_dim = (int32_t)self->dim,
      .init = GRAFT_INIT_NORMAL,
      .init_b = 0.02,
  };
  self->param_list[i] = &self->params[i];
}

static void declare_params(mixer* self, double raw_decay) {
  const int64_t w = width(self), m = self->model;
  declare(self, WQ, "q_proj.weight", GRAFT_ROLE_QUERY, "heads*key,model", w, m, "queries");
  declare(self, WK, "k_proj.weight", GRAFT_ROLE_KEY, "heads*key,model", w, m, "keys");
  declare(self, WV, "v_proj.weight", GRAFT_ROLE_VALUE, "heads*value,model", w, m, "values");
  declare(self, WO, "o_proj.weight", GRAFT_ROLE_OUTPUT, "model,heads*value", m, w, "output");
  declare(self, DECAY, "decay", GRAFT_ROLE_DECAY_GATE_BIAS, "heads", self->heads, 0,
          "what a head keeps from token to token, before the sigmoid");
  graft_param_spec* const decay = &self->params[DECAY];
  decay->flags |= GRAFT_P_NO_DECAY | GRAFT_P_FP32;
  decay->domain = "logit"; /* sigmoid(raw) is the natural value */
  decay->ndim = 1;
  decay->head_dim = 1;
  decay->init = GRAFT_INIT_CONSTANT;
  decay->init_a = raw_decay;
  decay->init_b = 0;
}
/* [/params] */

static graft_status param_specs(graft_mixer* m, const graft_param_spec* const** specs, uint32_t* n,
                                graft_error* error) {
  (void)error;
  *specs = self_of(m)->param_list;
  *n = N_PARAMS;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- plan */

/* Where things lie in the workspace of a call; `bytes` is what they take together. */
typedef struct rooms {
  void *x, *dy;           /* [rows,model] without what the padded tokens hold */
  void* heads[N_SAVED];   /* [rows,width]: q, k, v, o, or their gradients */
  double *state, *row[5]; /* dim x dim; dim each */
  double* along;          /* a number for each token */
  uint64_t bytes;
} rooms;

/* The next room of a workspace; NULL while they are only counted. */
static void* take(char* workspace, uint64_t* used, uint64_t bytes) {
  void* const place = workspace == NULL ? NULL : workspace + *used;
  *used += (bytes + 63) / 64 * 64;
  return place;
}

static rooms rooms_in(const mixer* self, char* workspace) {
  const uint64_t n = (uint64_t)rows(self), item = item_bytes(self), d = (uint64_t)self->dim;
  rooms r = {0};
  r.x = take(workspace, &r.bytes, n * (uint64_t)self->model * item);
  r.dy = take(workspace, &r.bytes, n * (uint64_t)self->model * item);
  for (int i = 0; i < N_SAVED; ++i)
    r.heads[i] = take(workspace, &r.bytes, n * (uint64_t)width(self) * item);
  r.state = take(workspace, &r.bytes, d * d * sizeof(double));
  for (int i = 0; i < 5; ++i) r.row[i] = take(workspace, &r.bytes, d * sizeof(double));
  r.along = take(workspace, &r.bytes, (uint64_t)self->tokens * sizeof(double));
  return r;
}

static graft_status plan(graft_mixer* m, const graft_plan_in* in, graft_plan_out* out,
                         graft_error* error) {
  mixer* const self = self_of(m);
  const DLDataType t = in->dtype;
  if (in->device_type != kDLCPU)
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.device_type", "this mixer runs on the CPU");
  if (t.code != kDLFloat || (t.bits != 32 && t.bits != 64) || t.lanes != 1)
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.dtype",
                "expected float32 or float64, got %d bits of type %d", t.bits, t.code);
  if (in->batch < 0 || in->tokens < 0)
    return fail(error, GRAFT_INVALID_ARGUMENT, "plan",
                "expected sizes of 0 and more, got %lld x %lld", (long long)in->batch,
                (long long)in->tokens);
  self->batch = in->batch;
  self->tokens = in->tokens;
  self->dtype = t;

  self->state = (graft_tensor_spec){.struct_size = sizeof(graft_tensor_spec),
                                    .name = "state",
                                    .axes = "batch,heads,key,value",
                                    .doc = "S after the last token",
                                    .shape = {in->batch, self->heads, self->dim, self->dim},
                                    .ndim = 4,
                                    .dtype = t};
  self->state_list[0] = &self->state;
  out->n_state = 1;
  out->state = self->state_list;

  static const char* const names[N_SAVED] = {"q", "k", "v", "o"};
  for (int i = 0; i < N_SAVED; ++i) {
    self->saved[i] = (graft_tensor_spec){.struct_size = sizeof(graft_tensor_spec),
                                         .name = names[i],
                                         .axes = "batch,tokens,heads*key",
                                         .doc = "what backward() would compute again",
                                         .shape = {in->batch, in->tokens, width(self)},
                                         .ndim = 3,
                                         .dtype = t};
    self->saved_list[i] = &self->saved[i];
  }

  /* What initializers and objectives may look at. */
  self->taps[HEAD_OUTPUT] =
      (graft_tensor_spec){.struct_size = sizeof(graft_tensor_spec),
                          .name = GRAFT_TAP_HEAD_OUTPUT,
                          .axes = "batch,tokens,heads,value",
                          .doc = "o",
                          .shape = {in->batch, in->tokens, self->heads, self->dim},
                          .ndim = 4,
                          .dtype = t};
  self->taps[PRE_OUTPUT] = (graft_tensor_spec){.struct_size = sizeof(graft_tensor_spec),
                                               .name = GRAFT_TAP_PRE_OUTPUT,
                                               .axes = "batch,tokens,heads*value",
                                               .doc = "o",
                                               .shape = {in->batch, in->tokens, width(self)},
                                               .ndim = 3,
                                               .dtype = t};
  for (int i = 0; i < N_TAPS; ++i) self->tap_list[i] = &self->taps[i];
  out->n_taps = N_TAPS;
  out->taps = self->tap_list;

  out->n_saved = (in->flags & GRAFT_X_TRAINING) != 0 ? N_SAVED : 0;
  out->saved = self->saved_list;
  out->workspace_forward = out->workspace_backward = out->workspace_step =
      rooms_in(self, NULL).bytes;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- checks of a call */

static graft_status check(const DLTensor* tensor, const char* name, DLDataType dtype, int32_t ndim,
                          const int64_t* shape, graft_error* error) {
  char where[64];
  int64_t n = 1;
  snprintf(where, sizeof where, "tensor:%s", name);
  if (tensor == NULL) return fail(error, GRAFT_INVALID_ARGUMENT, where, "is missing (NULL)");
  if (tensor->device.device_type != kDLCPU)
    return fail(error, GRAFT_INVALID_ARGUMENT, where, "is not on the CPU");
  if (memcmp(&tensor->dtype, &dtype, sizeof dtype) != 0)
    return fail(error, GRAFT_INVALID_ARGUMENT, where,
                "expected %d bits, as planned, got %d of type %d", dtype.bits, tensor->dtype.bits,
                tensor->dtype.code);
  if (tensor->ndim != ndim)
    return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected %d axes, got %d", ndim,
                tensor->ndim);
  for (int32_t i = 0; i < ndim; ++i) {
    if (tensor->shape[i] != shape[i])
      return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected axis %d to be %lld, got %lld", i,
                  (long long)shape[i], (long long)tensor->shape[i]);
    n *= shape[i];
  }
  if (n > 0 && tensor->data == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, where, "has no data");
  return GRAFT_OK;
}

/* Returns from the caller when `call` does not give GRAFT_OK. */
#define TRY(call)                            \
  do {                                       \
    const graft_status status_ = (call);     \
    if (status_ != GRAFT_OK) return status_; \
  } while (0)

static graft_status check_exec(const mixer* self, const graft_exec* exec, graft_error* error) {
  const uint64_t bytes = rooms_in(self, NULL).bytes;
  if (exec->device_type != kDLCPU)
    return fail(error, GRAFT_INVALID_ARGUMENT, "exec.device_type", "this mixer runs on the CPU");
  if (exec->workspace == NULL || exec->workspace_bytes < bytes)
    return fail(error, GRAFT_INVALID_ARGUMENT, "exec.workspace",
                "expected %llu bytes, as planned, got %llu", (unsigned long long)bytes,
                (unsigned long long)(exec->workspace == NULL ? 0 : exec->workspace_bytes));
  return GRAFT_OK;
}

/* All that goes into a forward pass, and so into the backward pass too. */
static graft_status check_inputs(const mixer* self, const graft_mixer_forward* call,
                                 graft_error* error) {
  const int64_t x_shape[] = {self->batch, self->tokens, self->model};
  const DLDataType u8 = {kDLUInt, 8, 1}, i64 = {kDLInt, 64, 1};
  TRY(check(call->x, "x", self->dtype, 3, x_shape, error));
  if (call->positions != NULL) TRY(check(call->positions, "positions", i64, 2, x_shape, error));
  if (call->pad_mask != NULL) TRY(check(call->pad_mask, "pad_mask", u8, 2, x_shape, error));
  if (call->seq_offsets != NULL)
    return fail(error, GRAFT_UNIMPLEMENTED, "tensor:seq_offsets", "packed sequences are not read");
  if (call->n_params != N_PARAMS || call->params == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, "params", "expected %d, got %u", N_PARAMS,
                call->params == NULL ? 0 : call->n_params);
  for (int i = 0; i < N_PARAMS; ++i) {
    const graft_param_spec* const p = &self->params[i];
    TRY(check(call->params[i], p->name, self->dtype, p->ndim, p->shape, error));
  }
  if ((call->state_in != NULL || call->state_out != NULL) && call->n_state != 1)
    return fail(error, GRAFT_INVALID_ARGUMENT, "state", "expected 1, got %u", call->n_state);
  if (call->state_in != NULL)
    TRY(check(call->state_in[0], "state_in", self->dtype, 4, self->state.shape, error));
  if (call->saved == NULL) return GRAFT_OK;
  if (call->n_saved != N_SAVED)
    return fail(error, GRAFT_INVALID_ARGUMENT, "saved", "expected %d, got %u", N_SAVED,
                call->n_saved);
  for (int i = 0; i < N_SAVED; ++i)
    TRY(check(call->saved[i], self->saved[i].name, self->dtype, 3, self->saved[i].shape, error));
  return GRAFT_OK;
}

/* Taps or their gradients; NULL where one is not wanted. */
static graft_status check_taps(const mixer* self, uint32_t n, const DLTensor* const* taps,
                               graft_error* error) {
  if (n != 0 && n != N_TAPS)
    return fail(error, GRAFT_INVALID_ARGUMENT, "taps", "expected %d, got %u", N_TAPS, n);
  for (uint32_t i = 0; i < n; ++i) {
    const graft_tensor_spec* const spec = &self->taps[i];
    if (taps[i] != NULL)
      TRY(check(taps[i], spec->name, self->dtype, spec->ndim, spec->shape, error));
  }
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- arithmetic */

static int is_pad(const mixer* self, const DLTensor* mask, int64_t b, int64_t t) {
  return mask != NULL && ((const uint8_t*)mask->data)[b * self->tokens + t] == 0;
}

/* `tensor` [B,T,model] with zeros where a token is padding, whatever it holds there (a NaN would go
 * through a matrix product into the gradients of the weights). */
static const void* without_pads(const mixer* self, const DLTensor* tensor, const DLTensor* mask,
                                void* room) {
  const uint64_t bytes = (uint64_t)self->model * item_bytes(self);
  if (mask == NULL) return tensor->data;
  for (int64_t i = 0; i < rows(self); ++i) {
    char* const to = (char*)room + (uint64_t)i * bytes;
    if (is_pad(self, mask, 0, i)) {
      memset(to, 0, bytes);
    } else {
      memcpy(to, (const char*)tensor->data + (uint64_t)i * bytes, bytes);
    }
  }
  return room;
}

/* Rows between tensors of float32 or float64 and float64. */
static void load(const mixer* self, const void* from, int64_t at, int64_t n, double* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = self->dtype.bits == 64 ? ((const double*)from)[at + i] : ((const float*)from)[at + i];
  }
}
static void store(const mixer* self, const double* from, int64_t n, void* to, int64_t at) {
  for (int64_t i = 0; i < n; ++i) {
    if (self->dtype.bits == 64) {
      ((double*)to)[at + i] = from[i];
    } else {
      ((float*)to)[at + i] = (float)from[i];
    }
  }
}

/* c [m,n] = op(a) op(b) + beta c, op() transposing what is marked so; k is what is summed over. */
static graft_status multiply(const mixer* self, const void* a, int a_transposed, const void* b,
                             int b_transposed, double beta, void* c, int64_t m, int64_t n,
                             int64_t k, graft_error* error) {
  int64_t shapes[3][2] = {{a_transposed ? k : m, a_transposed ? m : k},
                          {b_transposed ? n : k, b_transposed ? k : n},
                          {m, n}};
  int64_t strides[3][2];
  DLTensor t[3];
  if (m == 0 || n == 0) return GRAFT_OK;
  if (k == 0) { /* a batch without tokens */
    if (beta == 0) memset(c, 0, (uint64_t)(m * n) * item_bytes(self));
    return GRAFT_OK;
  }
  for (int i = 0; i < 3; ++i) {
    strides[i][0] = shapes[i][1];
    strides[i][1] = 1;
    t[i] = (DLTensor){.device = {kDLCPU, 0},
                      .ndim = 2,
                      .dtype = self->dtype,
                      .shape = shapes[i],
                      .strides = strides[i]};
  }
  t[0].data = (void*)a; /* gemm only reads it */
  t[1].data = (void*)b;
  t[2].data = c;
  return blas->gemm(host, a_transposed, b_transposed, 1.0, &t[0], &t[1], beta, &t[2], NULL, error);
}

/* The gradients that come in through the taps, on top of `to` [rows,width]. */
static void add_tap_grads(const mixer* self, const graft_mixer_backward* call, void* to) {
  for (int i = 0; call->dtaps != NULL && i < N_TAPS; ++i) {
    if (call->dtaps[i] == NULL) continue;
    for (int64_t at = 0; at < rows(self) * width(self); ++at) {
      double sum, more;
      load(self, to, at, 1, &sum);
      load(self, call->dtaps[i]->data, at, 1, &more);
      sum += more;
      store(self, &sum, 1, to, at);
    }
  }
}

static double kept(const mixer* self, const graft_mixer_forward* call, int64_t head) {
  double raw;
  load(self, call->params[DECAY]->data, head, 1, &raw);
  return 1.0 / (1.0 + exp(-raw));
}

static void load_state(const mixer* self, const DLTensor* const* state, int64_t b, int64_t h,
                       double* to) {
  const int64_t size = self->dim * self->dim;
  if (state == NULL) {
    memset(to, 0, (uint64_t)size * sizeof *to);
  } else {
    load(self, state[0]->data, (b * self->heads + h) * size, size, to);
  }
}

/* Where a head's row of a token lies in q, k, v and o. */
static int64_t row_at(const mixer* self, int64_t b, int64_t t, int64_t h) {
  return ((b * self->tokens + t) * self->heads + h) * self->dim;
}

static void load_rows(const mixer* self, void* const* heads, int n, int64_t at, const rooms* r) {
  for (int i = 0; i < n; ++i) load(self, heads[i], at, self->dim, r->row[i]);
}

static void store_zeros(const mixer* self, void* to, int64_t at) {
  memset((char*)to + (uint64_t)at * item_bytes(self), 0, (uint64_t)self->dim * item_bytes(self));
}

/* [recurrence] */
/* S = a S + k v^T */
static void advance(int64_t dim, double a, const double* k, const double* v, double* s) {
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < dim; ++j) s[i * dim + j] = a * s[i * dim + j] + k[i] * v[j];
  }
}

/* One head of one sequence: o from q, k and v, which stand in this order in `heads`. */
static void recur(const mixer* self, const graft_mixer_forward* call, int64_t b, int64_t h,
                  void* const* heads, const rooms* r) {
  const int64_t d = self->dim;
  const double a = kept(self, call, h), scale = 1.0 / sqrt((double)d);
  double *q = r->row[Q], *k = r->row[K], *v = r->row[V], *o = r->row[O];
  load_state(self, call->state_in, b, h, r->state);
  for (int64_t t = 0; t < self->tokens; ++t) {
    const int64_t at = row_at(self, b, t, h);
    if (is_pad(self, call->pad_mask, b, t)) {
      store_zeros(self, heads[O], at);
      continue;
    }
    load_rows(self, heads, 3, at, r);
    advance(d, a, k, v, r->state);
    for (int64_t j = 0; j < d; ++j) o[j] = 0;
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t j = 0; j < d; ++j) o[j] += scale * q[i] * r->state[i * d + j];
    }
    store(self, o, d, heads[O], at);
  }
  if (call->state_out != NULL)
    store(self, r->state, d * d, call->state_out[0]->data, (b * self->heads + h) * d * d);
}
/* [/recurrence] */

static graft_status forward(graft_mixer* m, const graft_exec* exec, const graft_mixer_forward* call,
                            graft_error* error) {
  mixer* const self = self_of(m);
  const int64_t n = rows(self), w = width(self), model = self->model;
  const int64_t x_shape[] = {self->batch, self->tokens, model};
  TRY(check_exec(self, exec, error));
  TRY(check_inputs(self, call, error));
  TRY(check(call->y, "y", self->dtype, 3, x_shape, error));
  if (call->state_out != NULL)
    TRY(check(call->state_out[0], "state_out", self->dtype, 4, self->state.shape, error));

  TRY(check_taps(self, call->taps == NULL ? 0 : call->n_taps, (const DLTensor* const*)call->taps,
                 error));

  const rooms r = rooms_in(self, exec->workspace);
  void* heads[N_SAVED];
  for (int i = 0; i < N_SAVED; ++i) heads[i] = call->saved ? call->saved[i]->data : r.heads[i];
  const void* const x = without_pads(self, call->x, call->pad_mask, r.x);
  for (int i = 0; i < 3; ++i)
    TRY(multiply(self, x, 0, call->params[i]->data, 1, 0, heads[i], n, w, model, error));
  for (int64_t b = 0; b < self->batch; ++b) {
    for (int64_t h = 0; h < self->heads; ++h) recur(self, call, b, h, heads, &r);
  }
  for (uint32_t i = 0; call->taps != NULL && n > 0 && i < call->n_taps; ++i) {
    if (call->taps[i] != NULL)
      memcpy(call->taps[i]->data, heads[O], (uint64_t)(n * w) * item_bytes(self));
  }
  return multiply(self, heads[O], 0, call->params[WO]->data, 1, 0, call->y->data, n, model, w,
                  error);
}

/* ---------------------------------------------------------------- backward */

/* [backward] */
/* With G_t the derivative by S_t:
 *
 *   G_t = q_t do_t^T + a G_{t+1},   dq_t = S_t do_t,   dk_t = G_t v_t,   dv_t = G_t^T k_t
 *
 * and the derivative by log a is the sum of e_t = a <G_t, S_{t-1}>. No state has to be kept for it:
 * <G_t, S_t> is e_t + <k_t, dk_t> and also <q_t, dq_t> + e_{t+1}, so
 *
 *   e_t = e_{t+1} + <q_t, dq_t> - <k_t, dk_t>,   from the end on: e = <G, S> of the last state.
 */

/* dq, and <q_t, dq_t> in r->along; leaves the last state in r->state. `heads` is q, k, v, o and
 * `grads` dq, dk, dv, do. */
static void query_grads(const mixer* self, const graft_mixer_forward* fwd, int64_t b, int64_t h,
                        void* const* heads, void* const* grads, const rooms* r) {
  const int64_t d = self->dim;
  const double a = kept(self, fwd, h), scale = 1.0 / sqrt((double)d);
  double *q = r->row[Q], *k = r->row[K], *v = r->row[V], *go = r->row[O], *dq = r->row[4];
  load_state(self, fwd->state_in, b, h, r->state);
  for (int64_t t = 0; t < self->tokens; ++t) {
    const int64_t at = row_at(self, b, t, h);
    r->along[t] = 0;
    if (is_pad(self, fwd->pad_mask, b, t)) {
      store_zeros(self, grads[Q], at);
      continue;
    }
    load_rows(self, heads, 3, at, r);
    load(self, grads[O], at, d, go);
    advance(d, a, k, v, r->state);
    for (int64_t i = 0; i < d; ++i) {
      dq[i] = 0;
      for (int64_t j = 0; j < d; ++j) dq[i] += scale * r->state[i * d + j] * go[j];
      r->along[t] += q[i] * dq[i];
    }
    store(self, dq, d, grads[Q], at);
  }
}

/* dk and dv, from query_grads() and `e` on; leaves a G_1 in r->state and gives back the derivative
 * by log a. */
static double key_grads(const mixer* self, const graft_mixer_backward* call, int64_t b, int64_t h,
                        double e, void* const* heads, void* const* grads, const rooms* r) {
  const int64_t d = self->dim;
  const double a = kept(self, call->fwd, h), scale = 1.0 / sqrt((double)d);
  double *q = r->row[Q], *k = r->row[K], *v = r->row[V], *go = r->row[O], *dk = r->row[4];
  double* const dv = go; /* which has been used by then */
  double sum = 0;
  load_state(self, call->dstate_out, b, h, r->state);
  for (int64_t t = self->tokens - 1; t >= 0; --t) {
    const int64_t at = row_at(self, b, t, h);
    if (is_pad(self, call->fwd->pad_mask, b, t)) {
      store_zeros(self, grads[K], at);
      store_zeros(self, grads[V], at);
      continue;
    }
    load_rows(self, heads, 3, at, r);
    load(self, grads[O], at, d, go);
    for (int64_t i = 0; i < d; ++i) q[i] *= scale;
    advance(d, 1.0, q, go, r->state);
    for (int64_t j = 0; j < d; ++j) dk[j] = dv[j] = 0;
    e += r->along[t];
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t j = 0; j < d; ++j) {
        double* const g = &r->state[i * d + j];
        dk[i] += *g * v[j];
        dv[j] += *g * k[i];
        *g *= a;
      }
      e -= k[i] * dk[i];
    }
    sum += e;
    store(self, dk, d, grads[K], at);
    store(self, dv, d, grads[V], at);
  }
  return sum;
}

/* One head of one sequence: dq, dk, dv and the incoming state's gradient; gives back the derivative
 * by log a. */
static double recur_back(const mixer* self, const graft_mixer_backward* call, int64_t b, int64_t h,
                         void* const* heads, void* const* grads, const rooms* r) {
  const int64_t size = self->dim * self->dim, state_at = (b * self->heads + h) * size;
  double e = 0;
  query_grads(self, call->fwd, b, h, heads, grads, r);
  for (int64_t i = 0; call->dstate_out != NULL && i < size; ++i) {
    double g;
    load(self, call->dstate_out[0]->data, state_at + i, 1, &g);
    e += g * r->state[i];
  }
  const double sum = key_grads(self, call, b, h, e, heads, grads, r);
  if (call->dstate_in != NULL) store(self, r->state, size, call->dstate_in[0]->data, state_at);
  return sum;
}
/* [/backward] */

static graft_status check_gradients(const mixer* self, const graft_mixer_backward* call,
                                    graft_error* error) {
  const int64_t x_shape[] = {self->batch, self->tokens, self->model};
  const int64_t* const s_shape = self->state.shape;
  TRY(check(call->dy, "dy", self->dtype, 3, x_shape, error));
  TRY(check_taps(self, call->dtaps == NULL ? 0 : N_TAPS, call->dtaps, error));
  if (call->dx != NULL) TRY(check(call->dx, "dx", self->dtype, 3, x_shape, error));
  if (call->dstate_out != NULL)
    TRY(check(call->dstate_out[0], "dstate_out", self->dtype, 4, s_shape, error));
  if (call->dstate_in != NULL)
    TRY(check(call->dstate_in[0], "dstate_in", self->dtype, 4, s_shape, error));
  for (int i = 0; call->dparams != NULL && i < N_PARAMS; ++i) {
    const graft_param_spec* const p = &self->params[i];
    if (call->dparams[i] != NULL)
      TRY(check(call->dparams[i], p->name, self->dtype, p->ndim, p->shape, error));
  }
  return GRAFT_OK;
}

/* NULL = frozen */
static void* gradient_of(const graft_mixer_backward* call, int i) {
  return call->dparams == NULL || call->dparams[i] == NULL ? NULL : call->dparams[i]->data;
}

static graft_status backward(graft_mixer* m, const graft_exec* exec,
                             const graft_mixer_backward* call, graft_error* error) {
  mixer* const self = self_of(m);
  const graft_mixer_forward* const fwd = call->fwd;
  const int64_t n = rows(self), w = width(self), model = self->model;
  const double beta = (exec->flags & GRAFT_X_ACCUMULATE) != 0 ? 1 : 0;
  TRY(check_exec(self, exec, error));
  TRY(check_inputs(self, fwd, error));
  TRY(check_gradients(self, call, error));
  if (fwd->saved == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, "saved", "the forward pass was not for training");

  const rooms r = rooms_in(self, exec->workspace);
  void* heads[N_SAVED];
  for (int i = 0; i < N_SAVED; ++i) heads[i] = fwd->saved[i]->data;
  const void* const x = without_pads(self, fwd->x, fwd->pad_mask, r.x);
  const void* const dy = without_pads(self, call->dy, fwd->pad_mask, r.dy);
  TRY(multiply(self, dy, 0, fwd->params[WO]->data, 0, 0, r.heads[O], n, w, model, error));
  add_tap_grads(self, call, r.heads[O]);
  for (int64_t h = 0; h < self->heads; ++h) {
    const double a = kept(self, fwd, h);
    double by_log_a = 0, grad = 0;
    for (int64_t b = 0; b < self->batch; ++b)
      by_log_a += recur_back(self, call, b, h, heads, r.heads, &r);
    if (gradient_of(call, DECAY) == NULL) continue;
    if (beta != 0) load(self, gradient_of(call, DECAY), h, 1, &grad);
    grad += (1 - a) * by_log_a;
    store(self, &grad, 1, gradient_of(call, DECAY), h);
  }
  for (int i = 0; i < 3; ++i) {
    void* const dw = gradient_of(call, i);
    if (dw != NULL) TRY(multiply(self, r.heads[i], 1, x, 0, beta, dw, w, model, n, error));
    if (call->dx != NULL)
      TRY(multiply(self, r.heads[i], 0, fwd->params[i]->data, 0, i > 0, call->dx->data, n, model, w,
                   error));
  }
  if (gradient_of(call, WO) == NULL) return GRAFT_OK;
  return multiply(self, dy, 1, heads[O], 0, beta, gradient_of(call, WO), model, w, n, error);
}

/* ---------------------------------------------------------------- natural values */

/* a = 2^(-1 / half_life) = sigmoid(raw). Beyond 80 a is 1 (or 0) in float64 too, and a parameter is
 * always finite: an endless half-life is that. */
static double raw_decay(double half_life) {
  const double forgotten = -expm1(-log(2.0) / half_life); /* 1 - a, without cancellation */
  const double raw = log1p(-forgotten) - log(forgotten);
  return raw > 80 ? 80 : raw < -80 ? -80 : raw;
}

/* Initializers that know how long a head should remember say so in tokens. */
static graft_status set_natural(graft_mixer* m, const char* what, uint32_t n, const double* values,
                                DLTensor* const* params, uint8_t* written, graft_error* error) {
  mixer* const self = self_of(m);
  if (strcmp(what, GRAFT_NATURAL_HALF_LIFE) != 0)
    return fail(error, GRAFT_UNIMPLEMENTED, what, "this mixer has no such quantity");
  if ((int64_t)n != self->heads)
    return fail(error, GRAFT_INVALID_ARGUMENT, "natural:half-life", "expected %lld values, got %u",
                (long long)self->heads, n);
  for (uint32_t h = 0; h < n; ++h) {
    if (!(values[h] > 0))
      return fail(error, GRAFT_OUT_OF_RANGE, "natural:half-life", "expected more than 0, got %g",
                  values[h]);
  }
  for (uint32_t h = 0; h < n; ++h) ((float*)params[DECAY]->data)[h] = (float)raw_decay(values[h]);
  if (written != NULL) written[DECAY] = 1;
  return GRAFT_OK;
}

static const graft_mixer_domain domain = {.struct_size = sizeof(graft_mixer_domain),
                                          .set = set_natural};

static const void* mixer_extension(graft_mixer* m, const char* id) {
  (void)m;
  return id != NULL && strcmp(id, GRAFT_EXT_MIXER_DOMAIN) == 0 ? &domain : NULL;
}

/* ---------------------------------------------------------------- the component */

static const graft_mixer_vtbl table = {
    .struct_size = sizeof(graft_mixer_vtbl),
    .param_schema = 1, /* one more when names, shapes or meaning of parameters change */
    .destroy = destroy,
    .param_specs = param_specs,
    .plan = plan,
    .forward = forward,
    .backward = backward,
    .step = forward, /* one token is a sequence of one token */
    .get_extension = mixer_extension,
};

static const graft_option half_life_option = {
    .struct_size = sizeof(graft_option),
    .key = "half_life",
    .doc = "tokens until a head has forgotten half, before an initializer or training says other",
    .def = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 64}},
    .min = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 0.01}},
    .max = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 1e6}},
};
static const graft_option* const options[] = {&half_life_option};
static const DLDataType dtypes[] = {{kDLFloat, 32, 1}, {kDLFloat, 64, 1}};
static const DLDeviceType devices[] = {kDLCPU};

static const graft_desc description = {
    .struct_size = sizeof(graft_desc),
    .n_options = 1,
    .id = "org.example.my-c-mixer",
    .alias = "my_c_mixer",
    .name = "My c mixer",
    .version = "0.1.0",
    .license = "Apache-2.0",
    .citation = "",
    .description = "linear attention whose heads forget, each at its own rate",
    .caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO | GRAFT_CAP_STATEFUL_GRAD |
            GRAFT_CAP_PAD_MASK | GRAFT_CAP_DETERMINISTIC,
    .options = options,
    .dtypes = dtypes,
    .devices = devices,
    .n_dtypes = 2,
    .n_devices = 1,
};
static const graft_desc* const descriptions[] = {&description};

/* The configuration is complete and checked: every option of the schema is there. */
static graft_status create(const char* id, const graft_layer_info* layer,
                           const graft_config* config, graft_mixer** out, graft_error* error) {
  if (strcmp(id, description.id) != 0)
    return fail(error, GRAFT_NOT_FOUND, "id", "this library has no '%s'", id);
  if (layer->n_heads <= 0 || layer->head_dim <= 0 || layer->model_dim <= 0)
    return fail(error, GRAFT_INVALID_ARGUMENT, "layer",
                "expected sizes above 0, got %d heads of %d in %lld", layer->n_heads,
                layer->head_dim, (long long)layer->model_dim);
  if (blas == NULL)
    return fail(error, GRAFT_FAILED_PRECONDITION, "host:" GRAFT_HOST_EXT_BLAS,
                "this host does not offer it");
  mixer* const self = calloc(1, sizeof *self);
  if (self == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  double half_life = half_life_option.def.u.f;
  for (uint32_t i = 0; i < config->count; ++i) {
    if (strcmp(config->keys[i], half_life_option.key) == 0) half_life = config->values[i].u.f;
  }
  self->base = (graft_mixer){.v = &table, .self = self};
  self->model = layer->model_dim;
  self->heads = layer->n_heads; /* key-value heads too: an initializer repeats the teacher's */
  self->dim = layer->head_dim;
  declare_params(self, raw_decay(half_life));
  *out = &self->base;
  return GRAFT_OK;
}

static const graft_mixer_factory factory = {
    .struct_size = sizeof(graft_mixer_factory),
    .count = 1,
    .descs = descriptions,
    .create = create,
};

/* ---------------------------------------------------------------- the library */

/* Several parts of a process may open a library, each with a host of its own: the first one stays
 * until the last deinit. */
static graft_status init(const graft_host* given, const char* library_path, graft_error* error) {
  (void)library_path;
  if (given == NULL) return fail(error, GRAFT_INVALID_ARGUMENT, "host", "is missing (NULL)");
  if (init_count++ > 0) return GRAFT_OK;
  host = given;
  blas = given->get_extension == NULL ? NULL : given->get_extension(given, GRAFT_HOST_EXT_BLAS);
  return GRAFT_OK;
}

static void deinit(void) {
  if (init_count == 0 || --init_count > 0) return;
  host = NULL;
  blas = NULL;
}

static const void* library_extension(const char* id) {
  return id != NULL && strcmp(id, GRAFT_EXT_MIXER_FACTORY) == 0 ? &factory : NULL;
}

static const graft_plugin plugin = {
    .struct_size = sizeof(graft_plugin),
    .id = "org.example.my-c-mixer",
    .vendor = "",
    .url = "",
    .version = "0.1.0",
    .license = "Apache-2.0",
    .build_tags = GRAFT_BUILD_TAGS, /* from graft_add_plugin(); "" without LibTorch */
    .init = init,
    .deinit = deinit,
    .get_extension = library_extension,
};

/* The one exported symbol. */
GRAFT_EXPORT graft_status GRAFT_CALL graft_plugin_negotiate(const graft_negotiate_in* in,
                                                            graft_negotiate_out* out,
                                                            graft_error* error) {
  /* The version whose header has all that is used here; a later header does not change it. */
  const uint32_t spoken = GRAFT_ABI(1, 0);
  if (in->min_abi > spoken || in->max_abi < spoken)
    return fail(error, GRAFT_ABI_MISMATCH, "abi",
                "this plugin speaks graft ABI %u.%u, the host %u.%u to %u.%u",
                GRAFT_ABI_MAJOR(spoken), GRAFT_ABI_MINOR(spoken), GRAFT_ABI_MAJOR(in->min_abi),
                GRAFT_ABI_MINOR(in->min_abi), GRAFT_ABI_MAJOR(in->max_abi),
                GRAFT_ABI_MINOR(in->max_abi));
  if (in->dlpack_major != DLPACK_MAJOR_VERSION)
    return fail(error, GRAFT_ABI_MISMATCH, "dlpack_major",
                "this plugin speaks DLPack %d, the host %u", DLPACK_MAJOR_VERSION,
                in->dlpack_major);
  out->abi = spoken;
  out->plugin = &plugin;
  return GRAFT_OK;
}
