/* kernel_f32.c and kernel_f64.c are this file; REAL and NAME() tell the two apart. */
#include <string.h>
#include <tgmath.h>

#include "kernel.h"

/* The loops over a state are compiled for each of these and picked when the library is loaded. A
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

/* ---------------------------------------------------------------- matrix products */

typedef struct product {
  const REAL *a, *b;
  REAL* c;
  int64_t n, k, a_row, a_column, b_row, b_column;
} product;

static void GRAFT_CALL product_rows(void* arg, int64_t begin, int64_t end, int32_t worker) {
  const product* const p = arg;
  (void)worker;
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t j = 0; j < p->n; ++j) {
      REAL sum = 0;
      for (int64_t l = 0; l < p->k; ++l)
        sum += p->a[i * p->a_row + l * p->a_column] * p->b[l * p->b_row + j * p->b_column];
      p->c[i * p->n + j] += sum;
    }
  }
}

static void for_each(const kda_call* call, int64_t count, void* arg,
                     void(GRAFT_CALL* body)(void*, int64_t, int64_t, int32_t)) {
  if (count == 0) return;
  if (call->parallel == NULL) {
    body(arg, 0, count, 0);
  } else {
    call->parallel->parallel_for(call->host, 0, count, 1, body, arg);
  }
}

static DLTensor matrix(const REAL* data, int64_t* shape_and_strides, int64_t rows,
                       int64_t columns) {
  const int64_t filled[4] = {rows, columns, columns, 1};
  memcpy(shape_and_strides, filled, sizeof filled);
  const DLTensor tensor = {.data = (void*)(uintptr_t)data,
                           .device = {kDLCPU, 0},
                           .ndim = 2,
                           .dtype = {kDLFloat, 8 * sizeof(REAL), 1},
                           .shape = shape_and_strides,
                           .strides = shape_and_strides + 2};
  return tensor;
}

/* c [m,n] = op(a) op(b) with op(a) [m,k], op(b) [k,n]; c += with `add`. */
static graft_status multiply(const kda_call* call, bool transpose_a, bool transpose_b, int64_t m,
                             int64_t n, int64_t k, const REAL* a, const REAL* b, bool add, REAL* c,
                             graft_error* error) {
  if (m == 0 || n == 0) return GRAFT_OK;
  if (call->blas == NULL || k == 0) {
    product p = {a,
                 b,
                 c,
                 n,
                 k,
                 transpose_a ? 1 : k,
                 transpose_a ? m : 1,
                 transpose_b ? 1 : n,
                 transpose_b ? k : 1};
    if (!add) memset(c, 0, (size_t)(m * n) * sizeof(REAL));
    for_each(call, m, &p, product_rows);
    return GRAFT_OK;
  }
  int64_t sizes[3][4];
  const DLTensor left = matrix(a, sizes[0], transpose_a ? k : m, transpose_a ? m : k);
  const DLTensor right = matrix(b, sizes[1], transpose_b ? n : k, transpose_b ? k : n);
  DLTensor out = matrix(c, sizes[2], m, n);
  return call->blas->gemm(call->host, transpose_a, transpose_b, 1.0, &left, &right, add ? 1.0 : 0.0,
                          &out, NULL, error);
}

/* out [rows,width] = in [rows,depth] weight [width,depth]^T + bias. */
static graft_status project(const kda_call* call, int64_t rows, int64_t depth, const REAL* in,
                            int64_t width, const REAL* weight, const REAL* bias, REAL* out,
                            graft_error* error) {
  for (int64_t i = 0; i < rows && bias != NULL; ++i)
    memcpy(out + i * width, bias, (size_t)width * sizeof(REAL));
  return multiply(call, false, true, rows, width, depth, in, weight, bias != NULL, out, error);
}

/* to [width] (+)= the sum of the rows of from. */
static void sum_rows(int64_t rows, int64_t width, const REAL* from, int64_t stride, bool add,
                     REAL* to) {
  if (!add) memset(to, 0, (size_t)width * sizeof(REAL));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; ++j) to[j] += from[i * stride + j];
  }
}

/* ---------------------------------------------------------------- projections */

/* out = in weight^T + bias. `low` is what the activation comes from where it is there; else x. */
typedef struct projection {
  int weight, bias, low, out;
} projection;
enum { NONE = -1 };
static const projection projections[] = {
    {PARAM_Q, PARAM_Q_BIAS, NONE, ACT_Q},
    {PARAM_K, PARAM_K_BIAS, NONE, ACT_K},
    {PARAM_V, PARAM_V_BIAS, NONE, ACT_V},
    {PARAM_DECAY_IN, NONE, NONE, ACT_DECAY_LOW},
    {PARAM_DECAY, PARAM_DT_BIAS, ACT_DECAY_LOW, ACT_DECAY},
    {PARAM_WRITE, PARAM_WRITE_BIAS, NONE, ACT_WRITE},
    {PARAM_GATE_IN, NONE, NONE, ACT_GATE_LOW},
    {PARAM_GATE, PARAM_GATE_BIAS, ACT_GATE_LOW, ACT_GATE},
};
enum { N_PROJECTIONS = sizeof projections / sizeof projections[0] };

static int low_of(const kda_block* block, const projection* p) {
  return p->low != NONE && kda_width(block, p->low) > 0 ? p->low : NONE;
}

/* ---------------------------------------------------------------- functions of one number */

static REAL sigmoid(REAL z) { return 1 / (1 + exp(-z)); }
static REAL softplus(REAL z) { return (z > 0 ? z : 0) + log1p(exp(z > 0 ? -z : z)); }
static REAL silu_slope(REAL z) {
  const REAL s = sigmoid(z);
  return s * (1 + z * (1 - s));
}

/* ---------------------------------------------------------------- queries and keys */

/* to = (rotated, silu'd from) / its length; gives 1 / length. The 1e-6 is inside the root, as in
 * fla. */
static REAL normalise(const kda_block* block, const REAL* from, bool silu, const REAL* cosine,
                      const REAL* sine, REAL* to) {
  REAL square = 0;
  for (int64_t i = 0; i < block->dim; ++i) to[i] = silu ? from[i] * sigmoid(from[i]) : from[i];
  for (int64_t i = 0; i < block->n_rope; ++i) {
    const REAL a = to[i], b = to[i + block->n_rope];
    to[i] = a * cosine[i] - b * sine[i];
    to[i + block->n_rope] = b * cosine[i] + a * sine[i];
  }
  for (int64_t i = 0; i < block->dim; ++i) square += to[i] * to[i];
  const REAL inverse = 1 / sqrt(square + (REAL)1e-6);
  for (int64_t i = 0; i < block->dim; ++i) to[i] *= inverse;
  return inverse;
}

/* dfrom from the gradient of the result, which is overwritten. */
static void normalise_backward(const kda_block* block, const REAL* from, bool silu,
                               const REAL* cosine, const REAL* sine, const REAL* to, REAL inverse,
                               REAL* dto, REAL* dfrom) {
  REAL inner = 0;
  for (int64_t i = 0; i < block->dim; ++i) inner += to[i] * dto[i];
  for (int64_t i = 0; i < block->dim; ++i) dto[i] = inverse * (dto[i] - to[i] * inner);
  for (int64_t i = 0; i < block->n_rope; ++i) {
    const REAL a = dto[i], b = dto[i + block->n_rope];
    dto[i] = a * cosine[i] + b * sine[i];
    dto[i + block->n_rope] = b * cosine[i] - a * sine[i];
  }
  for (int64_t i = 0; i < block->dim; ++i) dfrom[i] = silu ? dto[i] * silu_slope(from[i]) : dto[i];
}

/* One token of a head, ready for the recurrence. */
typedef struct head_token {
  int64_t at; /* row of [B*T] */
  REAL *query, *key, *decay, *value, *error,
      *carried; /* rows of scratch memory; carried = decay * key */
  REAL query_inverse, key_inverse, write;
} head_token;

static head_token token_in(const kda_block* block, REAL* scratch) {
  const int64_t d = block->dim;
  const head_token token = {.query = scratch,
                            .key = scratch + d,
                            .decay = scratch + 2 * d,
                            .value = scratch + 3 * d,
                            .error = scratch + 4 * d,
                            .carried = scratch + 5 * d};
  return token;
}

/* Row `at` of an activation, the part of head h. */
static REAL* row(const kda_call* call, void* const* activations, int which, int64_t at, int64_t h) {
  const int64_t width = kda_width(call->block, which), part = width / call->block->heads;
  return (REAL*)activations[which] + at * width + h * part;
}

/* Gives the mean over channels of the log decay. */
static REAL read_token(const kda_call* call, int64_t h, int64_t at, head_token* token) {
  const kda_block* const block = call->block;
  const REAL* const cosine = (const REAL*)call->cosine + at * block->n_rope;
  const REAL* const sine = (const REAL*)call->sine + at * block->n_rope;
  token->at = at;
  token->query_inverse = normalise(block, row(call, call->activations, ACT_Q, at, h), block->silu_q,
                                   cosine, sine, token->query);
  token->key_inverse = normalise(block, row(call, call->activations, ACT_K, at, h), block->silu_k,
                                 cosine, sine, token->key);
  token->write = sigmoid(*row(call, call->activations, ACT_WRITE, at, h));
  const REAL* const v = row(call, call->activations, ACT_V, at, h);
  for (int64_t j = 0; j < block->dim; ++j)
    token->value[j] = block->silu_v ? v[j] * sigmoid(v[j]) : v[j];
  const REAL scale = exp(((const REAL*)call->params[PARAM_A_LOG])[h]);
  const REAL* const gate = row(call, call->activations, ACT_DECAY, at, h);
  REAL sum = 0;
  for (int64_t i = 0; i < block->dim; ++i) {
    const REAL log_decay = -scale * softplus(gate[i]);
    sum += log_decay;
    token->decay[i] = exp(log_decay);
    token->carried[i] = token->decay[i] * token->key[i];
  }
  return sum / (REAL)block->dim;
}

/* ---------------------------------------------------------------- the recurrence */

/* error = v - S^T (decay k);  S' = diag(decay) S + k (write error)^T;  output = S'^T q. S' may be
 * S. */
INLINE void advance(int64_t d, const head_token* token, const REAL* state, REAL* next,
                    REAL* output) {
  REAL* const error = token->error;
  for (int64_t j = 0; j < d; ++j) error[j] = token->value[j];
  int64_t i = 0;
  /* Four rows at once: a row of sums is loaded and stored a quarter as often. */
  for (; i + 4 <= d; i += 4) {
    const REAL *const s = state + i * d, *const k = token->carried + i;
#pragma omp simd
    for (int64_t j = 0; j < d; ++j)
      error[j] -= k[0] * s[j] + k[1] * s[d + j] + k[2] * s[2 * d + j] + k[3] * s[3 * d + j];
  }
  for (; i < d; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < d; ++j) error[j] -= token->carried[i] * state[i * d + j];
  }
  memset(output, 0, (size_t)d * sizeof(REAL));
  for (i = 0; i < d; ++i) {
    const REAL decay = token->decay[i], written = token->key[i] * token->write, q = token->query[i];
#pragma omp simd
    for (int64_t j = 0; j < d; ++j) {
      const REAL s = decay * state[i * d + j] + written * error[j];
      next[i * d + j] = s;
      output[j] += q * s;
    }
  }
}

/* Gradients of what advance() reads, from those of what it writes. `dstate` goes from S' to S. */
typedef struct token_gradient {
  REAL *query, *key, *log_decay, *value; /* [dim] */
  REAL write;
} token_gradient;

INLINE void retreat(int64_t d, const head_token* token, const REAL* state, const REAL* next,
                    const REAL* doutput, REAL* dstate, token_gradient* to) {
  const REAL* const error = token->error;
  REAL* const dvalue = to->value;
  memset(dvalue, 0, (size_t)d * sizeof(REAL));
  for (int64_t i = 0; i < d; ++i) {
    const REAL q = token->query[i], k = token->key[i];
    const REAL *const s = state + i * d, *const s_next = next + i * d;
    REAL *const ds = dstate + i * d, dq = 0, dk = 0, ddecay = 0;
#pragma omp simd reduction(+ : dq, dk, ddecay)
    for (int64_t j = 0; j < d; ++j) {
      ds[j] += q * doutput[j];
      dq += s_next[j] * doutput[j];
      dk += ds[j] * error[j];
      ddecay += ds[j] * s[j];
      dvalue[j] += k * ds[j]; /* of write * error */
    }
    to->query[i] = dq;
    to->key[i] = token->write * dk;
    to->log_decay[i] = ddecay;
  }
  REAL dwrite = 0;
  for (int64_t j = 0; j < d; ++j) {
    dwrite += dvalue[j] * error[j];
    dvalue[j] *= token->write;
  }
  to->write = dwrite;
  for (int64_t i = 0; i < d; ++i) {
    const REAL decay = token->decay[i], carried = token->carried[i];
    const REAL* const s = state + i * d;
    REAL *const ds = dstate + i * d, dcarried = 0;
#pragma omp simd reduction(+ : dcarried)
    for (int64_t j = 0; j < d; ++j) {
      dcarried -= s[j] * dvalue[j];
      ds[j] = decay * ds[j] - carried * dvalue[j];
    }
    to->key[i] += decay * dcarried;
    to->log_decay[i] = decay * (to->log_decay[i] + token->key[i] * dcarried);
  }
}

/* ---------------------------------------------------------------- norm and gate of the output */

/* pre = o / rms(o) * weight * sigmoid(gate). */
static REAL inverse_rms(const kda_block* block, const REAL* o) {
  REAL square = 0;
  for (int64_t j = 0; j < block->dim; ++j) square += o[j] * o[j];
  return 1 / sqrt(square / (REAL)block->dim + (REAL)block->norm_eps);
}

static void gated_norm(const kda_call* call, int64_t h, int64_t at, const REAL* o, REAL* pre) {
  const REAL* const weight = call->params[PARAM_NORM];
  const REAL* const gate = row(call, call->activations, ACT_GATE, at, h);
  const REAL inverse = inverse_rms(call->block, o);
  for (int64_t j = 0; j < call->block->dim; ++j)
    pre[j] = o[j] * inverse * weight[j] * sigmoid(gate[j]);
}

/* Writes dout and dgate, adds to dweight. */
static void gated_norm_backward(const kda_call* call, int64_t h, int64_t at, const REAL* dpre,
                                REAL* dgate, REAL* dweight, REAL* dout) {
  const int64_t d = call->block->dim;
  const REAL *const weight = call->params[PARAM_NORM],
                    *const o = row(call, call->activations, ACT_HEAD, at, h),
                    *const gate = row(call, call->activations, ACT_GATE, at, h);
  const REAL inverse = inverse_rms(call->block, o);
  REAL inner = 0;
  for (int64_t j = 0; j < d; ++j) {
    const REAL s = sigmoid(gate[j]), normed = o[j] * inverse;
    dgate[j] = dpre[j] * normed * weight[j] * s * (1 - s);
    dweight[j] += dpre[j] * normed * s;
    dout[j] = dpre[j] * weight[j] * s;
    inner += dout[j] * normed;
  }
  for (int64_t j = 0; j < d; ++j) dout[j] = inverse * (dout[j] - o[j] * inverse * inner / (REAL)d);
}

/* ---------------------------------------------------------------- one head, forward */

static void store(void* to, int64_t at, REAL value) {
  if (to != NULL) ((REAL*)to)[at] = value;
}

FOR_EACH_CPU static void head_forward(const kda_call* call, int64_t b, int64_t h, REAL* scratch) {
  const kda_block* const block = call->block;
  const int64_t d = block->dim, head = b * block->heads + h;
  const int64_t segments = (call->tokens + KDA_SEGMENT - 1) / KDA_SEGMENT;
  const size_t state_bytes = (size_t)(d * d) * sizeof(REAL), row_bytes = (size_t)d * sizeof(REAL);
  const REAL scale = 1 / sqrt((REAL)d);
  REAL* const state = scratch;
  head_token token = token_in(block, scratch + d * d);
  memset(state, 0, state_bytes);
  if (call->state_in != NULL)
    memcpy(state, (const REAL*)call->state_in + head * d * d, state_bytes);
  for (int64_t t = 0; t < call->tokens; ++t) {
    const int64_t at = b * call->tokens + t;
    REAL* const o = row(call, call->activations, ACT_HEAD, at, h);
    REAL* const pre = (REAL*)call->pre + (at * block->heads + h) * d;
    if (call->checkpoints != NULL && t % KDA_SEGMENT == 0)
      memcpy((REAL*)call->checkpoints + (head * segments + t / KDA_SEGMENT) * d * d, state,
             state_bytes);
    const bool real = call->real == NULL || call->real[at] != 0;
    REAL log_decay = 0;
    token.write = 0;
    memset(o, 0, row_bytes);
    memset(pre, 0, row_bytes);
    if (real) {
      log_decay = read_token(call, h, at, &token);
      advance(d, &token, state, state, o);
      for (int64_t j = 0; j < d; ++j) o[j] *= scale;
      if (call->y != NULL || call->pre_output != NULL) gated_norm(call, h, at, o, pre);
    }
    store(call->log_decay, at * block->heads + h, log_decay);
    store(call->write_gate, at * block->heads + h, token.write);
  }
  if (call->state_out != NULL) memcpy((REAL*)call->state_out + head * d * d, state, state_bytes);
}

/* Slot s of the scratch memory serves its share of the heads, one after the other. */
static void GRAFT_CALL forward_slots(void* arg, int64_t begin, int64_t end, int32_t worker) {
  const kda_call* const call = arg;
  const int64_t heads = call->block->heads, count = call->batch * heads;
  (void)worker;
  for (int64_t slot = begin; slot < end; ++slot) {
    REAL* const scratch = (REAL*)call->head_scratch + slot * kda_forward_head_size(call->block);
    for (int64_t i = slot * count / call->slots; i < (slot + 1) * count / call->slots; ++i)
      head_forward(call, i / heads, i % heads, scratch);
  }
}

/* ---------------------------------------------------------------- the block, forward */

static void rotations(const kda_call* call) {
  const int32_t pairs = call->block->n_rope;
  for (int64_t at = 0; at < call->batch * call->tokens; ++at) {
    for (int32_t i = 0; i < pairs; ++i) {
      const double angle = (double)call->position[at] * call->block->rope_inv_freq[i];
      ((REAL*)call->cosine)[at * pairs + i] = (REAL)(cos(angle) * call->block->rope_factor);
      ((REAL*)call->sine)[at * pairs + i] = (REAL)(sin(angle) * call->block->rope_factor);
    }
  }
}

/* `tensor` [B,T,width], or a copy in `copy` whose padded rows are 0: what stands there may be NaN.
 */
static const REAL* without_pads(const kda_call* call, const void* tensor, int64_t width,
                                void* copy) {
  if (call->real == NULL) return tensor;
  const size_t bytes = (size_t)width * sizeof(REAL);
  for (int64_t at = 0; at < call->batch * call->tokens; ++at) {
    if (call->real[at] != 0) {
      memcpy((REAL*)copy + at * width, (const REAL*)tensor + at * width, bytes);
    } else {
      memset((REAL*)copy + at * width, 0, bytes);
    }
  }
  return copy;
}

static void clear_pads(const kda_call* call, int64_t width, REAL* tensor) {
  for (int64_t at = 0; at < call->batch * call->tokens && call->real != NULL; ++at) {
    if (call->real[at] == 0) memset(tensor + at * width, 0, (size_t)width * sizeof(REAL));
  }
}

graft_status NAME(kda_forward)(const kda_call* call, graft_error* error) {
  const kda_block* const block = call->block;
  const int64_t n = call->batch * call->tokens, width = block->heads * block->dim;
  const bool gated = call->y != NULL || call->pre_output != NULL;
  const REAL* const x = without_pads(call, call->x, block->model, call->x0);
  graft_status status = GRAFT_OK;
  for (int i = 0; i < N_PROJECTIONS; ++i) {
    const projection* const p = &projections[i];
    const bool of_gate = p->out == ACT_GATE || p->out == ACT_GATE_LOW;
    if (kda_width(block, p->out) == 0 || (of_gate && !gated)) continue;
    const int low = low_of(block, p);
    status = project(call, n, low == NONE ? block->model : kda_width(block, low),
                     low == NONE ? x : call->activations[low], kda_width(block, p->out),
                     call->params[p->weight], p->bias == NONE ? NULL : call->params[p->bias],
                     call->activations[p->out], error);
    if (status != GRAFT_OK) return status;
  }
  kda_find_positions(call);
  rotations(call);
  for_each(call, call->slots, (void*)(uintptr_t)call, forward_slots);
  kda_write_next_positions(call);
  const size_t bytes = (size_t)(n * width) * sizeof(REAL);
  if (call->head_output != NULL && n > 0)
    memcpy(call->head_output, call->activations[ACT_HEAD], bytes);
  if (call->pre_output != NULL && n > 0) memcpy(call->pre_output, call->pre, bytes);
  if (call->y == NULL) return GRAFT_OK;
  status = project(call, n, width, call->pre, block->model, call->params[PARAM_O],
                   call->params[PARAM_O_BIAS], call->y, error);
  clear_pads(call, block->model, call->y);
  return status;
}

/* ---------------------------------------------------------------- one head, backward */

typedef struct backward_task {
  const kda_call* call;
  const kda_gradients* gradients;
} backward_task;

typedef struct head_memory {
  REAL *states, *dstate, *output, *doutput;
  head_token tokens[KDA_SEGMENT];
} head_memory;

/* The tokens of a segment once more, from its checkpoint: states[n] is the state before tokens[n].
 * Gives their number; pads have none, and no gradients. */
INLINE int64_t replay(const backward_task* task, int64_t b, int64_t h, int64_t segment,
                      head_memory* memory) {
  const kda_call* const call = task->call;
  const int64_t d = call->block->dim, segments = (call->tokens + KDA_SEGMENT - 1) / KDA_SEGMENT;
  const REAL* const start =
      (const REAL*)call->checkpoints + ((b * call->block->heads + h) * segments + segment) * d * d;
  int64_t n = 0;
  memcpy(memory->states, start, (size_t)(d * d) * sizeof(REAL));
  for (int64_t t = segment * KDA_SEGMENT; t < call->tokens && t < (segment + 1) * KDA_SEGMENT;
       ++t) {
    const int64_t at = b * call->tokens + t;
    if (call->real != NULL && call->real[at] == 0) {
      for (int i = 0; i < N_ACTIVATIONS; ++i) {
        if (i == ACT_DECAY_LOW || i == ACT_GATE_LOW) continue; /* no head's */
        const int64_t part = kda_width(call->block, i) / call->block->heads;
        memset(row(call, task->gradients->dactivations, i, at, h), 0, (size_t)part * sizeof(REAL));
      }
      memset((REAL*)call->pre + (at * call->block->heads + h) * d, 0, (size_t)d * sizeof(REAL));
      continue;
    }
    read_token(call, h, at, &memory->tokens[n]);
    advance(d, &memory->tokens[n], memory->states + n * d * d, memory->states + (n + 1) * d * d,
            memory->output);
    ++n;
  }
  return n;
}

/* From the gradients of one token's query, key, log decay, value and write gate to those of the
 * activations. */
static void read_token_backward(const backward_task* task, int64_t h, const head_token* token,
                                token_gradient* d, REAL* da_log) {
  const kda_call* const call = task->call;
  const kda_block* const block = call->block;
  const kda_gradients* const g = task->gradients;
  const int64_t at = token->at, scalar = at * block->heads + h;
  const REAL* const cosine = (const REAL*)call->cosine + at * block->n_rope;
  const REAL* const sine = (const REAL*)call->sine + at * block->n_rope;
  normalise_backward(block, row(call, call->activations, ACT_Q, at, h), block->silu_q, cosine, sine,
                     token->query, token->query_inverse, d->query,
                     row(call, g->dactivations, ACT_Q, at, h));
  normalise_backward(block, row(call, call->activations, ACT_K, at, h), block->silu_k, cosine, sine,
                     token->key, token->key_inverse, d->key,
                     row(call, g->dactivations, ACT_K, at, h));
  const REAL* const v = row(call, call->activations, ACT_V, at, h);
  REAL* const dv = row(call, g->dactivations, ACT_V, at, h);
  for (int64_t j = 0; j < block->dim; ++j)
    dv[j] = block->silu_v ? d->value[j] * silu_slope(v[j]) : d->value[j];
  const REAL dwrite =
      d->write + (g->dwrite_gate == NULL ? 0 : ((const REAL*)g->dwrite_gate)[scalar]);
  *row(call, g->dactivations, ACT_WRITE, at, h) = dwrite * token->write * (1 - token->write);
  const REAL dmean =
      g->dlog_decay == NULL ? 0 : ((const REAL*)g->dlog_decay)[scalar] / (REAL)block->dim;
  const REAL scale = exp(((const REAL*)call->params[PARAM_A_LOG])[h]);
  const REAL* const gate = row(call, call->activations, ACT_DECAY, at, h);
  REAL* const dgate = row(call, g->dactivations, ACT_DECAY, at, h);
  for (int64_t i = 0; i < block->dim; ++i) {
    const REAL of_log_decay = d->log_decay[i] + dmean;
    dgate[i] = -scale * of_log_decay * sigmoid(gate[i]);
    *da_log -= of_log_decay * scale * softplus(gate[i]);
  }
}

FOR_EACH_CPU static void head_backward(const backward_task* task, int64_t b, int64_t h,
                                       REAL* scratch) {
  const kda_call* const call = task->call;
  const kda_gradients* const g = task->gradients;
  const int64_t d = call->block->dim, head = b * call->block->heads + h;
  const size_t state_bytes = (size_t)(d * d) * sizeof(REAL);
  const REAL scale = 1 / sqrt((REAL)d);
  REAL* const dnorm = (REAL*)g->partial + head * (d + 1); /* [dim], then A_log's */
  head_memory memory = {.states = scratch, .dstate = scratch + (KDA_SEGMENT + 1) * d * d};
  REAL* rows = memory.dstate + d * d;
  for (int i = 0; i < KDA_SEGMENT; ++i, rows += kda_token_size(call->block))
    memory.tokens[i] = token_in(call->block, rows);
  token_gradient of_token = {rows, rows + d, rows + 2 * d, rows + 3 * d, 0};
  memory.output = rows + 4 * d;
  memory.doutput = rows + 5 * d;
  memset(dnorm, 0, (size_t)(d + 1) * sizeof(REAL));
  memset(memory.dstate, 0, state_bytes);
  if (g->dstate_out != NULL)
    memcpy(memory.dstate, (const REAL*)g->dstate_out + head * d * d, state_bytes);
  for (int64_t segment = (call->tokens + KDA_SEGMENT - 1) / KDA_SEGMENT; segment-- > 0;) {
    for (int64_t n = replay(task, b, h, segment, &memory); n-- > 0;) {
      const head_token* const token = &memory.tokens[n];
      const int64_t first = (token->at * call->block->heads + h) * d;
      gated_norm(call, h, token->at, row(call, call->activations, ACT_HEAD, token->at, h),
                 (REAL*)call->pre + first);
      gated_norm_backward(call, h, token->at, (const REAL*)g->dpre + first,
                          row(call, g->dactivations, ACT_GATE, token->at, h), dnorm,
                          memory.doutput);
      for (int64_t j = 0; j < d; ++j) {
        if (g->dhead_output != NULL) memory.doutput[j] += ((const REAL*)g->dhead_output)[first + j];
        memory.doutput[j] *= scale;
      }
      retreat(d, token, memory.states + n * d * d, memory.states + (n + 1) * d * d, memory.doutput,
              memory.dstate, &of_token);
      read_token_backward(task, h, token, &of_token, dnorm + d);
    }
  }
  if (g->dstate_in != NULL) memcpy((REAL*)g->dstate_in + head * d * d, memory.dstate, state_bytes);
}

static void GRAFT_CALL backward_slots(void* arg, int64_t begin, int64_t end, int32_t worker) {
  const backward_task* const task = arg;
  const kda_call* const call = task->call;
  const int64_t heads = call->block->heads, count = call->batch * heads;
  (void)worker;
  for (int64_t slot = begin; slot < end; ++slot) {
    REAL* const scratch = (REAL*)call->head_scratch + slot * kda_backward_head_size(call->block);
    for (int64_t i = slot * count / call->slots; i < (slot + 1) * count / call->slots; ++i)
      head_backward(task, i / heads, i % heads, scratch);
  }
}

/* ---------------------------------------------------------------- the block, backward */

/* The gradients of one projection, from that of its result; it adds to that of its input. */
static graft_status project_backward(const kda_call* call, const kda_gradients* g, int64_t depth,
                                     const REAL* in, int64_t width, int weight, int bias,
                                     const REAL* dout, bool add, REAL* din, graft_error* error) {
  const int64_t n = call->batch * call->tokens;
  graft_status status = GRAFT_OK;
  if (g->dparams[weight] != NULL)
    status = multiply(call, true, false, width, depth, n, dout, in, g->accumulate,
                      g->dparams[weight], error);
  if (bias != NONE && g->dparams[bias] != NULL)
    sum_rows(n, width, dout, width, g->accumulate, g->dparams[bias]);
  if (status == GRAFT_OK && din != NULL)
    status =
        multiply(call, false, false, n, depth, width, dout, call->params[weight], add, din, error);
  return status;
}

/* Norm weight and A_log, from each head's part. */
static void sum_partials(const kda_call* call, const kda_gradients* g) {
  const int64_t heads = call->block->heads, d = call->block->dim;
  const REAL* const partial = g->partial;
  if (g->dparams[PARAM_NORM] != NULL)
    sum_rows(call->batch * heads, d, partial, d + 1, g->accumulate, g->dparams[PARAM_NORM]);
  REAL* const da_log = g->dparams[PARAM_A_LOG];
  for (int64_t h = 0; h < heads && da_log != NULL; ++h) {
    REAL sum = 0;
    for (int64_t b = 0; b < call->batch; ++b) sum += partial[(b * heads + h) * (d + 1) + d];
    da_log[h] = (g->accumulate ? da_log[h] : 0) + sum;
  }
}

graft_status NAME(kda_backward)(const kda_call* call, const kda_gradients* g, graft_error* error) {
  const kda_block* const block = call->block;
  const int64_t n = call->batch * call->tokens, width = block->heads * block->dim;
  const REAL* const x = without_pads(call, call->x, block->model, call->x0);
  const REAL* const dy = without_pads(call, g->dy, block->model, g->dy0);
  kda_find_positions(call);
  rotations(call);
  if (g->dpre_output != NULL && n > 0)
    memcpy(g->dpre, g->dpre_output, (size_t)(n * width) * sizeof(REAL));
  graft_status status = multiply(call, false, false, n, width, block->model, dy,
                                 call->params[PARAM_O], g->dpre_output != NULL, g->dpre, error);
  if (status != GRAFT_OK) return status;
  backward_task task = {call, g};
  for_each(call, call->slots, &task, backward_slots);
  sum_partials(call, g);
  status = project_backward(call, g, width, call->pre, block->model, PARAM_O, PARAM_O_BIAS, dy,
                            false, NULL, error);
  if (g->dx != NULL && n > 0) memset(g->dx, 0, (size_t)(n * block->model) * sizeof(REAL));
  for (int i = N_PROJECTIONS; i-- > 0 && status == GRAFT_OK;) {
    const projection* const p = &projections[i];
    if (kda_width(block, p->out) == 0) continue;
    const int low = low_of(block, p);
    status = project_backward(call, g, low == NONE ? block->model : kda_width(block, low),
                              low == NONE ? x : call->activations[low], kda_width(block, p->out),
                              p->weight, p->bias, g->dactivations[p->out], low == NONE,
                              low == NONE ? g->dx : g->dactivations[low], error);
  }
  return status;
}
