/* The mathematics of a retention block. retnet.c includes this once with REAL float and once with
 * REAL double; NAME() tells the two apart. Each number is computed in one order, whatever the batch
 * and the number of threads. */

/* ---------------------------------------------------------------- matrix products */

typedef struct NAME(product) {
  int64_t n, k, row, column; /* a's element (i, l) is a[i * row + l * column] */
  const REAL *a, *b;
  REAL* c;
} NAME(product);

/* Tiles of b that stay in the cache while all rows of a pass by. */
enum { NAME(TILE) = 64 };

FOR_EACH_CPU static void NAME(product_rows)(const NAME(product) * p, int64_t begin, int64_t end) {
  for (int64_t j = 0; j < p->n; j += NAME(TILE)) {
    const int64_t wide = p->n - j < NAME(TILE) ? p->n - j : NAME(TILE);
    for (int64_t l = 0; l < p->k; l += NAME(TILE)) {
      const int64_t deep = p->k - l < NAME(TILE) ? p->k - l : NAME(TILE);
      for (int64_t i = begin; i < end; ++i) {
        REAL* const c = p->c + i * p->n + j;
        for (int64_t m = l; m < l + deep; ++m) {
          const REAL a = p->a[i * p->row + m * p->column];
          const REAL* const b = p->b + m * p->n + j;
#pragma omp simd
          for (int64_t at = 0; at < wide; ++at) c[at] += a * b[at];
        }
      }
    }
  }
}

static void GRAFT_CALL NAME(product_task)(void* arg, int64_t begin, int64_t end, int32_t worker) {
  (void)worker;
  NAME(product_rows)(arg, begin, end);
}

/* c [m,n] (+)= op(a) b with op(a) [m,k] and b [k,n]. */
static void NAME(multiply)(const call* c, bool transpose_a, int64_t m, int64_t n, int64_t k,
                           const REAL* a, const REAL* b, bool add, REAL* to) {
  NAME(product) p = {n, k, transpose_a ? 1 : k, transpose_a ? m : 1, a, b, to};
  if (!add && m * n > 0) memset(to, 0, (size_t)(m * n) * sizeof(REAL));
  in_parallel(c, m, 16, &p, NAME(product_task));
}

/* to [rows,width] = in [rows,depth] weight [width,depth]^T. */
static void NAME(project)(const call* c, int64_t depth, const REAL* in, int64_t width,
                          const REAL* weight, REAL* to) {
  REAL* const transposed = c->transposed;
  for (int64_t i = 0; i < width; ++i) {
    for (int64_t j = 0; j < depth; ++j) transposed[j * width + i] = weight[i * depth + j];
  }
  NAME(multiply)(c, false, c->batch * c->tokens, width, depth, in, transposed, false, to);
}

/* ---------------------------------------------------------------- rotation */

/* Every head of a row of queries or keys, turned by its position (back, with direction -1) and
 * scaled. */
static void NAME(rotate)(const call* c, int64_t at, double direction, double scale, REAL* row) {
  const block* const o = c->block;
  for (int64_t i = 0; i < o->heads * o->dim; ++i) row[i] *= (REAL)scale;
  for (int32_t i = 0; i < o->pairs; ++i) {
    const double angle = (double)c->position[at] * o->inv_freq[i];
    const REAL cosine = (REAL)cos(angle), sine = (REAL)(direction * sin(angle));
    for (REAL* u = row + i; u < row + o->heads * o->dim; u += o->dim) {
      const REAL a = u[0], b = u[o->pairs];
      u[0] = a * cosine - b * sine;
      u[o->pairs] = b * cosine + a * sine;
    }
  }
}

/* ---------------------------------------------------------------- norm and gate */

static REAL NAME(sigmoid)(REAL z) { return 1 / (1 + exp(-z)); }

static REAL NAME(inverse_rms)(const block* b, const REAL* o) {
  REAL square = 0;
  for (int64_t j = 0; j < b->dim; ++j) square += o[j] * o[j];
  return 1 / sqrt(square / (REAL)b->dim + (REAL)b->norm_eps);
}

/* pre = o / rms(o) * weight * silu(gate). */
static void NAME(gated_norm)(const call* c, const REAL* o, const REAL* gate, REAL* pre) {
  const REAL *const weight = c->params[PARAM_NORM], inverse = NAME(inverse_rms)(c->block, o);
  for (int64_t j = 0; j < c->block->dim; ++j)
    pre[j] = o[j] * inverse * weight[j] * gate[j] * NAME(sigmoid)(gate[j]);
}

/* Writes dgate and dout, adds to dweight. */
static void NAME(gated_norm_backward)(const call* c, const REAL* o, const REAL* gate,
                                      const REAL* dpre, REAL* dgate, REAL* dweight, REAL* dout) {
  const int64_t d = c->block->dim;
  const REAL *const weight = c->params[PARAM_NORM], inverse = NAME(inverse_rms)(c->block, o);
  REAL inner = 0;
  for (int64_t j = 0; j < d; ++j) {
    const REAL s = NAME(sigmoid)(gate[j]), normed = o[j] * inverse;
    dgate[j] = dpre[j] * normed * weight[j] * s * (1 + gate[j] * (1 - s));
    dweight[j] += dpre[j] * normed * gate[j] * s;
    dout[j] = dpre[j] * weight[j] * gate[j] * s;
    inner += dout[j] * normed;
  }
  for (int64_t j = 0; j < d; ++j) dout[j] = inverse * (dout[j] - o[j] * inverse * inner / (REAL)d);
}

/* ---------------------------------------------------------------- one head */

/* S = gamma S + k v^T; where o is wanted, o = S^T q. */
INLINE void NAME(advance)(int64_t d, REAL gamma, const REAL* q, const REAL* k, const REAL* v,
                          REAL* state, REAL* o) {
  memset(o, 0, (size_t)d * sizeof(REAL));
  for (int64_t i = 0; i < d; ++i) {
    REAL* const s = state + i * d;
#pragma omp simd
    for (int64_t j = 0; j < d; ++j) {
      s[j] = gamma * s[j] + k[i] * v[j];
      o[j] += q[i] * s[j];
    }
  }
}

static void NAME(start)(const call* c, int64_t head, const void* from, REAL* state) {
  const size_t count = (size_t)(c->block->dim * c->block->dim);
  memset(state, 0, count * sizeof(REAL));
  if (from != NULL) memcpy(state, (const REAL*)from + (size_t)head * count, count * sizeof(REAL));
}

FOR_EACH_CPU static void NAME(head_forward)(const call* c, int64_t b, int64_t h, REAL* state) {
  const int64_t d = c->block->dim, heads = c->block->heads;
  const REAL gamma = (REAL)decay_of(h);
  NAME(start)(c, b * heads + h, c->state_in, state);
  for (int64_t at = b * c->tokens; at < (b + 1) * c->tokens; ++at) {
    const int64_t row = (at * heads + h) * d;
    REAL *const o = (REAL*)c->kept[KEPT_HEAD] + row, *const pre = (REAL*)c->pre + row;
    memset(o, 0, (size_t)d * sizeof(REAL));
    memset(pre, 0, (size_t)d * sizeof(REAL));
    if (c->log_decay != NULL)
      ((REAL*)c->log_decay)[at * heads + h] = is_real(c, at) ? log(gamma) : 0;
    if (!is_real(c, at)) continue;
    NAME(advance)
    (d, gamma, (const REAL*)c->kept[KEPT_Q] + row, (const REAL*)c->kept[KEPT_K] + row,
     (const REAL*)c->kept[KEPT_V] + row, state, o);
    if (wants_gate(c)) NAME(gated_norm)(c, o, (const REAL*)c->kept[KEPT_GATE] + row, pre);
  }
  if (c->state_out != NULL)
    memcpy((REAL*)c->state_out + (b * heads + h) * d * d, state, (size_t)(d * d) * sizeof(REAL));
}

/* Gradients of a head's queries, keys, values and gates. The first sweep has the states, which
 * queries need; the second goes back with the state's gradient, which keys and values need. So no
 * state is kept. */
FOR_EACH_CPU static void NAME(head_backward)(const call* c, int64_t b, int64_t h, REAL* state) {
  const gradients* const g = c->gradients;
  const int64_t d = c->block->dim, heads = c->block->heads, first = b * c->tokens;
  const REAL gamma = (REAL)decay_of(h);
  REAL *const output = state + d * d, *const dweight = (REAL*)g->partial + (b * heads + h) * d;
  memset(dweight, 0, (size_t)d * sizeof(REAL));
  NAME(start)(c, b * heads + h, c->state_in, state);
  for (int64_t at = first; at < first + c->tokens; ++at) {
    const int64_t row = (at * heads + h) * d;
    for (int i = 0; i < N_KEPT; ++i) memset((REAL*)g->kept[i] + row, 0, (size_t)d * sizeof(REAL));
    REAL *const pre = (REAL*)c->pre + row, *const doutput = (REAL*)g->kept[KEPT_HEAD] + row;
    memset(pre, 0, (size_t)d * sizeof(REAL));
    if (!is_real(c, at)) continue;
    const REAL *const o = (const REAL*)c->kept[KEPT_HEAD] + row, *const gate =
                                                                     (const REAL*)
                                                                         c->kept[KEPT_GATE] +
                                                                     row;
    NAME(gated_norm)(c, o, gate, pre);
    NAME(gated_norm_backward)
    (c, o, gate, (const REAL*)g->dpre + row, (REAL*)g->kept[KEPT_GATE] + row, dweight, doutput);
    for (int64_t j = 0; j < d && g->dhead_output != NULL; ++j)
      doutput[j] += ((const REAL*)g->dhead_output)[row + j];
    NAME(advance)
    (d, gamma, (const REAL*)c->kept[KEPT_Q] + row, (const REAL*)c->kept[KEPT_K] + row,
     (const REAL*)c->kept[KEPT_V] + row, state, output);
    for (int64_t i = 0; i < d; ++i) {
      REAL sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < d; ++j) sum += state[i * d + j] * doutput[j];
      ((REAL*)g->kept[KEPT_Q])[row + i] = sum;
    }
  }
  REAL* const dstate = state;
  NAME(start)(c, b * heads + h, g->dstate_out, dstate);
  for (int64_t at = first + c->tokens; at-- > first;) {
    const int64_t row = (at * heads + h) * d;
    if (!is_real(c, at)) continue;
    const REAL *const q = (const REAL*)c->kept[KEPT_Q] + row,
                      *const k = (const REAL*)c->kept[KEPT_K] + row,
                      *const v = (const REAL*)c->kept[KEPT_V] + row,
                      *const doutput = (const REAL*)g->kept[KEPT_HEAD] + row;
    REAL* const dv = (REAL*)g->kept[KEPT_V] + row;
    for (int64_t i = 0; i < d; ++i) {
      REAL* const ds = dstate + i * d;
      REAL dk = 0;
#pragma omp simd reduction(+ : dk)
      for (int64_t j = 0; j < d; ++j) {
        ds[j] += q[i] * doutput[j];
        dk += ds[j] * v[j];
        dv[j] += k[i] * ds[j];
        ds[j] *= gamma;
      }
      ((REAL*)g->kept[KEPT_K])[row + i] = dk;
    }
  }
  if (g->dstate_in != NULL)
    memcpy((REAL*)g->dstate_in + (b * heads + h) * d * d, dstate, (size_t)(d * d) * sizeof(REAL));
}

/* Piece i of the scratch memory serves its share of the heads, one after the other. */
static void GRAFT_CALL NAME(head_task)(void* arg, int64_t begin, int64_t end, int32_t worker) {
  const call* const c = arg;
  const int64_t heads = c->block->heads, count = c->batch * heads;
  (void)worker;
  for (int64_t slot = begin; slot < end; ++slot) {
    REAL* const scratch = (REAL*)c->head_scratch + slot * head_scratch_size(c->block);
    for (int64_t i = slot * count / c->slots; i < (slot + 1) * count / c->slots; ++i) {
      if (c->gradients == NULL) {
        NAME(head_forward)(c, i / heads, i % heads, scratch);
      } else {
        NAME(head_backward)(c, i / heads, i % heads, scratch);
      }
    }
  }
}

/* ---------------------------------------------------------------- the block */

/* `from` [B,T,model], or a copy in `copy` whose padded rows are 0: what stands there may be NaN. */
static const REAL* NAME(without_pads)(const call* c, const void* from, void* copy) {
  const size_t bytes = (size_t)c->block->model * sizeof(REAL);
  if (c->real == NULL) return from;
  for (int64_t at = 0; at < c->batch * c->tokens; ++at) {
    memset((char*)copy + (size_t)at * bytes, 0, bytes);
    if (is_real(c, at))
      memcpy((char*)copy + (size_t)at * bytes, (const char*)from + (size_t)at * bytes, bytes);
  }
  return copy;
}

static void NAME(retention_forward)(call* c) {
  const block* const o = c->block;
  const int64_t n = c->batch * c->tokens, width = o->heads * o->dim;
  const REAL* const x = NAME(without_pads)(c, c->x, c->x0);
  for (int i = 0; i < N_PROJECTED; ++i) {
    if (i == KEPT_GATE && !wants_gate(c)) continue;
    NAME(project)(c, o->model, x, width, c->params[i], c->kept[i]);
  }
  for (int64_t at = 0; at < n; ++at) {
    NAME(rotate)(c, at, 1, 1, (REAL*)c->kept[KEPT_Q] + at * width);
    NAME(rotate)(c, at, 1, 1 / sqrt((double)o->dim), (REAL*)c->kept[KEPT_K] + at * width);
  }
  in_parallel(c, c->slots, 1, c, NAME(head_task));
  if (n == 0) return;
  if (c->head_output != NULL)
    memcpy(c->head_output, c->kept[KEPT_HEAD], (size_t)(n * width) * sizeof(REAL));
  if (c->pre_output != NULL) memcpy(c->pre_output, c->pre, (size_t)(n * width) * sizeof(REAL));
  if (c->y != NULL) NAME(project)(c, width, c->pre, o->model, c->params[PARAM_O], c->y);
}

static void NAME(retention_backward)(call* c) {
  const block* const o = c->block;
  const gradients* const g = c->gradients;
  const int64_t n = c->batch * c->tokens, width = o->heads * o->dim;
  const REAL* const x = NAME(without_pads)(c, c->x, c->x0);
  const REAL* const dy = NAME(without_pads)(c, g->dy, g->dy0);
  if (g->dpre_output != NULL && n > 0)
    memcpy(g->dpre, g->dpre_output, (size_t)(n * width) * sizeof(REAL));
  NAME(multiply)
  (c, false, n, width, o->model, dy, c->params[PARAM_O], g->dpre_output != NULL, g->dpre);
  in_parallel(c, c->slots, 1, c, NAME(head_task));
  for (int64_t at = 0; at < n; ++at) {
    NAME(rotate)(c, at, -1, 1, (REAL*)g->kept[KEPT_Q] + at * width);
    NAME(rotate)(c, at, -1, 1 / sqrt((double)o->dim), (REAL*)g->kept[KEPT_K] + at * width);
  }
  REAL* const dweight = g->dparams[PARAM_NORM];
  for (int64_t j = 0; j < o->dim && dweight != NULL; ++j) {
    REAL sum = 0;
    for (int64_t i = 0; i < c->batch * o->heads; ++i)
      sum += ((const REAL*)g->partial)[i * o->dim + j];
    dweight[j] = (g->accumulate ? dweight[j] : 0) + sum;
  }
  if (g->dparams[PARAM_O] != NULL)
    NAME(multiply)(c, true, o->model, width, n, dy, c->pre, g->accumulate, g->dparams[PARAM_O]);
  for (int i = 0; i < N_PROJECTED; ++i) {
    if (g->dparams[i] != NULL)
      NAME(multiply)(c, true, width, o->model, n, g->kept[i], x, g->accumulate, g->dparams[i]);
    if (g->dx != NULL)
      NAME(multiply)(c, false, n, o->model, width, g->kept[i], c->params[i], i > 0, g->dx);
  }
}
