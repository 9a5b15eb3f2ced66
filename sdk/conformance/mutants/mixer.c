/* A healthy mixer to make mutants of: linear attention with a decay for each head,
 *
 *   S[t] = a S[t-1] + k[t] v[t]^T,  o[t] = S[t]^T q[t] / sqrt(d),  y[t] = W_o o[t]
 *
 * with q, k, v = W x[t] and a = sigmoid(decay). A pad leaves the state as it is, and its outputs
 * are zeros. Everything is computed in double, one token after the other.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>

#define PLUGIN_ID "org.graft.conformance.mixer-library"
#include "library.h"

enum { QUERY, KEY, VALUE, OUTPUT, DECAY, N_PARAMS };
enum { HEAD_OUTPUT, PRE_OUTPUT, LOG_DECAY, N_TAPS };
enum { N_PROJECTED = 3 }; /* query, key, value: saved as they are */

/* ---------------------------------------------------------------- one instance */

typedef struct tables {
  graft_tensor_spec saved[N_PROJECTED], state[1], taps[N_TAPS];
} tables;

typedef struct mixer {
  graft_mixer base; /* what the host holds */
  int64_t model, heads, dim;
  graft_param_spec params[N_PARAMS];
  const graft_param_spec* param_list[N_PARAMS];
  tables planned; /* by the last plan(), and the lists of pointers into it */
  const graft_tensor_spec *saved_list[N_PROJECTED], *state_list[1], *tap_list[N_TAPS];
  bool failed;
} mixer;

static mixer* self_of(graft_mixer* base) { return (mixer*)base->self; }
static int64_t width_of(const mixer* self) { return self->heads * self->dim; }
static int64_t state_size(const mixer* self) { return self->heads * self->dim * self->dim; }

static void GRAFT_CALL destroy(graft_mixer* base) { free(self_of(base)); }

/* ---------------------------------------------------------------- parameters */

static graft_param_spec projection(const mixer* self, const char* name, const char* role) {
  const bool out = strcmp(role, GRAFT_ROLE_OUTPUT) == 0;
  const int64_t width = width_of(self);
  return (graft_param_spec){
      .struct_size = sizeof(graft_param_spec),
      .flags = GRAFT_P_TRAINABLE,
      .name = name,
      .role = role,
      .axes = out ? "model,heads*value" : "heads*value,model",
      .domain = "",
      .doc = "",
      .shape = {out ? self->model : width, out ? width : self->model},
      .ndim = 2,
      .heads = (int32_t)self->heads,
      .head_dim = (int32_t)self->dim,
      .init = GRAFT_INIT_NORMAL,
      .init_b = 1 / sqrt((double)(out ? width : self->model)),
  };
}

/* a = 2^(-1/half-life) = sigmoid(raw). Beyond 1e17 tokens a is 1 in double: any raw value from
 * there on is as good, and a finite one can be trained. */
static double raw_decay(double half_life) { return fmin(-log(expm1(log(2) / half_life)), 40); }

static graft_param_spec decay(const mixer* self, double half_life) {
  return (graft_param_spec){
      .struct_size = sizeof(graft_param_spec),
      .flags = GRAFT_P_TRAINABLE | GRAFT_P_NO_DECAY | GRAFT_P_FP32,
      .name = "decay",
      .role = GRAFT_ROLE_DECAY_GATE_BIAS,
      .axes = "heads",
      .domain = "logit",
      .doc = "logit of what the state is multiplied by before each token",
      .shape = {self->heads},
      .ndim = 1,
      .heads = (int32_t)self->heads,
      .init = GRAFT_INIT_CONSTANT,
      .init_a = raw_decay(half_life),
  };
}

static void fill_params(mixer* self, double half_life) {
  self->params[QUERY] = projection(self, "q_proj.weight", GRAFT_ROLE_QUERY);
  self->params[KEY] = projection(self, "k_proj.weight", GRAFT_ROLE_KEY);
  self->params[VALUE] =
      projection(self, MUTANT_IS(SAME_NAME) ? "k_proj.weight" : "v_proj.weight", GRAFT_ROLE_VALUE);
  self->params[OUTPUT] = projection(self, "o_proj.weight", GRAFT_ROLE_OUTPUT);
  self->params[DECAY] = decay(self, half_life);
  for (int i = 0; i < N_PARAMS; ++i) self->param_list[i] = &self->params[i];
}

static graft_status GRAFT_CALL param_specs(graft_mixer* base, const graft_param_spec* const** specs,
                                           uint32_t* n, graft_error* error) {
  (void)error;
  mixer* const self = self_of(base);
  if (MUTANT_IS(SPECS_CHANGE)) {
    const bool other = strcmp(self->params[DECAY].name, "decay") != 0;
    self->params[DECAY].name = other ? "decay" : "decay.weight";
  }
  *specs = self->param_list;
  *n = N_PARAMS;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- plan */

static graft_tensor_spec tensor_spec(const char* name, const char* axes, DLDataType dtype,
                                     int32_t ndim, int64_t b, int64_t t, int64_t h, int64_t d) {
  return (graft_tensor_spec){
      .struct_size = sizeof(graft_tensor_spec),
      .name = name,
      .axes = axes,
      .doc = "",
      .shape = {b, t, h, d},
      .ndim = ndim,
      .dtype = dtype,
  };
}

static tables tables_for(const mixer* self, int64_t b, int64_t t, DLDataType dtype) {
  const int64_t h = self->heads, d = self->dim;
  static const char* const names[] = {"query", "key", "value"};
  tables out;
  for (int i = 0; i < N_PROJECTED; ++i)
    out.saved[i] = tensor_spec(names[i], "batch,tokens,heads*value", dtype, 3, b, t, h * d, 0);
  out.state[0] = tensor_spec("state", "batch,heads,key,value", dtype, 4, b, h, d, d);
  out.taps[HEAD_OUTPUT] =
      tensor_spec(GRAFT_TAP_HEAD_OUTPUT, "batch,tokens,heads,value", dtype, 4, b, t, h, d);
  out.taps[PRE_OUTPUT] =
      tensor_spec(GRAFT_TAP_PRE_OUTPUT, "batch,tokens,heads*value", dtype, 3, b, t, h * d, 0);
  out.taps[LOG_DECAY] =
      tensor_spec(GRAFT_TAP_LOG_DECAY, "batch,tokens,heads", dtype, 3, b, t, h, 0);
  return out;
}

/* Of doubles: see lay_out_token() and lay_out_backward(). */
static int64_t token_room(const mixer* self) {
  return self->model + 4 * width_of(self) + self->heads + state_size(self);
}
static int64_t gradient_room(const mixer* self, int64_t tokens) {
  return (tokens + 1) * state_size(self) + self->model + 5 * width_of(self) +
         4 * width_of(self) * self->model + self->heads;
}

static uint64_t forward_bytes(const mixer* self) {
  return (uint64_t)token_room(self) * sizeof(double);
}
static uint64_t backward_bytes(const mixer* self, int64_t tokens) {
  return (uint64_t)(token_room(self) + gradient_room(self, tokens)) * sizeof(double);
}

static graft_status check_plan(const graft_plan_in* in, graft_error* error) {
  if (!is_real_dtype(in->dtype)) {
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.dtype",
                "expected float32 or float64, got dtype code %d of %d bits", in->dtype.code,
                in->dtype.bits);
  }
  if (in->device_type != kDLCPU) {
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.device_type",
                "expected the CPU, got device type %d", in->device_type);
  }
  if (in->batch < 0 || in->tokens < 0) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "plan",
                "expected sizes that are not negative, got batch %lld and tokens %lld",
                (long long)in->batch, (long long)in->tokens);
  }
  return GRAFT_OK;
}

static graft_status GRAFT_CALL plan(graft_mixer* base, const graft_plan_in* in, graft_plan_out* out,
                                    graft_error* error) {
  mixer* const self = self_of(base);
  TRY(check_plan(in, error));
  self->planned = tables_for(self, in->batch, in->tokens, in->dtype);
  for (int i = 0; i < N_PROJECTED; ++i) self->saved_list[i] = &self->planned.saved[i];
  for (int i = 0; i < N_TAPS; ++i) self->tap_list[i] = &self->planned.taps[i];
  self->state_list[0] = self->planned.state;
  out->n_saved = (in->flags & GRAFT_X_TRAINING) != 0 ? N_PROJECTED : 0;
  out->n_state = 1;
  out->n_taps = N_TAPS;
  out->workspace_forward = out->workspace_step = forward_bytes(self);
  out->workspace_backward = backward_bytes(self, in->tokens);
  out->saved = self->saved_list;
  out->state = self->state_list;
  out->taps = self->tap_list;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- checks of a call */

static graft_status expect_exec(graft_error* error, const graft_exec* exec, uint64_t bytes) {
  if (exec->device_type != kDLCPU) {
    return fail(error, GRAFT_UNIMPLEMENTED, "exec.device_type",
                "expected the CPU, got device type %d", exec->device_type);
  }
  if (exec->workspace_bytes < bytes || exec->workspace == NULL) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "exec.workspace",
                "expected the %llu bytes that plan() asked for, got %llu",
                (unsigned long long)bytes,
                (unsigned long long)(exec->workspace == NULL ? 0 : exec->workspace_bytes));
  }
  return GRAFT_OK;
}

static graft_status expect_count(graft_error* error, const char* where, uint32_t got,
                                 uint32_t expected) {
  if (got == expected) return GRAFT_OK;
  return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected %u, got %u", expected, got);
}

/* `gaps`: some of them may be NULL. A list that is NULL is none. */
static graft_status expect_tensors(graft_error* error, const char* kind,
                                   const DLTensor* const* tensors, const graft_tensor_spec* specs,
                                   int n, bool gaps) {
  for (int i = 0; tensors != NULL && i < n; ++i) {
    char where[96];
    snprintf(where, sizeof where, "%s:%s", kind, specs[i].name);
    if (tensors[i] == NULL && gaps) continue;
    TRY(expect(error, where, tensors[i], specs[i].dtype, specs[i].ndim, specs[i].shape));
  }
  return GRAFT_OK;
}

static graft_status expect_params(graft_error* error, const char* kind, const mixer* self,
                                  const DLTensor* const* tensors, DLDataType dtype, bool gaps) {
  for (int i = 0; i < N_PARAMS; ++i) {
    const graft_param_spec* const spec = &self->params[i];
    char where[96];
    snprintf(where, sizeof where, "%s:%s", kind, spec->name);
    if (tensors[i] == NULL && gaps) continue;
    TRY(expect(error, where, tensors[i], dtype, spec->ndim, spec->shape));
  }
  return GRAFT_OK;
}

/* x gives the call its sizes. */
static graft_status expect_x(graft_error* error, const mixer* self, const DLTensor* x) {
  if (x == NULL || x->ndim != 3) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:x", "expected [B,T,model], got %s",
                x == NULL ? "NULL" : "another number of axes");
  }
  if (!is_real_dtype(x->dtype)) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:x",
                "expected float32 or float64, got dtype code %d of %d bits", x->dtype.code,
                x->dtype.bits);
  }
  return expect(error, "tensor:x", x, x->dtype, 3,
                (int64_t[]){x->shape[0], x->shape[1], self->model});
}

static graft_status expect_counts(graft_error* error, const graft_mixer_forward* call) {
  TRY(expect_count(error, "n_params", call->n_params, N_PARAMS));
  if (call->params == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, "params", "expected parameters, got NULL");
  if (call->state_in != NULL || call->state_out != NULL)
    TRY(expect_count(error, "n_state", call->n_state, 1));
  if (call->saved != NULL) TRY(expect_count(error, "n_saved", call->n_saved, N_PROJECTED));
  if (call->taps != NULL) TRY(expect_count(error, "n_taps", call->n_taps, N_TAPS));
  if (call->seq_offsets != NULL) {
    return fail(error, GRAFT_UNIMPLEMENTED, "tensor:seq_offsets",
                "packed sequences are not served: leave it NULL");
  }
  return GRAFT_OK;
}

static graft_status expect_call(graft_error* error, const mixer* self,
                                const graft_mixer_forward* call) {
  TRY(expect_x(error, self, call->x));
  TRY(expect_counts(error, call));
  const DLTensor* const x = call->x;
  const tables t = tables_for(self, x->shape[0], x->shape[1], x->dtype);
  if (call->y != NULL) TRY(expect(error, "tensor:y", call->y, x->dtype, 3, x->shape));
  if (call->positions != NULL)
    TRY(expect(error, "tensor:positions", call->positions, kInt64, 2, x->shape));
  if (call->pad_mask != NULL)
    TRY(expect(error, "tensor:pad_mask", call->pad_mask, kUint8, 2, x->shape));
  TRY(expect_params(error, "param", self, call->params, x->dtype, false));
  TRY(expect_tensors(error, "state_in", call->state_in, t.state, 1, false));
  TRY(expect_tensors(error, "state_out", (const DLTensor* const*)call->state_out, t.state, 1,
                     false));
  TRY(expect_tensors(error, "saved", (const DLTensor* const*)call->saved, t.saved, N_PROJECTED,
                     false));
  return expect_tensors(error, "tap", (const DLTensor* const*)call->taps, t.taps, N_TAPS, true);
}

/* ---------------------------------------------------------------- forward */

/* One call at work: `at` its token, the rest in the workspace. */
typedef struct pass {
  const mixer* self;
  const graft_mixer_forward* call;
  int64_t batch, tokens;
  double *x, *projected[N_PROJECTED], *context, *log_decay, *state;
} pass;

static double* take(double** room, int64_t n) {
  double* const taken = *room;
  *room += n;
  return taken;
}

static double log_sigmoid(double raw) {
  return raw > 0 ? -log1p(exp(-raw)) : raw - log1p(exp(raw));
}

/* token_room() doubles. */
static pass lay_out_token(const mixer* self, const graft_mixer_forward* call, double** room) {
  pass p = {.self = self, .call = call, .batch = call->x->shape[0], .tokens = call->x->shape[1]};
  p.x = take(room, self->model);
  for (int i = 0; i < N_PROJECTED; ++i) p.projected[i] = take(room, width_of(self));
  p.context = take(room, width_of(self));
  p.log_decay = take(room, self->heads);
  p.state = take(room, state_size(self));
  for (int64_t h = 0; h < self->heads; ++h) {
    const double log_decay = log_sigmoid(get(call->params[DECAY], h));
    p.log_decay[h] = MUTANT_IS(GROWS) ? -log_decay : log_decay;
  }
  return p;
}

static bool is_real(const graft_mixer_forward* call, int64_t token) {
  if (call->pad_mask == NULL) return true;
  const uint8_t* const mask = call->pad_mask->data;
  if (!MUTANT_IS(LEFT_PADS)) return mask[token] != 0;
  int64_t before = token;
  while (before % call->x->shape[1] > 0 && mask[before] == 0) --before;
  return mask[token] != 0 || mask[before] == 0;
}

static void load(const DLTensor* from, int64_t first, int64_t n, double* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = get(from, first + i);
}
static void store(const double* from, int64_t n, DLTensor* to, int64_t first) {
  for (int64_t i = 0; i < n; ++i) put(to, first + i, from[i]);
}
static void clear(double* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = 0;
}

static bool backwards; /* RANDOM_ORDER turns it round with each call */

/* One element of W x. */
static double dot_row(const DLTensor* weight, int64_t row, const double* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t k = MUTANT_IS(RANDOM_ORDER) && backwards ? n - 1 - i : i;
    sum += get(weight, row * n + k) * x[k];
    /* In double the order would be rounded away. */
    if (MUTANT_IS(RANDOM_ORDER) && weight->dtype.bits == 32) sum = (float)sum;
  }
  return sum;
}

static void project_token(pass* p, int64_t token) {
  const int64_t model = p->self->model, width = width_of(p->self);
  load(p->call->x, token * model, model, p->x);
  for (int which = 0; which < N_PROJECTED; ++which) {
    if (MUTANT_IS(PEEKS) && which == VALUE && token % p->tokens + 1 < p->tokens)
      load(p->call->x, (token + 1) * model, model, p->x);
    for (int64_t i = 0; i < width; ++i)
      p->projected[which][i] = dot_row(p->call->params[which], i, p->x, model);
  }
}

/* S = a S + k v^T */
static void update_state(pass* p) {
  const int64_t d = p->self->dim;
  for (int64_t h = 0; h < p->self->heads; ++h) {
    const double a = exp(p->log_decay[h]);
    double* const state = p->state + h * d * d;
    for (int64_t i = 0; i < d; ++i) {
      const double key = p->projected[KEY][h * d + i];
      for (int64_t j = 0; j < d; ++j)
        state[i * d + j] = a * state[i * d + j] + key * p->projected[VALUE][h * d + j];
    }
  }
}

/* o = S^T q / sqrt(d) */
static void read_state(const pass* p, const double* state, double* context) {
  const int64_t d = p->self->dim;
  clear(context, width_of(p->self));
  for (int64_t h = 0; h < p->self->heads; ++h) {
    for (int64_t i = 0; i < d; ++i) {
      const double query = p->projected[QUERY][h * d + i] / sqrt((double)d);
      for (int64_t j = 0; j < d; ++j) context[h * d + j] += query * state[(h * d + i) * d + j];
    }
  }
}

static DLTensor* tap_of(const graft_mixer_forward* call, int tap) {
  return call->taps == NULL ? NULL : call->taps[tap];
}

static void write_token(const pass* p, int64_t token, bool real) {
  const int64_t model = p->self->model, width = width_of(p->self), heads = p->self->heads;
  DLTensor *const head_output = tap_of(p->call, HEAD_OUTPUT),
                  *const pre_output = tap_of(p->call, PRE_OUTPUT),
                  *const log_decay = tap_of(p->call, LOG_DECAY), *const y = p->call->y;
  if (head_output != NULL) store(p->context, width, head_output, token * width);
  if (pre_output != NULL) {
    store(p->context, width, pre_output, token * width);
    for (int64_t i = 0; MUTANT_IS(PRE_OUTPUT) && i < width; ++i)
      put(pre_output, token * width + i, p->context[i] * sqrt((double)p->self->dim));
  }
  for (int64_t h = 0; log_decay != NULL && h < heads; ++h)
    put(log_decay, token * heads + h, real ? p->log_decay[h] : 0);
  if (MUTANT_IS(LAST_TOKEN) && (token + 1) % p->tokens == 0) return;
  for (int64_t i = 0; y != NULL && i < model; ++i)
    put(y, token * model + i, dot_row(p->call->params[OUTPUT], i, p->context, width));
}

static void save_token(const pass* p, int64_t token) {
  const int64_t width = width_of(p->self);
  for (int i = 0; p->call->saved != NULL && i < N_PROJECTED; ++i)
    store(p->projected[i], width, p->call->saved[i], token * width);
}

/* A pad: zeros, and the state stays. */
static void pass_over(pass* p) {
  const int64_t width = width_of(p->self);
  for (int i = 0; i < N_PROJECTED; ++i) clear(p->projected[i], width);
  clear(p->context, width);
  if (MUTANT_IS(PADS_DECAY)) update_state(p);
}

static void forward_token(pass* p, int64_t token) {
  const bool real = is_real(p->call, token);
  if (real) {
    project_token(p, token);
    update_state(p);
    read_state(p, p->state, p->context);
  } else {
    pass_over(p);
  }
  save_token(p, token);
  write_token(p, token, real);
}

/* What a row starts from. */
static void start_state(const pass* p, int64_t row, double* state) {
  const int64_t n = state_size(p->self);
  if (p->call->state_in != NULL) {
    load(p->call->state_in[0], row * n, n, state);
  } else if (!MUTANT_IS(UNCLEARED_WORKSPACE) && !(MUTANT_IS(ROWS) && row > 0)) {
    clear(state, n);
  }
}

static void forward_row(pass* p, int64_t row) {
  static double kept[1 << 12];
  const int64_t n = state_size(p->self);
  DLTensor* const state_out = p->call->state_out == NULL ? NULL : p->call->state_out[0];
  for (int64_t i = 0; MUTANT_IS(IN_PLACE) && state_out != NULL && i < n; ++i)
    put(state_out, row * n + i, 0);
  start_state(p, row, p->state);
  if (MUTANT_IS(KEEPS_STATE)) memcpy(p->state, kept, (size_t)n * sizeof(double));
  for (int64_t t = 0; t < p->tokens; ++t) {
    if (MUTANT_IS(FINAL_STATE) && t + 1 == p->tokens && state_out != NULL)
      store(p->state, n, state_out, row * n);
    forward_token(p, row * p->tokens + t);
  }
  if (MUTANT_IS(KEEPS_STATE)) memcpy(kept, p->state, (size_t)n * sizeof(double));
  if (state_out != NULL && !(MUTANT_IS(FINAL_STATE) && p->tokens > 0))
    store(p->state, n, state_out, row * n);
}

extern void throws(void) __attribute__((weak)); /* in throws.cpp, which is in that mutant alone */

/* The mutants that break a forward pass as a whole. */
static void misbehave(const pass* p, double* end_of_workspace) {
  const DLTensor* const x = p->call->x;
  if (MUTANT_IS(RANDOM_ORDER)) backwards = !backwards;
  if (MUTANT_IS(HANGS)) pause();
  if (MUTANT_IS(THROWS)) throws();
  if (MUTANT_IS(PAST_Y) && count_of(x) > 0) put(p->call->y, count_of(x), 0);
  if (MUTANT_IS(PAST_WORKSPACE)) *end_of_workspace = 0;
  if (MUTANT_IS(CHANGES_X)) {
    DLTensor writable = *x;
    for (int64_t i = 0; i < count_of(x); ++i) put(&writable, i, get(x, i) / 2);
  }
  if (MUTANT_IS(EMPTY)) p->x[0] = get(x, (p->batch * p->tokens - 1) * p->self->model);
}

static graft_status run(mixer* self, const graft_exec* exec, const graft_mixer_forward* call,
                        bool step, graft_error* error) {
  static double shared[1 << 13];
  TRY(expect_call(error, self, call));
  TRY(expect_exec(error, exec, forward_bytes(self)));
  if (call->y == NULL && (exec->flags & GRAFT_X_TRAINING) != 0) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:y",
                "expected a tensor, got NULL: it may be missing outside of training only");
  }
  if (step && call->x->shape[1] != 1) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:x", "step expected one token, got %lld",
                (long long)call->x->shape[1]);
  }
  double* room = MUTANT_IS(SHARED_SCRATCH) ? shared : exec->workspace;
  pass p = lay_out_token(self, call, &room);
  if (MUTANT_IS(STEP) && step) clear(p.log_decay, self->heads);
  misbehave(&p, room);
  for (int64_t row = 0; row < p.batch; ++row) forward_row(&p, row);
  return GRAFT_OK;
}

/* A mixer that failed works on as if nothing had happened. */
static graft_status run_checked(graft_mixer* base, const graft_exec* exec,
                                const graft_mixer_forward* call, bool step, graft_error* error) {
  mixer* const self = self_of(base);
  if (MUTANT_IS(STAYS_BROKEN) && self->failed)
    return fail(error, GRAFT_FAILED_PRECONDITION, "mixer", "a call before this one failed");
  const graft_status status = run(self, exec, call, step, error);
  self->failed = status != GRAFT_OK;
  return status;
}

static graft_status GRAFT_CALL forward(graft_mixer* base, const graft_exec* exec,
                                       const graft_mixer_forward* call, graft_error* error) {
  return run_checked(base, exec, call, false, error);
}

static graft_status GRAFT_CALL step(graft_mixer* base, const graft_exec* exec,
                                    const graft_mixer_forward* call, graft_error* error) {
  return run_checked(base, exec, call, true, error);
}

/* ---------------------------------------------------------------- backward */

/* The gradient of each thing of `pass`, and the state before each token of the row. */
typedef struct gradients {
  pass p;
  const graft_mixer_backward* call;
  double *x, *projected[N_PROJECTED], *context, *read, *state, *states;
  double *weights[DECAY], *log_decay; /* sums over all tokens */
} gradients;

/* gradient_room() doubles behind those of the token; p.state holds the state's gradient. */
static gradients lay_out_backward(const mixer* self, const graft_mixer_backward* call,
                                  double* room) {
  gradients g = {.p = lay_out_token(self, call->fwd, &room), .call = call};
  const int64_t width = width_of(self);
  g.state = g.p.state;
  g.states = take(&room, (g.p.tokens + 1) * state_size(self));
  g.x = take(&room, self->model);
  for (int i = 0; i < N_PROJECTED; ++i) g.projected[i] = take(&room, width);
  g.context = take(&room, width);
  g.read = take(&room, width);
  for (int i = 0; i < DECAY; ++i) {
    g.weights[i] = take(&room, width * self->model);
    clear(g.weights[i], width * self->model);
  }
  g.log_decay = take(&room, self->heads);
  clear(g.log_decay, self->heads);
  return g;
}

static void load_saved(gradients* g, int64_t token) {
  const int64_t width = width_of(g->p.self);
  for (int i = 0; i < N_PROJECTED; ++i)
    load(g->call->fwd->saved[i], token * width, width, g->p.projected[i]);
}

/* The states of a row again: states[t] is what token t starts from. */
static void replay(gradients* g, int64_t row) {
  const int64_t n = state_size(g->p.self);
  pass p = g->p;
  start_state(&p, row, g->states);
  for (int64_t t = 0; t < p.tokens; ++t) {
    const int64_t token = row * p.tokens + t;
    p.state = g->states + (t + 1) * n;
    memcpy(p.state, g->states + t * n, (size_t)n * sizeof(double));
    load_saved(g, token);
    if (is_real(p.call, token)) update_state(&p);
  }
}

/* W^T dy into dx, dy x^T into dW; W is [out, in]. */
static void project_back(const DLTensor* weight, const double* dy, int64_t out, const double* x,
                         int64_t in, double* dx, double* dweight) {
  for (int64_t i = 0; i < out; ++i) {
    for (int64_t k = 0; k < in; ++k) {
      dx[k] += get(weight, i * in + k) * dy[i];
      dweight[i * in + k] += dy[i] * x[k];
    }
  }
}

static void add_tap_gradient(const gradients* g, int tap, int64_t n, int64_t token, double* to) {
  const DLTensor* const dtap = g->call->dtaps == NULL ? NULL : g->call->dtaps[tap];
  for (int64_t i = 0; dtap != NULL && i < n; ++i) to[i] += get(dtap, token * n + i);
}

/* Through the output projection and the taps of the context. */
static void context_gradient(gradients* g, int64_t token, const double* after) {
  const int64_t model = g->p.self->model, width = width_of(g->p.self);
  read_state(&g->p, after, g->p.context);
  load(g->call->dy, token * model, model, g->x);
  clear(g->context, width);
  project_back(g->p.call->params[OUTPUT], g->x, model, g->p.context, width, g->context,
               g->weights[OUTPUT]);
  add_tap_gradient(g, HEAD_OUTPUT, width, token, g->context);
  add_tap_gradient(g, PRE_OUTPUT, width, token, g->context);
}

/* Through reading and update of the state of one head. */
static void head_gradient(gradients* g, int64_t h, const double* before, const double* after) {
  const int64_t d = g->p.self->dim;
  const double scale = 1 / sqrt((double)d), a = exp(g->p.log_decay[h]);
  const double *const query = g->p.projected[QUERY] + h * d,
                      *const key = g->p.projected[KEY] + h * d,
                      *const value = g->p.projected[VALUE] + h * d,
                      *const dcontext = g->context + h * d;
  double *const dquery = g->projected[QUERY] + h * d, *const dkey = g->projected[KEY] + h * d,
                *const dvalue = g->projected[VALUE] + h * d;
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t j = 0; j < d; ++j) {
      const int64_t ij = (h * d + i) * d + j;
      g->state[ij] += scale * query[i] * dcontext[j];
      dquery[i] += scale * after[ij] * dcontext[j];
      dkey[i] += g->state[ij] * value[j];
      dvalue[j] += g->state[ij] * key[i];
      g->log_decay[h] += a * g->state[ij] * before[ij];
      g->state[ij] *= a;
    }
  }
}

static void backward_token(gradients* g, int64_t token, const double* before, const double* after) {
  const int64_t model = g->p.self->model, width = width_of(g->p.self);
  const bool real = is_real(g->p.call, token);
  if (real) {
    load_saved(g, token);
    context_gradient(g, token, after);
    for (int i = 0; i < N_PROJECTED; ++i) clear(g->projected[i], width);
    for (int64_t h = 0; h < g->p.self->heads; ++h) head_gradient(g, h, before, after);
    add_tap_gradient(g, LOG_DECAY, g->p.self->heads, token, g->log_decay);
    load(g->p.call->x, token * model, model, g->p.x);
  }
  clear(g->x, model);
  for (int i = 0; real && i < N_PROJECTED; ++i) {
    project_back(g->p.call->params[i], g->projected[i], width, g->p.x, model, g->x, g->weights[i]);
  }
  if (g->call->dx != NULL) store(g->x, model, g->call->dx, token * model);
}

static void backward_row(gradients* g, int64_t row) {
  const int64_t n = state_size(g->p.self);
  replay(g, row);
  clear(g->state, n);
  if (g->call->dstate_out != NULL && g->call->dstate_out[0] != NULL &&
      !MUTANT_IS(NO_STATE_GRADIENT))
    load(g->call->dstate_out[0], row * n, n, g->state);
  for (int64_t t = g->p.tokens; t-- > 0;) {
    const double* const before = g->states + t * n;
    backward_token(g, row * g->p.tokens + t, before, before + n);
  }
  if (g->call->dstate_in != NULL && g->call->dstate_in[0] != NULL)
    store(g->state, n, g->call->dstate_in[0], row * n);
}

static void give_gradient(const double* sum, DLTensor* to, bool accumulate) {
  if (to == NULL) return; /* frozen */
  for (int64_t i = 0; i < count_of(to); ++i)
    put(to, i, (accumulate && !MUTANT_IS(OVERWRITES) ? get(to, i) : 0) + sum[i]);
}

static void give_gradients(const gradients* g, uint64_t flags) {
  if (g->call->dparams == NULL) return;
  const bool accumulate = (flags & GRAFT_X_ACCUMULATE) != 0;
  for (int i = 0; i < DECAY; ++i) give_gradient(g->weights[i], g->call->dparams[i], accumulate);
  /* log a = log sigmoid(raw) */
  for (int64_t h = 0; h < g->p.self->heads; ++h) {
    if (!MUTANT_IS(WRONG_GRADIENT)) g->log_decay[h] *= 1 - exp(g->p.log_decay[h]);
    if (MUTANT_IS(NO_GRADIENT)) g->log_decay[h] = 0;
  }
  give_gradient(g->log_decay, g->call->dparams[DECAY], accumulate);
}

static graft_status expect_backward(graft_error* error, const mixer* self,
                                    const graft_mixer_backward* call) {
  TRY(expect_call(error, self, call->fwd));
  if (call->fwd->saved == NULL) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "saved",
                "expected what forward saved, got NULL: call it with GRAFT_X_TRAINING before");
  }
  const DLTensor* const x = call->fwd->x;
  const tables t = tables_for(self, x->shape[0], x->shape[1], x->dtype);
  TRY(expect(error, "tensor:dy", call->dy, x->dtype, 3, x->shape));
  if (call->dx != NULL) TRY(expect(error, "tensor:dx", call->dx, x->dtype, 3, x->shape));
  TRY(expect_tensors(error, "dstate_out", call->dstate_out, t.state, 1, true));
  TRY(expect_tensors(error, "dstate_in", (const DLTensor* const*)call->dstate_in, t.state, 1,
                     true));
  TRY(expect_tensors(error, "dtap", call->dtaps, t.taps, N_TAPS, true));
  if (call->dparams == NULL) return GRAFT_OK;
  return expect_params(error, "dparam", self, (const DLTensor* const*)call->dparams, x->dtype,
                       true);
}

static graft_status GRAFT_CALL backward(graft_mixer* base, const graft_exec* exec,
                                        const graft_mixer_backward* call, graft_error* error) {
  const mixer* const self = self_of(base);
  TRY(expect_backward(error, self, call));
  TRY(expect_exec(error, exec, backward_bytes(self, call->fwd->x->shape[1])));
  gradients g = lay_out_backward(self, call, exec->workspace);
  for (int64_t row = 0; row < g.p.batch; ++row) backward_row(&g, row);
  give_gradients(&g, exec->flags);
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- natural values */

static graft_status GRAFT_CALL set_natural(graft_mixer* base, const char* what, uint32_t n,
                                           const double* values, DLTensor* const* params,
                                           uint8_t* written, graft_error* error) {
  const mixer* const self = self_of(base);
  const char* const where = "natural:" GRAFT_NATURAL_HALF_LIFE;
  if (strcmp(what, GRAFT_NATURAL_HALF_LIFE) != 0)
    return fail(error, GRAFT_UNIMPLEMENTED, "natural", "there is no '%s', only half-life", what);
  if (n != self->heads) {
    return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected %lld values, one a head, got %u",
                (long long)self->heads, n);
  }
  for (uint32_t h = 0; h < n; ++h) {
    if (!(values[h] >= 0.01)) {
      return fail(error, GRAFT_OUT_OF_RANGE, where, "expected at least 0.01 tokens, got %g",
                  values[h]);
    }
  }
  TRY(expect_params(error, "param", self, (const DLTensor* const*)params, kFloat32, false));
  for (uint32_t h = 0; h < n; ++h) put(params[DECAY], h, raw_decay(values[h]));
  if (MUTANT_IS(NATURAL)) put(params[QUERY], 0, 0);
  if (written != NULL) written[DECAY] = 1;
  return GRAFT_OK;
}

static const graft_mixer_domain domain = {.struct_size = sizeof(graft_mixer_domain),
                                          .set = set_natural};

static const void* GRAFT_CALL mixer_extension(graft_mixer* base, const char* id) {
  (void)base;
  return id != NULL && strcmp(id, GRAFT_EXT_MIXER_DOMAIN) == 0 ? &domain : NULL;
}

/* ---------------------------------------------------------------- the component */

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

static const graft_option half_life_option = {
    .struct_size = sizeof(graft_option),
    .key = "half_life",
    .doc = "tokens until the state has halved, at the start",
    .def = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = MUTANT_IS(DEFAULT_RANGE) ? 0.5 : 14}},
    .min = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 1}},
    .max = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 1e6}},
};
static const graft_option* const options[] = {&half_life_option};
static const DLDataType dtypes[] = {{kDLFloat, 32, 1}, {kDLFloat, 64, 1}};
static const DLDeviceType devices[] = {kDLCPU};

static const graft_desc description = {
    .struct_size = sizeof(graft_desc),
    .n_options = 1,
    .id = "org.graft.conformance.mixer",
    .alias = "healthy_mixer",
    .name = "Linear attention with a decay",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .citation = "",
    .description = "What the mutants of a mixer are made of.",
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

static graft_status read_half_life(const graft_config* config, double* out, graft_error* error) {
  const char* const where = "config.half_life";
  for (uint32_t i = 0; i < config->count; ++i) {
    if (strcmp(config->keys[i], half_life_option.key) != 0) continue;
    if (config->values[i].type != GRAFT_FLOAT)
      return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected a number");
    *out = config->values[i].u.f;
    if (*out >= half_life_option.min.u.f && *out <= half_life_option.max.u.f) return GRAFT_OK;
    if (MUTANT_IS(DEFAULT_RANGE)) return GRAFT_OK;
    return fail(error, GRAFT_OUT_OF_RANGE, where, "expected %g to %g, got %g",
                half_life_option.min.u.f, half_life_option.max.u.f, *out);
  }
  return fail(error, GRAFT_INVALID_ARGUMENT, where, "is missing");
}

static void leak(void) {
  static void* volatile lost;
  enum { BYTES = 1 << 16 };
  lost = malloc(BYTES);
  if (lost != NULL) memset(lost, 1, BYTES);
}

static graft_status GRAFT_CALL create(const char* id, const graft_layer_info* layer,
                                      const graft_config* config, graft_mixer** out,
                                      graft_error* error) {
  TRY(expect_init(error));
  if (strcmp(id, description.id) != 0)
    return fail(error, GRAFT_NOT_FOUND, "id", "expected %s, got %s", description.id, id);
  double half_life = 0;
  TRY(read_half_life(config, &half_life, error));
  if (layer->n_heads < 1 || layer->head_dim < 1 || layer->model_dim < 1) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "layer",
                "expected sizes of at least 1, got %d heads of %d and model_dim %lld",
                layer->n_heads, layer->head_dim, (long long)layer->model_dim);
  }
  mixer* const self = calloc(1, sizeof *self);
  if (self == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  if (MUTANT_IS(LEAKS)) leak();
  self->base.v = &table;
  self->base.self = self;
  self->model = layer->model_dim;
  self->heads = layer->n_heads;
  self->dim = layer->head_dim;
  fill_params(self, half_life);
  *out = &self->base;
  return GRAFT_OK;
}

static const graft_mixer_factory factory = {
    .struct_size = sizeof(graft_mixer_factory),
    .count = 1,
    .descs = descriptions,
    .create = create,
};

static const void* GRAFT_CALL library_extension(const char* id) {
  if (id == NULL) return NULL;
  const size_t known = strlen(GRAFT_EXT_MIXER_FACTORY);
  const bool same = MUTANT_IS(ANY_EXTENSION) ? strncmp(id, GRAFT_EXT_MIXER_FACTORY, known) == 0
                                             : strcmp(id, GRAFT_EXT_MIXER_FACTORY) == 0;
  return same ? &factory : NULL;
}
