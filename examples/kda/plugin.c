/* Kimi Delta Attention as a graft mixer: options, parameters, sizes and the checking of calls. The
 * mathematics is in kernel.c. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graft/graft.h"
#include "kernel.h"

static const graft_host* the_host;
static int init_count;

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

/* ---------------------------------------------------------------- options */

enum {
  OPT_SILU_Q,
  OPT_SILU_K,
  OPT_SILU_V,
  OPT_ROPE,
  OPT_QKV_BIAS,
  OPT_O_BIAS,
  OPT_WRITE_GATE_BIAS,
  OPT_OUTPUT_GATE_BIAS,
  OPT_DECAY_RANK,
  OPT_OUTPUT_GATE_RANK,
  OPT_NORM_EPS,
  N_OPTIONS
};

static const char* const follow[] = {"auto", "on", "off", NULL};

#define OPTION(k, text, option_flags, kind, member, value)                                 \
  .struct_size = sizeof(graft_option), .flags = (option_flags), .key = (k), .doc = (text), \
  .def = {.type = (kind), .count = 1, .u = {.member = (value)}}
#define RANGE(kind, member, low, high)                         \
  .min = {.type = (kind), .count = 1, .u = {.member = (low)}}, \
  .max = {.type = (kind), .count = 1, .u = {.member = (high)}}
static const graft_option schema[N_OPTIONS] = {
    [OPT_SILU_Q] = {OPTION("silu_q", "silu on the queries", 0, GRAFT_BOOL, i, 1)},
    [OPT_SILU_K] = {OPTION("silu_k", "silu on the keys", 0, GRAFT_BOOL, i, 1)},
    [OPT_SILU_V] = {OPTION("silu_v", "silu on the values", 0, GRAFT_BOOL, i, 1)},
    [OPT_ROPE] = {OPTION("rope", "keep the teacher's RoPE on queries and keys", 0, GRAFT_BOOL, i,
                         0)},
    [OPT_QKV_BIAS] = {OPTION("qkv_bias",
                             "bias of the q, k, v projections; auto: where the teacher has it",
                             GRAFT_OPT_SHAPES, GRAFT_STRING, s, "auto"),
                      .one_of = follow},
    [OPT_O_BIAS] = {OPTION("o_bias",
                           "bias of the output projection; auto: where the teacher has it",
                           GRAFT_OPT_SHAPES, GRAFT_STRING, s, "auto"),
                    .one_of = follow},
    [OPT_WRITE_GATE_BIAS] = {OPTION("write_gate_bias", "bias of the write gate", GRAFT_OPT_SHAPES,
                                    GRAFT_BOOL, i, 0)},
    [OPT_OUTPUT_GATE_BIAS] = {OPTION("output_gate_bias", "bias of the output gate",
                                     GRAFT_OPT_SHAPES, GRAFT_BOOL, i, 1)},
    [OPT_DECAY_RANK] = {OPTION("decay_rank",
                               "rank of the decay gate; -1: the width of a head, 0: full",
                               GRAFT_OPT_SHAPES, GRAFT_INT, i, -1),
                        RANGE(GRAFT_INT, i, -1, 65536)},
    [OPT_OUTPUT_GATE_RANK] = {OPTION("output_gate_rank",
                                     "rank of the output gate; -1: the width of a head, 0: full",
                                     GRAFT_OPT_SHAPES, GRAFT_INT, i, -1),
                              RANGE(GRAFT_INT, i, -1, 65536)},
    [OPT_NORM_EPS] = {OPTION("norm_eps", "eps of the output norm", 0, GRAFT_FLOAT, f, 1e-5),
                      RANGE(GRAFT_FLOAT, f, 0, 1)},
};
static const graft_option* const options[N_OPTIONS] = {
    &schema[0], &schema[1], &schema[2], &schema[3], &schema[4], &schema[5],
    &schema[6], &schema[7], &schema[8], &schema[9], &schema[10]};

/* The host has checked all this; a caller that did not gets a message in place of a crash. */
static graft_status check_value(const graft_option* option, const graft_value* value,
                                graft_error* error) {
  char where[128];
  snprintf(where, sizeof where, "config.%s", option->key);
  if (value == NULL) return fail(error, GRAFT_INVALID_ARGUMENT, where, "the option is missing");
  if (value->type != option->def.type || value->count != 1)
    return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected a value of type %u, got type %u",
                option->def.type, value->type);
  if (option->min.type == GRAFT_INT &&
      (value->u.i < option->min.u.i || value->u.i > option->max.u.i))
    return fail(error, GRAFT_OUT_OF_RANGE, where, "expected %lld to %lld, got %lld",
                (long long)option->min.u.i, (long long)option->max.u.i, (long long)value->u.i);
  if (option->min.type == GRAFT_FLOAT &&
      !(value->u.f >= option->min.u.f && value->u.f <= option->max.u.f))
    return fail(error, GRAFT_OUT_OF_RANGE, where, "expected %g to %g, got %g", option->min.u.f,
                option->max.u.f, value->u.f);
  if (option->one_of == NULL) return GRAFT_OK;
  for (const char* const* known = option->one_of; *known != NULL && value->u.s != NULL; ++known) {
    if (strcmp(*known, value->u.s) == 0) return GRAFT_OK;
  }
  return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected auto, on or off, got '%s'",
              value->u.s == NULL ? "" : value->u.s);
}

static graft_status read_config(const graft_config* config, graft_value out[N_OPTIONS],
                                graft_error* error) {
  for (int o = 0; o < N_OPTIONS; ++o) {
    const graft_value* found = NULL;
    for (uint32_t i = 0; i < config->count; ++i) {
      if (strcmp(config->keys[i], schema[o].key) == 0) found = &config->values[i];
    }
    TRY(check_value(&schema[o], found, error));
    out[o] = *found;
  }
  return GRAFT_OK;
}

static bool follows(const graft_value* value, bool teacher_has) {
  return strcmp(value->u.s, "auto") == 0 ? teacher_has : strcmp(value->u.s, "on") == 0;
}

/* ---------------------------------------------------------------- one instance */

/* The tensors of a plan, by kind. */
enum { SAVED_CHECKPOINTS = N_ACTIVATIONS, N_SAVED };
enum { STATE_S, STATE_NEXT_POSITION, N_STATES };
enum { TAP_HEAD_OUTPUT, TAP_PRE_OUTPUT, TAP_LOG_DECAY, TAP_WRITE_GATE, N_TAPS };
enum { MOST_TENSORS = N_SAVED };

typedef struct tensor_list {
  graft_tensor_spec specs[MOST_TENSORS];
  const graft_tensor_spec* pointers[MOST_TENSORS];
  int kind[MOST_TENSORS]; /* SAVED_..., STATE_..., TAP_... */
  uint32_t n;
} tensor_list;
typedef struct tensors {
  tensor_list saved, state, taps;
} tensors;

typedef struct kda {
  graft_mixer base; /* what the host holds */
  kda_block block;
  double* rope_inv_freq;
  const graft_host_blas* blas;
  const graft_host_parallel* parallel;
  int64_t threads;
  graft_param_spec specs[N_PARAMS];
  const graft_param_spec* spec_pointers[N_PARAMS];
  int param[N_PARAMS]; /* of each spec: PARAM_... */
  uint32_t n_params;
  tensors plan; /* what plan() gave last */
} kda;

static kda* self_of(graft_mixer* mixer) { return mixer->self; }

static void destroy(graft_mixer* mixer) {
  free(self_of(mixer)->rope_inv_freq);
  free(self_of(mixer));
}

/* ---------------------------------------------------------------- parameters */

/* A matrix [rows,columns], or a vector where columns is 0. `head_dim` 0: not by head. */
static graft_param_spec* add_param(kda* self, int param, const char* name, const char* role,
                                   const char* axes, const char* domain, const char* doc,
                                   int64_t rows, int64_t columns, int64_t head_dim) {
  const bool matrix = columns > 0;
  graft_param_spec* const spec = &self->specs[self->n_params];
  self->spec_pointers[self->n_params] = spec;
  self->param[self->n_params++] = param;
  *spec =
      (graft_param_spec){.struct_size = sizeof *spec,
                         .flags = GRAFT_P_TRAINABLE | (matrix ? 0u : (uint32_t)GRAFT_P_NO_DECAY),
                         .name = name,
                         .role = role,
                         .axes = axes,
                         .domain = domain,
                         .doc = doc,
                         .shape = {rows, columns},
                         .ndim = matrix ? 2 : 1,
                         .heads = head_dim == 0 ? 0 : (int32_t)self->block.heads,
                         .head_dim = (int32_t)head_dim,
                         .init = matrix ? GRAFT_INIT_NORMAL : GRAFT_INIT_ZEROS,
                         .init_b = matrix ? 0.02 : 0};
  return spec;
}

static void add_streams(kda* self, bool bias) {
  static const struct stream {
    int param, bias_param;
    const char *weight, *bias, *role, *bias_role, *axes, *bias_axes, *doc;
  } streams[] = {
      {PARAM_Q, PARAM_Q_BIAS, "q_proj.weight", "q_proj.bias", GRAFT_ROLE_QUERY,
       GRAFT_ROLE_QUERY_BIAS, "heads*key,model", "heads*key", "queries"},
      {PARAM_K, PARAM_K_BIAS, "k_proj.weight", "k_proj.bias", GRAFT_ROLE_KEY, GRAFT_ROLE_KEY_BIAS,
       "heads*key,model", "heads*key", "keys"},
      {PARAM_V, PARAM_V_BIAS, "v_proj.weight", "v_proj.bias", GRAFT_ROLE_VALUE,
       GRAFT_ROLE_VALUE_BIAS, "heads*value,model", "heads*value", "values"},
  };
  const int64_t d = self->block.dim, width = self->block.heads * d;
  for (const struct stream* s = streams; s < streams + 3; ++s) {
    add_param(self, s->param, s->weight, s->role, s->axes, "", s->doc, width, self->block.model, d);
    if (bias)
      add_param(self, s->bias_param, s->bias, s->bias_role, s->bias_axes, "", s->doc, width, 0, d);
  }
}

/* x with log(1 + exp(x)) = y. */
static double softplus_inverse(double y) { return y + log(-expm1(-y)); }

/* fla numbers the two factors of a low-rank gate; a full-rank one is one matrix. */
static void add_gates(kda* self, bool write_bias) {
  const kda_block* const b = &self->block;
  const int64_t d = b->dim, width = b->heads * d, rank = b->decay_rank;
  if (rank > 0)
    add_param(self, PARAM_DECAY_IN, "f_proj.0.weight", "org.example.kda.role.decay-gate-in",
              "decay_rank,model", "", "decay gate, first factor", rank, b->model, 0);
  add_param(self, PARAM_DECAY, rank > 0 ? "f_proj.1.weight" : "f_proj.weight",
            GRAFT_ROLE_DECAY_GATE, rank > 0 ? "heads*key,decay_rank" : "heads*key,model",
            "softplus-inv", "decay gate of each channel, before softplus", width,
            rank > 0 ? rank : b->model, d);
  graft_param_spec* spec = add_param(self, PARAM_DT_BIAS, "dt_bias", GRAFT_ROLE_DECAY_GATE_BIAS,
                                     "heads*key", "softplus-inv", "decay gate, bias", width, 0, d);
  spec->flags |= GRAFT_P_FP32;
  spec->init = GRAFT_INIT_UNIFORM; /* softplus of it: 0.001 to 0.1 */
  spec->init_a = softplus_inverse(0.001);
  spec->init_b = softplus_inverse(0.1);
  spec = add_param(self, PARAM_A_LOG, "A_log", GRAFT_ROLE_DECAY_SCALE, "heads", "log",
                   "log of the factor of the decay gate", b->heads, 0, 1);
  spec->flags |= GRAFT_P_FP32;
  spec->init = GRAFT_INIT_UNIFORM;
  spec->init_b = log(16);
  add_param(self, PARAM_WRITE, "b_proj.weight", GRAFT_ROLE_WRITE_GATE, "heads,model", "logit",
            "write gate, before sigmoid", b->heads, b->model, 1);
  if (write_bias)
    add_param(self, PARAM_WRITE_BIAS, "b_proj.bias", GRAFT_ROLE_WRITE_GATE_BIAS, "heads", "logit",
              "write gate, bias", b->heads, 0, 1);
}

static void add_output(kda* self, bool gate_bias, bool o_bias) {
  const kda_block* const b = &self->block;
  const int64_t d = b->dim, width = b->heads * d, rank = b->gate_rank;
  if (rank > 0)
    add_param(self, PARAM_GATE_IN, "g_proj.0.weight", "org.example.kda.role.output-gate-in",
              "gate_rank,model", "", "output gate, first factor", rank, b->model, 0);
  add_param(self, PARAM_GATE, rank > 0 ? "g_proj.1.weight" : "g_proj.weight",
            GRAFT_ROLE_OUTPUT_GATE, rank > 0 ? "heads*value,gate_rank" : "heads*value,model",
            "logit", "output gate, before sigmoid", width, rank > 0 ? rank : b->model, d);
  if (gate_bias)
    add_param(self, PARAM_GATE_BIAS, rank > 0 ? "g_proj.1.bias" : "g_proj.bias",
              GRAFT_ROLE_OUTPUT_GATE_BIAS, "heads*value", "logit", "output gate, bias", width, 0,
              d);
  add_param(self, PARAM_NORM, "o_norm.weight", GRAFT_ROLE_NORM, "value", "",
            "RMSNorm of a head's output", d, 0, 0)
      ->init = GRAFT_INIT_ONES;
  add_param(self, PARAM_O, "o_proj.weight", GRAFT_ROLE_OUTPUT, "model,heads*value", "",
            "output projection", b->model, width, d);
  if (o_bias)
    add_param(self, PARAM_O_BIAS, "o_proj.bias", GRAFT_ROLE_OUTPUT_BIAS, "model", "",
              "output projection, bias", b->model, 0, 0);
}

static graft_status param_specs(graft_mixer* mixer, const graft_param_spec* const** specs,
                                uint32_t* n, graft_error* error) {
  (void)error;
  *specs = self_of(mixer)->spec_pointers;
  *n = self_of(mixer)->n_params;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- sizes */

static void add_tensor(tensor_list* list, int kind, const char* name, const char* axes,
                       const char* doc, DLDataType dtype, int32_t ndim, const int64_t* shape) {
  graft_tensor_spec* const spec = &list->specs[list->n];
  memset(spec, 0, sizeof *spec);
  spec->struct_size = sizeof *spec;
  spec->name = name;
  spec->axes = axes;
  spec->doc = doc;
  spec->ndim = ndim;
  spec->dtype = dtype;
  memcpy(spec->shape, shape, (size_t)ndim * sizeof *shape);
  list->pointers[list->n] = spec;
  list->kind[list->n++] = kind;
}

/* The tensors of calls of these sizes. */
static void list_tensors(const kda_block* block, int64_t batch, int64_t tokens, DLDataType dtype,
                         bool training, tensors* out) {
  static const char* const names[N_ACTIVATIONS] = {
      "q", "k", "v", "decay_low", "decay", "write", "gate_low", "gate", "head"};
  static const DLDataType position = {kDLInt, 64, 1};
  const int64_t h = block->heads, d = block->dim;
  out->saved.n = out->state.n = out->taps.n = 0;
  for (int i = 0; i < N_ACTIVATIONS && training; ++i) {
    const int64_t shape[] = {batch, tokens, kda_width(block, i)};
    if (shape[2] > 0)
      add_tensor(&out->saved, i, names[i], "batch,tokens,channels", "activation", dtype, 3, shape);
  }
  if (training) {
    const int64_t shape[] = {batch, h, (tokens + KDA_SEGMENT - 1) / KDA_SEGMENT, d, d};
    add_tensor(&out->saved, SAVED_CHECKPOINTS, "states", "batch,heads,segments,key,value",
               "the state at the start of a segment", dtype, 5, shape);
  }
  add_tensor(&out->state, STATE_S, "state", "batch,heads,key,value", "S of the delta rule", dtype,
             4, (int64_t[]){batch, h, d, d});
  if (block->n_rope > 0)
    add_tensor(&out->state, STATE_NEXT_POSITION, "next_position", "batch",
               "position of the next token when the call gives no positions", position, 1, &batch);
  const int64_t per_head[] = {batch, tokens, h, d}, flat[] = {batch, tokens, h * d};
  add_tensor(&out->taps, TAP_HEAD_OUTPUT, GRAFT_TAP_HEAD_OUTPUT, "batch,tokens,heads,value",
             "what the recurrence gives", dtype, 4, per_head);
  add_tensor(&out->taps, TAP_PRE_OUTPUT, GRAFT_TAP_PRE_OUTPUT, "batch,tokens,heads*value",
             "after norm and gate, before the output projection", dtype, 3, flat);
  add_tensor(&out->taps, TAP_LOG_DECAY, GRAFT_TAP_LOG_DECAY, "batch,tokens,heads",
             "mean over a head's channels of the log decay", dtype, 3, per_head);
  add_tensor(&out->taps, TAP_WRITE_GATE, GRAFT_TAP_WRITE_GATE, "batch,tokens,heads", "beta", dtype,
             3, per_head);
}

/* A call of these sizes, without its tensors. */
static kda_call empty_call(const kda* self, int64_t batch, int64_t tokens) {
  const int64_t heads = batch * self->block.heads;
  const kda_call call = {.block = &self->block,
                         .host = the_host,
                         .blas = self->blas,
                         .parallel = self->parallel,
                         .batch = batch,
                         .tokens = tokens,
                         .slots = heads < self->threads ? heads : self->threads};
  return call;
}

static bool is_float(DLDataType dtype) {
  return dtype.code == kDLFloat && (dtype.bits == 32 || dtype.bits == 64) && dtype.lanes == 1;
}

static graft_status plan(graft_mixer* mixer, const graft_plan_in* in, graft_plan_out* out,
                         graft_error* error) {
  kda* const self = self_of(mixer);
  const bool training = (in->flags & GRAFT_X_TRAINING) != 0;
  if (!is_float(in->dtype))
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.dtype",
                "expected float32 or float64, got type code %d of %d bits", in->dtype.code,
                in->dtype.bits);
  if (in->device_type != kDLCPU)
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.device_type", "expected the CPU (%d), got %d",
                kDLCPU, in->device_type);
  if (in->batch < 0 || in->tokens < 0)
    return fail(error, GRAFT_INVALID_ARGUMENT, "plan",
                "expected sizes of 0 or more, got %lld rows of %lld tokens", (long long)in->batch,
                (long long)in->tokens);
  const size_t size = in->dtype.bits / 8u;
  list_tensors(&self->block, in->batch, in->tokens, in->dtype, training, &self->plan);
  kda_call call = empty_call(self, in->batch, in->tokens);
  kda_gradients gradients = {0};
  out->n_saved = self->plan.saved.n;
  out->saved = self->plan.saved.pointers;
  out->n_state = self->plan.state.n;
  out->state = self->plan.state.pointers;
  out->n_taps = self->plan.taps.n;
  out->taps = self->plan.taps.pointers;
  out->workspace_forward = kda_lay_out_forward(&call, size, training, NULL);
  out->workspace_backward = training ? kda_lay_out_backward(&call, &gradients, size, NULL) : 0;
  out->workspace_step = kda_lay_out_forward(&call, size, false, NULL);
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- checking calls */

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

/* data[kind] of each tensor that is there, checked. With `all`, none of a list that is there may be
 * missing. */
static graft_status read_list(const tensor_list* list, const char* what,
                              const DLTensor* const* given, bool all, void** data,
                              graft_error* error) {
  for (uint32_t i = 0; i < list->n && given != NULL; ++i) {
    const graft_tensor_spec* const spec = &list->specs[i];
    char name[96];
    if (given[i] == NULL && !all) continue;
    snprintf(name, sizeof name, "%s.%s", what, spec->name);
    TRY(check_tensor(given[i], name, spec->dtype, spec->ndim, spec->shape, error));
    data[list->kind[i]] = given[i]->data;
  }
  return GRAFT_OK;
}

static graft_status read_params(const kda* self, const char* what, DLDataType dtype,
                                const DLTensor* const* given, bool all, void** data,
                                graft_error* error) {
  for (uint32_t i = 0; i < self->n_params; ++i) {
    const graft_param_spec* const spec = &self->specs[i];
    char name[96];
    if (given[i] == NULL && !all) continue;
    snprintf(name, sizeof name, "%s%s", what, spec->name);
    TRY(check_tensor(given[i], name, dtype, spec->ndim, spec->shape, error));
    data[self->param[i]] = given[i]->data;
  }
  return GRAFT_OK;
}

static graft_status check_count(const char* what, uint32_t expected, uint32_t got,
                                graft_error* error) {
  return expected == got
             ? GRAFT_OK
             : fail(error, GRAFT_INVALID_ARGUMENT, what, "expected %u, got %u", expected, got);
}

/* What forward and backward read. */
static graft_status read_inputs(const kda* self, const graft_exec* exec,
                                const graft_mixer_forward* args, bool training, tensors* sizes,
                                kda_call* call, graft_error* error) {
  static const DLDataType i64 = {kDLInt, 64, 1}, u8 = {kDLUInt, 8, 1};
  const DLTensor* const x = args->x;
  void *params[N_PARAMS] = {0}, *states[N_STATES] = {0}, *saved[N_SAVED] = {0};
  if (exec->device_type != kDLCPU)
    return fail(error, GRAFT_INVALID_ARGUMENT, "exec.device_type", "expected the CPU, got %d",
                exec->device_type);
  if (x == NULL || x->ndim != 3 || !is_float(x->dtype))
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:x",
                "expected [B,T,%lld] of float32 or float64", (long long)self->block.model);
  const int64_t shape[] = {x->shape[0], x->shape[1], self->block.model};
  *call = empty_call(self, shape[0], shape[1]);
  list_tensors(&self->block, shape[0], shape[1], x->dtype, training, sizes);
  TRY(check_tensor(x, "x", x->dtype, 3, shape, error));
  TRY(check_count("n_params", self->n_params, args->n_params, error));
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
    TRY(check_count("n_state", sizes->state.n, args->n_state, error));
  TRY(read_list(&sizes->state, "state_in", args->state_in, true, states, error));
  if (training) {
    if (args->saved == NULL)
      return fail(error, GRAFT_INVALID_ARGUMENT, "saved", "a call for training has none (NULL)");
    TRY(check_count("n_saved", sizes->saved.n, args->n_saved, error));
    TRY(read_list(&sizes->saved, "saved", (const DLTensor* const*)args->saved, true, saved, error));
  }
  call->x = x->data;
  call->positions = args->positions == NULL ? NULL : args->positions->data;
  call->real = args->pad_mask == NULL ? NULL : args->pad_mask->data;
  for (int i = 0; i < N_PARAMS; ++i) call->params[i] = params[i];
  call->state_in = states[STATE_S];
  call->next_in = states[STATE_NEXT_POSITION];
  memcpy(call->activations, saved, sizeof call->activations);
  call->checkpoints = saved[SAVED_CHECKPOINTS];
  return GRAFT_OK;
}

static graft_status check_workspace(const graft_exec* exec, uint64_t needed, graft_error* error) {
  if (needed == 0 || (exec->workspace != NULL && exec->workspace_bytes >= needed)) return GRAFT_OK;
  return fail(error, GRAFT_INVALID_ARGUMENT, "exec.workspace",
              "expected the plan's %llu bytes, got %llu", (unsigned long long)needed,
              (unsigned long long)(exec->workspace == NULL ? 0 : exec->workspace_bytes));
}

/* ---------------------------------------------------------------- calls */

static graft_status run_forward(graft_mixer* mixer, const graft_exec* exec,
                                const graft_mixer_forward* args, bool training,
                                graft_error* error) {
  tensors sizes;
  kda_call call;
  void *states[N_STATES] = {0}, *taps[N_TAPS] = {0};
  TRY(read_inputs(self_of(mixer), exec, args, training, &sizes, &call, error));
  const DLDataType dtype = args->x->dtype;
  if (args->y != NULL || training) TRY(check_tensor(args->y, "y", dtype, 3, args->x->shape, error));
  TRY(read_list(&sizes.state, "state_out", (const DLTensor* const*)args->state_out, true, states,
                error));
  if (args->taps != NULL) TRY(check_count("n_taps", sizes.taps.n, args->n_taps, error));
  TRY(read_list(&sizes.taps, "tap", (const DLTensor* const*)args->taps, false, taps, error));
  TRY(check_workspace(exec, kda_lay_out_forward(&call, dtype.bits / 8u, training, exec->workspace),
                      error));
  call.y = args->y == NULL ? NULL : args->y->data;
  call.state_out = states[STATE_S];
  call.next_out = states[STATE_NEXT_POSITION];
  call.head_output = taps[TAP_HEAD_OUTPUT];
  call.pre_output = taps[TAP_PRE_OUTPUT];
  call.log_decay = taps[TAP_LOG_DECAY];
  call.write_gate = taps[TAP_WRITE_GATE];
  return dtype.bits == 64 ? kda_forward_f64(&call, error) : kda_forward_f32(&call, error);
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
  const kda* const self = self_of(mixer);
  tensors sizes;
  kda_call call;
  kda_gradients g = {0};
  void *dstate_out[N_STATES] = {0}, *dstate_in[N_STATES] = {0}, *dtaps[N_TAPS] = {0};
  if (args->fwd == NULL) return fail(error, GRAFT_INVALID_ARGUMENT, "fwd", "it is missing (NULL)");
  TRY(read_inputs(self, exec, args->fwd, true, &sizes, &call, error));
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
  TRY(check_workspace(exec, kda_lay_out_backward(&call, &g, x->dtype.bits / 8u, exec->workspace),
                      error));
  g.dy = args->dy->data;
  g.dx = args->dx == NULL ? NULL : args->dx->data;
  g.dstate_out = dstate_out[STATE_S];
  g.dstate_in = dstate_in[STATE_S];
  g.dhead_output = dtaps[TAP_HEAD_OUTPUT];
  g.dpre_output = dtaps[TAP_PRE_OUTPUT];
  g.dlog_decay = dtaps[TAP_LOG_DECAY];
  g.dwrite_gate = dtaps[TAP_WRITE_GATE];
  g.accumulate = (exec->flags & GRAFT_X_ACCUMULATE) != 0;
  return x->dtype.bits == 64 ? kda_backward_f64(&call, &g, error)
                             : kda_backward_f32(&call, &g, error);
}

/* ---------------------------------------------------------------- natural values */

/* sigmoid and softplus reach their limits only at infinity; at 30 they are there to 1e-13. */
static const double far_out = 30;

static double clamp(double value, double limit) {
  return value < -limit ? -limit : value > limit ? limit : value;
}
static double sigmoid_inverse(double y) { return log(y) - log1p(-y); }

/* The data of a parameter that is going to be written; NULL when the instance has it not. */
static float* natural_param(const kda* self, int param, DLTensor* const* params, uint8_t* written,
                            int64_t* count) {
  for (uint32_t i = 0; i < self->n_params; ++i) {
    if (self->param[i] != param) continue;
    if (written != NULL) written[i] = 1;
    *count = 1;
    for (int32_t axis = 0; axis < self->specs[i].ndim; ++axis) *count *= self->specs[i].shape[axis];
    return params[i]->data;
  }
  return NULL;
}

static void fill_with_zeros(const kda* self, int param, DLTensor* const* params, uint8_t* written) {
  int64_t count = 0;
  float* const data = natural_param(self, param, params, written, &count);
  if (data != NULL) memset(data, 0, (size_t)count * sizeof *data);
}

/* Each head's raw value for all of its entries. */
static void fill_by_head(const kda* self, int param, DLTensor* const* params, uint8_t* written,
                         const double* values, double (*raw)(double)) {
  int64_t count = 0;
  float* const data = natural_param(self, param, params, written, &count);
  const int64_t per_head = count / self->block.heads;
  for (int64_t i = 0; i < count; ++i) data[i] = (float)clamp(raw(values[i / per_head]), far_out);
}

static double raw_half_life(double tokens) {
  return tokens > 1e12 ? -far_out : softplus_inverse(log(2) / tokens);
}

/* A gate sigmoid(W x + b) at a constant: W = 0, and b where there is one. */
static graft_status set_gate(const kda* self, const char* what, int weight, int bias,
                             const char* option, const double* values, DLTensor* const* params,
                             uint8_t* written, graft_error* error) {
  bool has_bias = false, all_half = true;
  for (uint32_t i = 0; i < self->n_params; ++i) has_bias = has_bias || self->param[i] == bias;
  for (int64_t h = 0; h < self->block.heads; ++h) {
    if (!(values[h] >= 0 && values[h] <= 1))
      return fail(error, GRAFT_OUT_OF_RANGE, what, "expected a value from 0 to 1, got %g",
                  values[h]);
    all_half = all_half && values[h] == 0.5;
  }
  if (!has_bias && !all_half)
    return fail(error, GRAFT_UNIMPLEMENTED, what,
                "without a bias this gate can be constant at 0.5 only; set the option %s", option);
  fill_with_zeros(self, weight, params, written);
  if (has_bias) fill_by_head(self, bias, params, written, values, sigmoid_inverse);
  return GRAFT_OK;
}

static graft_status set_natural(graft_mixer* mixer, const char* what, uint32_t n,
                                const double* values, DLTensor* const* params, uint8_t* written,
                                graft_error* error) {
  const kda* const self = self_of(mixer);
  if (what == NULL || values == NULL || params == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, "natural", "an argument is missing (NULL)");
  if (n != (uint64_t)self->block.heads)
    return fail(error, GRAFT_INVALID_ARGUMENT, what, "expected %lld values, one a head, got %u",
                (long long)self->block.heads, n);
  if (strcmp(what, GRAFT_NATURAL_WRITE_GATE) == 0)
    return set_gate(self, what, PARAM_WRITE, PARAM_WRITE_BIAS, "write_gate_bias", values, params,
                    written, error);
  if (strcmp(what, GRAFT_NATURAL_OUTPUT_GATE) == 0)
    return set_gate(self, what, PARAM_GATE, PARAM_GATE_BIAS, "output_gate_bias", values, params,
                    written, error);
  if (strcmp(what, GRAFT_NATURAL_HALF_LIFE) != 0)
    return fail(error, GRAFT_UNIMPLEMENTED, what,
                "known are " GRAFT_NATURAL_HALF_LIFE ", " GRAFT_NATURAL_WRITE_GATE
                " and " GRAFT_NATURAL_OUTPUT_GATE);
  for (uint32_t h = 0; h < n; ++h) {
    if (!(values[h] >= 1e-3))
      return fail(error, GRAFT_OUT_OF_RANGE, what, "expected a value of 0.001 or more, got %g",
                  values[h]);
  }
  /* decay = exp(-exp(A_log) softplus(dt_bias)) with A_log = 0. */
  fill_with_zeros(self, PARAM_DECAY, params, written);
  fill_with_zeros(self, PARAM_A_LOG, params, written);
  fill_by_head(self, PARAM_DT_BIAS, params, written, values, raw_half_life);
  return GRAFT_OK;
}

static const graft_mixer_domain domain = {.struct_size = sizeof(graft_mixer_domain),
                                          .set = set_natural};

static const void* mixer_extension(graft_mixer* mixer, const char* id) {
  (void)mixer;
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

static const DLDataType dtypes[] = {{kDLFloat, 32, 1}, {kDLFloat, 64, 1}};
static const DLDeviceType devices[] = {kDLCPU};
static const graft_desc description = {
    .struct_size = sizeof(graft_desc),
    .n_options = N_OPTIONS,
    .id = "org.example.kda",
    .alias = "kda",
    .name = "Kimi Delta Attention",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .citation = "https://arxiv.org/abs/2510.26692",
    .description = "Gated delta rule whose state decays channel by channel",
    /* Not BATCH_INVARIANT or THREAD_INVARIANT: the host's matrix products do not promise it. */
    .caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO | GRAFT_CAP_PAD_MASK |
            GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_STATEFUL_GRAD | GRAFT_CAP_TAPS_ONLY,
    .options = options,
    .dtypes = dtypes,
    .devices = devices,
    .n_dtypes = 2,
    .n_devices = 1,
};
static const graft_desc* const descriptions[] = {&description};

static int64_t rank_of(const graft_value* value, int64_t head_dim) {
  return value->u.i < 0 ? head_dim : value->u.i;
}

static graft_status read_rope(kda* self, const graft_layer_info* layer, graft_error* error) {
  const int32_t pairs = layer->n_rope_freq;
  if (pairs <= 0 || layer->rope_inv_freq == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, "config.rope",
                "the teacher's block has no RoPE whose frequencies could be used");
  if (2 * (int64_t)pairs > self->block.dim)
    return fail(error, GRAFT_INVALID_ARGUMENT, "config.rope",
                "the teacher rotates %d entries of a head of %lld", 2 * pairs,
                (long long)self->block.dim);
  self->rope_inv_freq = malloc((size_t)pairs * sizeof *self->rope_inv_freq);
  if (self->rope_inv_freq == NULL)
    return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  memcpy(self->rope_inv_freq, layer->rope_inv_freq, (size_t)pairs * sizeof *self->rope_inv_freq);
  self->block.n_rope = pairs;
  self->block.rope_inv_freq = self->rope_inv_freq;
  self->block.rope_factor = layer->rope_attention_factor == 0 ? 1 : layer->rope_attention_factor;
  return GRAFT_OK;
}

static graft_status set_up(kda* self, const graft_layer_info* layer, const graft_config* config,
                           graft_error* error) {
  graft_value value[N_OPTIONS];
  TRY(read_config(config, value, error));
  if (layer->model_dim <= 0 || layer->n_heads <= 0 || layer->head_dim <= 0)
    return fail(error, GRAFT_INVALID_ARGUMENT, "layer",
                "expected positive sizes, got model_dim %lld and %d heads of %d",
                (long long)layer->model_dim, layer->n_heads, layer->head_dim);
  self->block = (kda_block){.model = layer->model_dim,
                            .heads = layer->n_heads,
                            .dim = layer->head_dim,
                            .decay_rank = rank_of(&value[OPT_DECAY_RANK], layer->head_dim),
                            .gate_rank = rank_of(&value[OPT_OUTPUT_GATE_RANK], layer->head_dim),
                            .silu_q = value[OPT_SILU_Q].u.i != 0,
                            .silu_k = value[OPT_SILU_K].u.i != 0,
                            .silu_v = value[OPT_SILU_V].u.i != 0,
                            .norm_eps = value[OPT_NORM_EPS].u.f};
  if (value[OPT_ROPE].u.i != 0) TRY(read_rope(self, layer, error));
  add_streams(self, follows(&value[OPT_QKV_BIAS], (layer->flags & GRAFT_LAYER_QKV_BIAS) != 0));
  add_gates(self, value[OPT_WRITE_GATE_BIAS].u.i != 0);
  add_output(self, value[OPT_OUTPUT_GATE_BIAS].u.i != 0,
             follows(&value[OPT_O_BIAS], (layer->flags & GRAFT_LAYER_O_BIAS) != 0));
  self->blas = the_host->get_extension(the_host, GRAFT_HOST_EXT_BLAS);
  self->parallel = the_host->get_extension(the_host, GRAFT_HOST_EXT_PARALLEL);
  self->threads = self->parallel == NULL ? 1 : self->parallel->num_threads(the_host);
  return GRAFT_OK;
}

static graft_status create(const char* id, const graft_layer_info* layer,
                           const graft_config* config, graft_mixer** out, graft_error* error) {
  if (id == NULL || strcmp(id, description.id) != 0)
    return fail(error, GRAFT_NOT_FOUND, "id", "expected '%s', got '%s'", description.id,
                id == NULL ? "" : id);
  kda* const self = calloc(1, sizeof *self);
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
    .id = "org.example.kda-pack",
    .vendor = "example",
    .url = "https://arxiv.org/abs/2510.26692",
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
