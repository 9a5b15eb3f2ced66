/* Multi-scale retention as a graft mixer, in plain C and without the host's matrix products. The
 * mathematics is in retention.h; here are its sizes and what stands between it and the host. */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#include "graft/graft.h"

/* The inner loops are compiled for each of these and picked when the library is loaded. A
 * sanitizer's run time is not there yet at that moment. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
/* Into the clones above. */
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

static const graft_host* the_host;
static int init_count;

/* ---------------------------------------------------------------- what the mathematics works on */

typedef struct block {
  int64_t model, heads, dim; /* queries, keys and values of a head are all `dim` wide */
  double norm_eps;
  int32_t pairs; /* of a head that are rotated */
  double* inv_freq;
} block;

/* Parameters; the first four give what is kept of a token under the same number. */
enum { PARAM_Q, PARAM_K, PARAM_V, PARAM_GATE, PARAM_NORM, PARAM_O, N_PARAMS };
/* Kept for the backward pass, [B,T,H*dim] each: queries and keys are rotated, keys scaled. */
enum { KEPT_Q, KEPT_K, KEPT_V, KEPT_GATE, N_PROJECTED, KEPT_HEAD = N_PROJECTED, N_KEPT };
enum { STATE_S, STATE_NEXT_POSITION, N_STATES };
enum { TAP_HEAD_OUTPUT, TAP_PRE_OUTPUT, TAP_LOG_DECAY, N_TAPS };

/* Tensors of one call; NULL is "not there" or "not wanted". */
typedef struct gradients {
  const void *dy, *dstate_out, *dhead_output, *dpre_output;
  void *dx, *dstate_in, *dparams[N_PARAMS];
  bool accumulate;
  void *dy0, *dpre, *kept[N_KEPT], *partial; /* scratch memory */
} gradients;
typedef struct call {
  const block* block;
  const graft_host_parallel* parallel;
  int64_t batch, tokens;
  int64_t slots; /* heads computed at once, each with its own scratch memory */
  const void *x, *params[N_PARAMS], *state_in;
  const uint8_t* real; /* the pad mask */
  const int64_t *positions, *next_in;
  void *y, *state_out, *head_output, *pre_output, *log_decay;
  int64_t* next_out;
  void* kept[N_KEPT];
  void *x0, *pre, *transposed, *head_scratch; /* scratch memory */
  int64_t* position;
  gradients* gradients; /* NULL: a forward pass */
} call;

static double decay_of(int64_t head) { return 1 - ldexp(1.0, -5 - (int)head); }
static bool is_real(const call* c, int64_t at) { return c->real == NULL || c->real[at] != 0; }
static bool wants_gate(const call* c) { return c->y != NULL || c->pre_output != NULL; }
static int64_t head_scratch_size(const block* b) { return b->dim * b->dim + b->dim; }

static void in_parallel(const call* c, int64_t count, int64_t grain, void* arg,
                        void(GRAFT_CALL* body)(void*, int64_t, int64_t, int32_t)) {
  if (count == 0) return;
  if (c->parallel == NULL) {
    body(arg, 0, count, 0);
  } else {
    c->parallel->parallel_for(the_host, 0, count, grain, body, arg);
  }
}

/* The call's positions, or a count of the real tokens from where the state left off. */
static void find_positions(const call* c) {
  for (int64_t b = 0; b < c->batch; ++b) {
    int64_t next = c->next_in == NULL ? 0 : c->next_in[b], behind = next;
    for (int64_t at = b * c->tokens; at < (b + 1) * c->tokens; ++at) {
      c->position[at] = c->positions != NULL ? c->positions[at] : next;
      if (!is_real(c, at)) continue;
      ++next;
      behind = c->position[at] + 1;
    }
    if (c->next_out != NULL) c->next_out[b] = behind;
  }
}

#define REAL float
#define NAME(name) name##_f32
#include "retention.h"
#undef REAL
#undef NAME
#define REAL double
#define NAME(name) name##_f64
#include "retention.h"

/* ---------------------------------------------------------------- scratch memory */

typedef struct arena {
  char* base;
  uint64_t used;
} arena;

static void* take(arena* from, int64_t count, size_t size) {
  void* const at = from->base == NULL ? NULL : from->base + from->used;
  from->used += ((uint64_t)count * size + 63) / 64 * 64;
  return at;
}

/* Points a call's scratch memory into `workspace` and gives its size in bytes; NULL asks for the
 * size. What is kept for a backward pass lies there too where there will be none. */
static uint64_t lay_out(call* c, size_t size, bool training, void* workspace) {
  arena memory = {workspace, 0};
  const block* const b = c->block;
  const int64_t n = c->batch * c->tokens, width = b->heads * b->dim;
  gradients* const g = c->gradients;
  c->x0 = take(&memory, n * b->model, size);
  c->pre = take(&memory, n * width, size);
  c->transposed = take(&memory, b->model * width, size);
  c->head_scratch = take(&memory, c->slots * head_scratch_size(b), size);
  c->position = take(&memory, n, sizeof(int64_t));
  for (int i = 0; i < N_KEPT && !training; ++i) c->kept[i] = take(&memory, n * width, size);
  if (g == NULL) return memory.used;
  g->dy0 = take(&memory, n * b->model, size);
  g->dpre = take(&memory, n * width, size);
  g->partial = take(&memory, c->batch * width, size);
  for (int i = 0; i < N_KEPT; ++i) g->kept[i] = take(&memory, n * width, size);
  return memory.used;
}

/* ---------------------------------------------------------------- errors */

/* Says what went wrong and where; gives back the status to return. */
static graft_status fail(graft_error* error, graft_status code, const char* where,
                         const char* format, ...) {
  if (error == NULL || !GRAFT_HAS(graft_error, error, message)) return code;
  va_list arguments;
  va_start(arguments, format);
  error->code = code;
  snprintf(error->where, sizeof error->where, "%s", where);
  vsnprintf(error->message, sizeof error->message, format, arguments);
  va_end(arguments);
  return code;
}

/* Returns from the function with a status other than OK. */
#define TRY(call)                                  \
  do {                                             \
    const graft_status try_status = (call);        \
    if (try_status != GRAFT_OK) return try_status; \
  } while (0)

static const DLDataType i64 = {kDLInt, 64, 1}, u8 = {kDLUInt, 8, 1};

static bool is_float(DLDataType dtype) {
  return dtype.code == kDLFloat && (dtype.bits == 32 || dtype.bits == 64) && dtype.lanes == 1;
}

static graft_status check_tensor(const DLTensor* tensor, const char* name, DLDataType dtype,
                                 int32_t ndim, const int64_t* shape, graft_error* error) {
  const graft_status wrong = GRAFT_INVALID_ARGUMENT;
  char where[128];
  int64_t count = 1;
  snprintf(where, sizeof where, "tensor:%s", name);
  if (tensor == NULL) return fail(error, wrong, where, "it is missing (NULL)");
  if (tensor->device.device_type != kDLCPU)
    return fail(error, wrong, where, "expected a tensor on the CPU, got device type %d",
                tensor->device.device_type);
  if (tensor->dtype.code != dtype.code || tensor->dtype.bits != dtype.bits ||
      tensor->dtype.lanes != 1)
    return fail(error, wrong, where, "expected type code %d of %d bits, got %d of %d", dtype.code,
                dtype.bits, tensor->dtype.code, tensor->dtype.bits);
  if (tensor->ndim != ndim)
    return fail(error, wrong, where, "expected %d axes, got %d", ndim, tensor->ndim);
  for (int32_t i = ndim; i-- > 0; count *= shape[i]) {
    if (tensor->shape[i] != shape[i])
      return fail(error, wrong, where, "expected %lld at axis %d, got %lld", (long long)shape[i], i,
                  (long long)tensor->shape[i]);
    if (shape[i] > 1 && tensor->strides[i] != count)
      return fail(error, wrong, where, "expected row-major strides without gaps");
  }
  if (count > 0 && tensor->data == NULL) return fail(error, wrong, where, "it has no data (NULL)");
  return GRAFT_OK;
}

static graft_status check_count(const char* what, uint32_t expected, uint32_t got,
                                graft_error* error) {
  return expected == got
             ? GRAFT_OK
             : fail(error, GRAFT_INVALID_ARGUMENT, what, "expected %u, got %u", expected, got);
}

/* ---------------------------------------------------------------- one instance */

typedef struct tensor_list {
  uint32_t n;
  graft_tensor_spec specs[N_KEPT];
  const graft_tensor_spec* pointers[N_KEPT];
} tensor_list;
typedef struct tensors {
  tensor_list saved, state, taps;
} tensors;

typedef struct retnet {
  graft_mixer base; /* what the host holds */
  block block;
  const graft_host_parallel* parallel;
  int64_t threads;
  graft_param_spec specs[N_PARAMS];
  const graft_param_spec* spec_pointers[N_PARAMS];
  tensors plan; /* what plan() gave last */
} retnet;

static retnet* self_of(graft_mixer* mixer) { return mixer->self; }

static void destroy(graft_mixer* mixer) {
  free(self_of(mixer)->block.inv_freq);
  free(self_of(mixer));
}

static void set_param(retnet* self, int param, const char* name, const char* role, const char* axes,
                      const char* domain, const char* doc, int64_t rows, int64_t columns) {
  const bool matrix = columns > 0;
  self->spec_pointers[param] = &self->specs[param];
  self->specs[param] =
      (graft_param_spec){.struct_size = sizeof(graft_param_spec),
                         .flags = GRAFT_P_TRAINABLE | (matrix ? 0u : (uint32_t)GRAFT_P_NO_DECAY),
                         .name = name,
                         .role = role,
                         .axes = axes,
                         .domain = domain,
                         .doc = doc,
                         .shape = {rows, columns},
                         .ndim = matrix ? 2 : 1,
                         .heads = matrix ? (int32_t)self->block.heads : 0,
                         .head_dim = matrix ? (int32_t)self->block.dim : 0,
                         .init = matrix ? GRAFT_INIT_NORMAL : GRAFT_INIT_ONES,
                         .init_b = matrix ? 0.02 : 0};
}

static void set_params(retnet* self) {
  const int64_t model = self->block.model, width = self->block.heads * self->block.dim;
  set_param(self, PARAM_Q, "q_proj.weight", GRAFT_ROLE_QUERY, "heads*key,model", "", "queries",
            width, model);
  set_param(self, PARAM_K, "k_proj.weight", GRAFT_ROLE_KEY, "heads*key,model", "", "keys", width,
            model);
  set_param(self, PARAM_V, "v_proj.weight", GRAFT_ROLE_VALUE, "heads*value,model", "", "values",
            width, model);
  set_param(self, PARAM_GATE, "g_proj.weight", GRAFT_ROLE_OUTPUT_GATE, "heads*value,model",
            "silu-inv", "output gate before silu", width, model);
  set_param(self, PARAM_NORM, "g_norm_swish_gate.weight", GRAFT_ROLE_NORM, "value", "",
            "RMSNorm of a head's output", self->block.dim, 0);
  set_param(self, PARAM_O, "o_proj.weight", GRAFT_ROLE_OUTPUT, "model,heads*value", "",
            "output projection", model, width);
}

static graft_status param_specs(graft_mixer* mixer, const graft_param_spec* const** specs,
                                uint32_t* n, graft_error* error) {
  (void)error;
  *specs = self_of(mixer)->spec_pointers;
  *n = N_PARAMS;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- sizes */

static void add_tensor(tensor_list* list, const char* name, const char* axes, const char* doc,
                       DLDataType dtype, int32_t ndim, const int64_t* shape) {
  graft_tensor_spec* const spec = &list->specs[list->n];
  *spec = (graft_tensor_spec){.struct_size = sizeof *spec,
                              .name = name,
                              .axes = axes,
                              .doc = doc,
                              .ndim = ndim,
                              .dtype = dtype};
  memcpy(spec->shape, shape, (size_t)ndim * sizeof *shape);
  list->pointers[list->n++] = spec;
}

/* The tensors of calls of these sizes, in the order of KEPT_, STATE_ and TAP_. */
static void list_tensors(const block* b, int64_t batch, int64_t tokens, DLDataType dtype,
                         bool training, tensors* out) {
  static const char* const kept[N_KEPT] = {"q", "k", "v", "gate", "head"};
  const int64_t per_head[] = {batch, tokens, b->heads, b->dim},
                flat[] = {batch, tokens, b->heads * b->dim};
  const int64_t state[] = {batch, b->heads, b->dim, b->dim};
  out->saved.n = out->state.n = out->taps.n = 0;
  for (int i = 0; i < N_KEPT && training; ++i)
    add_tensor(&out->saved, kept[i], "batch,tokens,channels", "activation", dtype, 3, flat);
  add_tensor(&out->state, "state", "batch,heads,key,value", "S of the retention", dtype, 4, state);
  add_tensor(&out->state, "next_position", "batch",
             "position of the next token when the call gives no positions", i64, 1, &batch);
  add_tensor(&out->taps, GRAFT_TAP_HEAD_OUTPUT, "batch,tokens,heads,value",
             "what the recurrence gives", dtype, 4, per_head);
  add_tensor(&out->taps, GRAFT_TAP_PRE_OUTPUT, "batch,tokens,heads*value", "after norm and gate",
             dtype, 3, flat);
  add_tensor(&out->taps, GRAFT_TAP_LOG_DECAY, "batch,tokens,heads", "log gamma", dtype, 3,
             per_head);
}

/* A call of these sizes, without its tensors. */
static call empty_call(const retnet* self, int64_t batch, int64_t tokens, gradients* of) {
  const int64_t heads = batch * self->block.heads;
  return (call){.block = &self->block,
                .parallel = self->parallel,
                .batch = batch,
                .tokens = tokens,
                .slots = heads < self->threads ? heads : self->threads,
                .gradients = of};
}

static graft_status plan(graft_mixer* mixer, const graft_plan_in* in, graft_plan_out* out,
                         graft_error* error) {
  retnet* const self = self_of(mixer);
  const bool training = (in->flags & GRAFT_X_TRAINING) != 0;
  const size_t size = in->dtype.bits / 8u;
  gradients none = {0};
  call forward = empty_call(self, in->batch, in->tokens, NULL),
       backward = empty_call(self, in->batch, in->tokens, &none);
  if (!is_float(in->dtype))
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.dtype", "expected float32 or float64");
  if (in->device_type != kDLCPU)
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.device_type", "expected the CPU, got %d",
                in->device_type);
  if (in->batch < 0 || in->tokens < 0)
    return fail(error, GRAFT_INVALID_ARGUMENT, "plan",
                "expected sizes of 0 or more, got %lld rows of %lld tokens", (long long)in->batch,
                (long long)in->tokens);
  list_tensors(&self->block, in->batch, in->tokens, in->dtype, training, &self->plan);
  out->n_saved = self->plan.saved.n;
  out->saved = self->plan.saved.pointers;
  out->n_state = self->plan.state.n;
  out->state = self->plan.state.pointers;
  out->n_taps = self->plan.taps.n;
  out->taps = self->plan.taps.pointers;
  out->workspace_forward = lay_out(&forward, size, training, NULL);
  out->workspace_backward = training ? lay_out(&backward, size, true, NULL) : 0;
  out->workspace_step = lay_out(&forward, size, false, NULL);
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- calls */

/* data[i] of each tensor that is there, checked. With `all`, none of a list that is there may be
 * missing. */
static graft_status read_list(const tensor_list* list, const char* what,
                              const DLTensor* const* given, bool all, void** data,
                              graft_error* error) {
  for (uint32_t i = 0; i < list->n && given != NULL; ++i) {
    char name[96];
    if (given[i] == NULL && !all) continue;
    snprintf(name, sizeof name, "%s.%s", what, list->specs[i].name);
    TRY(check_tensor(given[i], name, list->specs[i].dtype, list->specs[i].ndim,
                     list->specs[i].shape, error));
    data[i] = given[i]->data;
  }
  return GRAFT_OK;
}

static graft_status read_params(const retnet* self, const char* what, DLDataType dtype,
                                const DLTensor* const* given, bool all, void** data,
                                graft_error* error) {
  for (uint32_t i = 0; i < N_PARAMS; ++i) {
    char name[96];
    if (given[i] == NULL && !all) continue;
    snprintf(name, sizeof name, "%s%s", what, self->specs[i].name);
    TRY(check_tensor(given[i], name, dtype, self->specs[i].ndim, self->specs[i].shape, error));
    data[i] = given[i]->data;
  }
  return GRAFT_OK;
}

/* What forward and backward read. */
static graft_status read_inputs(const retnet* self, const graft_exec* exec,
                                const graft_mixer_forward* args, bool training, tensors* sizes,
                                call* c, graft_error* error) {
  const DLTensor* const x = args->x;
  void *params[N_PARAMS] = {0}, *states[N_STATES] = {0};
  if (exec->device_type != kDLCPU)
    return fail(error, GRAFT_INVALID_ARGUMENT, "exec.device_type", "expected the CPU, got %d",
                exec->device_type);
  if (x == NULL || x->ndim != 3 || !is_float(x->dtype))
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:x",
                "expected [B,T,%lld] of float32 or float64", (long long)self->block.model);
  const int64_t shape[] = {x->shape[0], x->shape[1], self->block.model};
  *c = empty_call(self, shape[0], shape[1], c->gradients);
  list_tensors(&self->block, shape[0], shape[1], x->dtype, training, sizes);
  TRY(check_tensor(x, "x", x->dtype, 3, shape, error));
  TRY(check_count("n_params", N_PARAMS, args->n_params, error));
  if (args->params == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, "params", "the list is missing (NULL)");
  TRY(read_params(self, "", x->dtype, args->params, true, params, error));
  if (args->positions != NULL)
    TRY(check_tensor(args->positions, "positions", i64, 2, shape, error));
  if (args->pad_mask != NULL) TRY(check_tensor(args->pad_mask, "pad_mask", u8, 2, shape, error));
  if (args->seq_offsets != NULL)
    return fail(error, GRAFT_UNIMPLEMENTED, "tensor:seq_offsets",
                "packed sequences are not offered");
  if (args->state_in != NULL || args->state_out != NULL)
    TRY(check_count("n_state", N_STATES, args->n_state, error));
  TRY(read_list(&sizes->state, "state_in", args->state_in, true, states, error));
  if (training) {
    if (args->saved == NULL)
      return fail(error, GRAFT_INVALID_ARGUMENT, "saved", "a call for training has none (NULL)");
    TRY(check_count("n_saved", N_KEPT, args->n_saved, error));
    TRY(read_list(&sizes->saved, "saved", (const DLTensor* const*)args->saved, true, c->kept,
                  error));
  }
  c->x = x->data;
  c->positions = args->positions == NULL ? NULL : args->positions->data;
  c->real = args->pad_mask == NULL ? NULL : args->pad_mask->data;
  for (int i = 0; i < N_PARAMS; ++i) c->params[i] = params[i];
  c->state_in = states[STATE_S];
  c->next_in = states[STATE_NEXT_POSITION];
  return GRAFT_OK;
}

static graft_status check_workspace(const graft_exec* exec, uint64_t needed, graft_error* error) {
  if (exec->workspace != NULL && exec->workspace_bytes >= needed) return GRAFT_OK;
  return fail(error, GRAFT_INVALID_ARGUMENT, "exec.workspace",
              "expected the plan's %llu bytes, got %llu", (unsigned long long)needed,
              (unsigned long long)(exec->workspace == NULL ? 0 : exec->workspace_bytes));
}

static graft_status run_forward(graft_mixer* mixer, const graft_exec* exec,
                                const graft_mixer_forward* args, bool training,
                                graft_error* error) {
  tensors sizes;
  call c = {0};
  void *states[N_STATES] = {0}, *taps[N_TAPS] = {0};
  TRY(read_inputs(self_of(mixer), exec, args, training, &sizes, &c, error));
  const DLDataType dtype = args->x->dtype;
  if (args->y != NULL || training) TRY(check_tensor(args->y, "y", dtype, 3, args->x->shape, error));
  TRY(read_list(&sizes.state, "state_out", (const DLTensor* const*)args->state_out, true, states,
                error));
  if (args->taps != NULL) TRY(check_count("n_taps", N_TAPS, args->n_taps, error));
  TRY(read_list(&sizes.taps, "tap", (const DLTensor* const*)args->taps, false, taps, error));
  TRY(check_workspace(exec, lay_out(&c, dtype.bits / 8u, training, exec->workspace), error));
  c.y = args->y == NULL ? NULL : args->y->data;
  c.state_out = states[STATE_S];
  c.next_out = states[STATE_NEXT_POSITION];
  c.head_output = taps[TAP_HEAD_OUTPUT];
  c.pre_output = taps[TAP_PRE_OUTPUT];
  c.log_decay = taps[TAP_LOG_DECAY];
  find_positions(&c);
  if (dtype.bits == 64) {
    retention_forward_f64(&c);
  } else {
    retention_forward_f32(&c);
  }
  return GRAFT_OK;
}

static graft_status forward(graft_mixer* mixer, const graft_exec* exec,
                            const graft_mixer_forward* args, graft_error* error) {
  return run_forward(mixer, exec, args, (exec->flags & GRAFT_X_TRAINING) != 0, error);
}

static graft_status step(graft_mixer* mixer, const graft_exec* exec,
                         const graft_mixer_forward* args, graft_error* error) {
  if (args->x != NULL && args->x->ndim == 3 && args->x->shape[1] != 1)
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:x", "expected one token, got %lld",
                (long long)args->x->shape[1]);
  return run_forward(mixer, exec, args, false, error);
}

static graft_status backward(graft_mixer* mixer, const graft_exec* exec,
                             const graft_mixer_backward* args, graft_error* error) {
  const retnet* const self = self_of(mixer);
  tensors sizes;
  gradients g = {0};
  call c = {.gradients = &g};
  void *dstate_out[N_STATES] = {0}, *dstate_in[N_STATES] = {0}, *dtaps[N_TAPS] = {0};
  if (args->fwd == NULL) return fail(error, GRAFT_INVALID_ARGUMENT, "fwd", "it is missing (NULL)");
  TRY(read_inputs(self, exec, args->fwd, true, &sizes, &c, error));
  const DLTensor* const x = args->fwd->x;
  TRY(check_tensor(args->dy, "dy", x->dtype, 3, x->shape, error));
  if (args->dx != NULL) TRY(check_tensor(args->dx, "dx", x->dtype, 3, x->shape, error));
  if (args->dparams != NULL)
    TRY(read_params(self, "d ", x->dtype, (const DLTensor* const*)args->dparams, false, g.dparams,
                    error));
  TRY(read_list(&sizes.state, "dstate_out", args->dstate_out, false, dstate_out, error));
  TRY(read_list(&sizes.state, "dstate_in", (const DLTensor* const*)args->dstate_in, false,
                dstate_in, error));
  TRY(read_list(&sizes.taps, "dtap", args->dtaps, false, dtaps, error));
  TRY(check_workspace(exec, lay_out(&c, x->dtype.bits / 8u, true, exec->workspace), error));
  g.dy = args->dy->data;
  g.dx = args->dx == NULL ? NULL : args->dx->data;
  g.dstate_out = dstate_out[STATE_S];
  g.dstate_in = dstate_in[STATE_S];
  g.dhead_output = dtaps[TAP_HEAD_OUTPUT];
  g.dpre_output = dtaps[TAP_PRE_OUTPUT];
  g.accumulate = (exec->flags & GRAFT_X_ACCUMULATE) != 0;
  find_positions(&c);
  if (x->dtype.bits == 64) {
    retention_backward_f64(&c);
  } else {
    retention_backward_f32(&c);
  }
  return GRAFT_OK;
}

static const void* mixer_extension(graft_mixer* mixer, const char* id) {
  (void)mixer;
  (void)id;
  return NULL;
}

static const graft_mixer_vtbl table = {
    .struct_size = sizeof(graft_mixer_vtbl),
    .param_schema = 1,
    .destroy = destroy,
    .param_specs = param_specs,
    .plan = plan,
    .forward = forward,
    .backward = backward,
    .step = step,
    .get_extension = mixer_extension,
};

/* ---------------------------------------------------------------- the component */

static const graft_option rope_option = {
    .struct_size = sizeof(graft_option),
    .key = "teacher_rope",
    .doc = "rotate by the teacher's RoPE where it has one; else by RetNet's own, 10000^(-2i/dim)",
    .def = {.type = GRAFT_BOOL, .count = 1, .u = {.i = 1}},
};
static const graft_option eps_option = {
    .struct_size = sizeof(graft_option),
    .key = "norm_eps",
    .doc = "eps of the output norm",
    .def = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 1e-5}},
    .min = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 0}},
    .max = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 1}},
};
static const graft_option* const options[] = {&rope_option, &eps_option};
static const DLDataType dtypes[] = {{kDLFloat, 32, 1}, {kDLFloat, 64, 1}};
static const DLDeviceType devices[] = {kDLCPU};

static const graft_desc description = {
    .struct_size = sizeof(graft_desc),
    .n_options = 2,
    .id = "org.example.retnet",
    .alias = "retnet",
    .name = "RetNet",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .citation = "https://arxiv.org/abs/2307.08621",
    .description = "Multi-scale retention: a state per head that decays at a fixed rate",
    .caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO | GRAFT_CAP_PAD_MASK |
            GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_BATCH_INVARIANT | GRAFT_CAP_THREAD_INVARIANT |
            GRAFT_CAP_STATEFUL_GRAD | GRAFT_CAP_TAPS_ONLY,
    .options = options,
    .dtypes = dtypes,
    .devices = devices,
    .n_dtypes = 2,
    .n_devices = 1,
};
static const graft_desc* const descriptions[] = {&description};

/* The host has checked values against the schema; a caller that did not gets a message in place of
 * a crash. */
static graft_status read_option(const graft_config* config, const graft_option* option,
                                graft_value* out, graft_error* error) {
  char where[128];
  snprintf(where, sizeof where, "config.%s", option->key);
  for (uint32_t i = 0; i < config->count; ++i) {
    if (strcmp(config->keys[i], option->key) != 0) continue;
    *out = config->values[i];
    if (out->type != option->def.type)
      return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected a value of type %u, got type %u",
                  option->def.type, out->type);
    if (out->type == GRAFT_FLOAT && !(out->u.f >= option->min.u.f && out->u.f <= option->max.u.f))
      return fail(error, GRAFT_OUT_OF_RANGE, where, "expected %g to %g, got %g", option->min.u.f,
                  option->max.u.f, out->u.f);
    return GRAFT_OK;
  }
  return fail(error, GRAFT_INVALID_ARGUMENT, where, "the option is missing");
}

static graft_status set_up(retnet* self, const graft_layer_info* layer, const graft_config* config,
                           graft_error* error) {
  graft_value rope, eps;
  TRY(read_option(config, &rope_option, &rope, error));
  TRY(read_option(config, &eps_option, &eps, error));
  block* const b = &self->block;
  *b = (block){.model = layer->model_dim,
               .heads = layer->n_heads,
               .dim = layer->head_dim,
               .norm_eps = eps.u.f};
  const bool teachers = rope.u.i != 0 && layer->n_rope_freq > 0 && layer->rope_inv_freq != NULL;
  b->pairs = teachers ? layer->n_rope_freq : layer->head_dim / 2;
  if (b->model <= 0 || b->heads <= 0 || b->dim <= 0 || 2 * (int64_t)b->pairs > b->dim)
    return fail(error, GRAFT_INVALID_ARGUMENT, "layer",
                "expected positive sizes and no more rotated entries than a head has, got "
                "model_dim %lld, %d heads of %d, %d rotated",
                (long long)layer->model_dim, layer->n_heads, layer->head_dim, 2 * b->pairs);
  b->inv_freq = malloc(((size_t)b->pairs + 1) * sizeof *b->inv_freq);
  if (b->inv_freq == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  for (int32_t i = 0; i < b->pairs; ++i)
    b->inv_freq[i] = teachers ? layer->rope_inv_freq[i] : pow(10000.0, -2.0 * i / (double)b->dim);
  set_params(self);
  self->parallel = the_host->get_extension(the_host, GRAFT_HOST_EXT_PARALLEL);
  self->threads = self->parallel == NULL ? 1 : self->parallel->num_threads(the_host);
  return GRAFT_OK;
}

static graft_status create(const char* id, const graft_layer_info* layer,
                           const graft_config* config, graft_mixer** out, graft_error* error) {
  if (id == NULL || strcmp(id, description.id) != 0)
    return fail(error, GRAFT_NOT_FOUND, "id", "expected '%s', got '%s'", description.id,
                id == NULL ? "" : id);
  retnet* const self = calloc(1, sizeof *self);
  if (self == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  self->base.v = &table;
  self->base.self = self;
  const graft_status status = set_up(self, layer, config, error);
  if (status != GRAFT_OK) {
    destroy(&self->base);
    return status;
  }
  *out = &self->base;
  return GRAFT_OK;
}

static const graft_mixer_factory factory = {.struct_size = sizeof(graft_mixer_factory),
                                            .count = 1,
                                            .descs = descriptions,
                                            .create = create};

/* ---------------------------------------------------------------- the library */

/* Several parts of a process may open a library, each with a host of its own: the first one stays
 * until the last deinit.
 */
static graft_status init(const graft_host* host, const char* library_path, graft_error* error) {
  (void)library_path;
  if (host == NULL) return fail(error, GRAFT_INVALID_ARGUMENT, "host", "it is missing (NULL)");
  if (init_count++ == 0) the_host = host;
  return GRAFT_OK;
}

static void deinit(void) {
  if (init_count > 0 && --init_count == 0) the_host = NULL;
}

static const void* library_extension(const char* id) {
  return id != NULL && strcmp(id, GRAFT_EXT_MIXER_FACTORY) == 0 ? &factory : NULL;
}

static const graft_plugin plugin = {
    .struct_size = sizeof(graft_plugin),
    .id = "org.example.retnet-pack",
    .vendor = "example",
    .url = "https://arxiv.org/abs/2307.08621",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .build_tags = GRAFT_BUILD_TAGS, /* from graft_add_plugin() */
    .init = init,
    .deinit = deinit,
    .get_extension = library_extension,
};

/* The one exported symbol. */
GRAFT_EXPORT graft_status GRAFT_CALL graft_plugin_negotiate(const graft_negotiate_in* in,
                                                            graft_negotiate_out* out,
                                                            graft_error* error) {
  if (in->min_abi > GRAFT_ABI_CURRENT || in->max_abi < GRAFT_ABI_CURRENT)
    return fail(error, GRAFT_ABI_MISMATCH, "abi",
                "this plugin speaks graft ABI %u.%u, the host %u.%u to %u.%u",
                GRAFT_ABI_MAJOR(GRAFT_ABI_CURRENT), GRAFT_ABI_MINOR(GRAFT_ABI_CURRENT),
                GRAFT_ABI_MAJOR(in->min_abi), GRAFT_ABI_MINOR(in->min_abi),
                GRAFT_ABI_MAJOR(in->max_abi), GRAFT_ABI_MINOR(in->max_abi));
  if (in->dlpack_major != DLPACK_MAJOR_VERSION)
    return fail(error, GRAFT_ABI_MISMATCH, "dlpack_major",
                "this plugin speaks DLPack %d, the host %u", DLPACK_MAJOR_VERSION,
                in->dlpack_major);
  out->abi = GRAFT_ABI_CURRENT;
  out->plugin = &plugin;
  return GRAFT_OK;
}
