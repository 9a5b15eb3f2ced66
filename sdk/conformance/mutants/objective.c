/* A healthy objective to make mutants of: the mean squared error between the output of a converted
 * block and the teacher's, over the tokens that count. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>

#define PLUGIN_ID "org.graft.conformance.objective-library"
#include "library.h"

enum { STUDENT, TEACHER, MASK, N_SIGNALS };

static const graft_signal_need needs[N_SIGNALS] = {
    {.name = GRAFT_SIGNAL_STUDENT_HIDDEN, .flags = GRAFT_NEED_REQUIRED | GRAFT_NEED_GRAD},
    {.name = GRAFT_SIGNAL_TEACHER_HIDDEN, .flags = GRAFT_NEED_REQUIRED},
    {.name = GRAFT_SIGNAL_LOSS_MASK},
};

/* ---------------------------------------------------------------- checks */

/* The student's tensor gives the call its sizes: [..., model]. */
static graft_status expect_student(graft_error* error, const DLTensor* student) {
  const char* const where = "tensor:" GRAFT_SIGNAL_STUDENT_HIDDEN;
  if (student == NULL || student->ndim < 1) {
    return fail(error, GRAFT_INVALID_ARGUMENT, where, "expected [...,model], got %s",
                student == NULL ? "NULL" : "a scalar");
  }
  if (!is_real_dtype(student->dtype)) {
    return fail(error, GRAFT_INVALID_ARGUMENT, where,
                "expected float32 or float64, got dtype code %d of %d bits", student->dtype.code,
                student->dtype.bits);
  }
  return expect(error, where, student, student->dtype, student->ndim, student->shape);
}

static graft_status expect_args(graft_error* error, const graft_objective_args* args) {
  if (args->n_signals != N_SIGNALS) {
    return fail(error, GRAFT_INVALID_ARGUMENT, "signals", "expected %d signals, got %u", N_SIGNALS,
                args->n_signals);
  }
  const DLTensor* const student = args->signals[STUDENT];
  TRY(expect_student(error, student));
  TRY(expect(error, "tensor:" GRAFT_SIGNAL_TEACHER_HIDDEN, args->signals[TEACHER], student->dtype,
             student->ndim, student->shape));
  if (args->signals[MASK] != NULL) {
    TRY(expect(error, "tensor:" GRAFT_SIGNAL_LOSS_MASK, args->signals[MASK], kUint8,
               student->ndim - 1, student->shape));
  }
  if (args->grads != NULL && args->grads[STUDENT] != NULL) {
    TRY(expect(error, "grad:" GRAFT_SIGNAL_STUDENT_HIDDEN, args->grads[STUDENT], student->dtype,
               student->ndim, student->shape));
  }
  if (args->loss == NULL || count_of(args->loss) != 1 || !is_real_dtype(args->loss->dtype))
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:loss", "expected one float32");
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- the loss */

static bool counts(const DLTensor* mask, int64_t token) {
  return mask == NULL || ((const uint8_t*)mask->data)[token] != 0;
}

static int64_t tokens_that_count(const DLTensor* mask, int64_t tokens) {
  int64_t n = 0;
  for (int64_t token = 0; token < tokens; ++token) n += counts(mask, token) ? 1 : 0;
  return MUTANT_IS(ALL_TOKENS) ? tokens : n;
}

static void report_weight(const graft_objective_args* args, int64_t tokens) {
  double weight = (double)tokens;
  const DLTensor scalar = {.data = &weight, .device = {kDLCPU, 0}, .dtype = kFloat64};
  if (args->metric != NULL) args->metric(args->metric_ctx, GRAFT_METRIC_WEIGHT, &scalar);
}

/* Student minus teacher; nothing at all is read of a token that does not count. */
static double difference_at(const graft_objective_args* args, int64_t i, bool real) {
  if (!real && !MUTANT_IS(MASKED_GRADIENT) && !MUTANT_IS(TIMES_MASK)) return 0;
  const double difference = get(args->signals[STUDENT], i) - get(args->signals[TEACHER], i);
  return MUTANT_IS(TIMES_MASK) && !real ? difference * 0 : difference;
}

/* The squared error of one token; its gradient is `factor` times the difference. */
static double token_error(const graft_objective_args* args, int64_t token, int64_t model,
                          double factor) {
  DLTensor* const grad = args->grads == NULL ? NULL : args->grads[STUDENT];
  const bool real = counts(args->signals[MASK], token);
  double sum = 0;
  for (int64_t i = token * model; i < (token + 1) * model; ++i) {
    const double difference = difference_at(args, i, real);
    if (real || MUTANT_IS(TIMES_MASK)) sum += difference * difference;
    if (grad != NULL) put(grad, i, factor * difference);
  }
  return sum;
}

static graft_status GRAFT_CALL run(graft_objective* base, const graft_exec* exec,
                                   const graft_objective_args* args, graft_error* error) {
  (void)base;
  (void)exec;
  TRY(expect_args(error, args));
  const DLTensor* const student = args->signals[STUDENT];
  const int64_t model = student->shape[student->ndim - 1];
  const int64_t tokens = model == 0 ? 0 : count_of(student) / model;
  const int64_t n = tokens_that_count(args->signals[MASK], tokens);
  const double share = n == 0 && !MUTANT_IS(EMPTY_BATCH) ? 0 : 1 / ((double)n * (double)model);
  const double factor = (MUTANT_IS(HALF_GRADIENT) ? 1 : 2) * share *
                        (MUTANT_IS(NO_GRAD_SCALE) ? 1 : args->grad_scale);
  double sum = 0;
  for (int64_t token = 0; token < tokens; ++token) sum += token_error(args, token, model, factor);
  put(args->loss, 0, sum * share);
  report_weight(args, MUTANT_IS(WRONG_WEIGHT) ? tokens : n);
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- the component */

static void GRAFT_CALL destroy(graft_objective* base) { free(base); }

static const void* GRAFT_CALL objective_extension(graft_objective* base, const char* id) {
  (void)base;
  (void)id;
  return NULL;
}

static const graft_objective_vtbl table = {
    .struct_size = sizeof(graft_objective_vtbl),
    .n_needs = N_SIGNALS,
    .needs = needs,
    .destroy = destroy,
    .run = run,
    .get_extension = objective_extension,
};

static const DLDataType dtypes[] = {{kDLFloat, 32, 1}, {kDLFloat, 64, 1}};
static const DLDeviceType devices[] = {kDLCPU};

static const graft_desc description = {
    .struct_size = sizeof(graft_desc),
    .id = "org.graft.conformance.objective",
    .alias = "healthy_objective",
    .name = "Mean squared error",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .citation = "",
    .description = "What the mutants of an objective are made of.",
    .caps = GRAFT_CAP_PAD_MASK | GRAFT_CAP_DETERMINISTIC,
    .dtypes = dtypes,
    .devices = devices,
    .n_dtypes = 2,
    .n_devices = 1,
};
static const graft_desc* const descriptions[] = {&description};

static graft_status GRAFT_CALL create(const char* id, const graft_config* config,
                                      graft_objective** out, graft_error* error) {
  (void)config;
  TRY(expect_init(error));
  if (strcmp(id, description.id) != 0)
    return fail(error, GRAFT_NOT_FOUND, "id", "expected %s, got %s", description.id, id);
  graft_objective* const self = malloc(sizeof *self);
  if (self == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  *self = (graft_objective){.v = &table};
  *out = self;
  return GRAFT_OK;
}

static const graft_objective_factory factory = {
    .struct_size = sizeof(graft_objective_factory),
    .count = 1,
    .descs = descriptions,
    .create = create,
};

static const void* GRAFT_CALL library_extension(const char* id) {
  return id != NULL && strcmp(id, GRAFT_EXT_OBJECTIVE_FACTORY) == 0 ? &factory : NULL;
}
