/* A healthy initializer to make mutants of: copies the teacher's projections, and gives a key-value
 * head of the teacher to each head of the student that reads it. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>

#define PLUGIN_ID "org.graft.conformance.initializer-library"
#include "library.h"

enum { N_ROLES = 4 };
static const char* const roles[N_ROLES] = {GRAFT_ROLE_QUERY, GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE,
                                           GRAFT_ROLE_OUTPUT};
#define OF_TEACHER (GRAFT_NEED_TEACHER | GRAFT_NEED_REQUIRED)
#define OF_MIXER GRAFT_NEED_REQUIRED
static const graft_role_need needs[] = {
    {GRAFT_ROLE_QUERY, OF_TEACHER, 0}, {GRAFT_ROLE_KEY, OF_TEACHER, 0},
    {GRAFT_ROLE_VALUE, OF_TEACHER, 0}, {GRAFT_ROLE_OUTPUT, OF_TEACHER, 0},
    {GRAFT_ROLE_QUERY, OF_MIXER, 0},   {GRAFT_ROLE_KEY, OF_MIXER, 0},
    {GRAFT_ROLE_VALUE, OF_MIXER, 0},   {GRAFT_ROLE_OUTPUT, OF_MIXER, 0},
};
enum { N_NEEDS = sizeof needs / sizeof needs[0] };

/* ---------------------------------------------------------------- one parameter */

/* Heads lie on one axis: the rows of a projection into heads, the columns of one out of them. */
static int head_axis(const char* role) { return strcmp(role, GRAFT_ROLE_OUTPUT) == 0 ? 1 : 0; }

static graft_status expect_pair(graft_error* error, const graft_named_tensor* from,
                                const graft_named_tensor* to) {
  char where[128];
  snprintf(where, sizeof where, "param:%s", to->name);
  const DLTensor *const a = from->tensor, *const b = to->tensor;
  TRY(expect(error, where, a, kFloat32, 2, a->shape));
  TRY(expect(error, where, b, kFloat32, 2, b->shape));
  const int axis = head_axis(to->role);
  const bool fits = from->heads > 0 && to->heads > 0 && to->heads % from->heads == 0 &&
                    a->shape[1 - axis] == b->shape[1 - axis] &&
                    a->shape[axis] * to->heads == b->shape[axis] * from->heads &&
                    b->shape[axis] % to->heads == 0;
  if (fits) return GRAFT_OK;
  char have[96], want[96];
  return fail(
      error, GRAFT_FAILED_PRECONDITION, where,
      "expected heads of the teacher's size and a multiple of their number: the teacher has "
      "%s in %d heads, the student %s in %d",
      shape_text(have, sizeof have, 2, a->shape), from->heads,
      shape_text(want, sizeof want, 2, b->shape), to->heads);
}

/* Which head of the teacher goes to head `h` of the student. */
static int64_t source_head(const graft_named_tensor* from, const graft_named_tensor* to,
                           int64_t h) {
  if (MUTANT_IS(WRONG_GROUPS)) return h % from->heads;
  return h * from->heads / to->heads;
}

static void copy_heads(const graft_named_tensor* from, const graft_named_tensor* to) {
  const int axis = head_axis(to->role);
  const int64_t rows = to->tensor->shape[0], columns = to->tensor->shape[1];
  const int64_t source_columns = from->tensor->shape[1];
  const int64_t dim = to->tensor->shape[axis] / to->heads;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t at = axis == 0 ? i : j;
      const int64_t source = source_head(from, to, at / dim) * dim + at % dim;
      const int64_t k = axis == 0 ? source * source_columns + j : i * source_columns + source;
      const double noise = MUTANT_IS(RANDOM_NUMBERS) ? 1e-3 * rand() / RAND_MAX : 0;
      put(to->tensor, i * columns + j, get(from->tensor, k) + noise);
    }
  }
  if (MUTANT_IS(PAST_PARAMETER)) put(to->tensor, rows * columns, 0);
}

/* ---------------------------------------------------------------- a run */

static const graft_named_tensor* find_role(const graft_named_tensor* const* tensors, uint32_t n,
                                           const char* role) {
  for (uint32_t i = 0; i < n; ++i) {
    if (tensors[i]->role != NULL && strcmp(tensors[i]->role, role) == 0) return tensors[i];
  }
  return NULL;
}

static graft_status copy_role(const graft_init_args* args, const char* role, graft_error* error) {
  const graft_named_tensor* const from = find_role(args->teacher, args->n_teacher, role);
  if (from == NULL && MUTANT_IS(SILENT_ABOUT_ROLE)) return GRAFT_OK;
  if (from == NULL)
    return fail(error, GRAFT_NOT_FOUND, role, "the teacher has no parameter of role %s", role);
  if (find_role(args->student, args->n_student, role) == NULL)
    return fail(error, GRAFT_NOT_FOUND, role, "the student has no parameter of role %s", role);
  for (uint32_t i = 0; i < args->n_student; ++i) {
    const graft_named_tensor* const to = args->student[i];
    if (to->role == NULL || strcmp(to->role, role) != 0) continue;
    TRY(expect_pair(error, from, to));
    args->student_written[i] = 1;
    if (MUTANT_IS(MARKS_TOO_MUCH) && strcmp(role, GRAFT_ROLE_VALUE) == 0) continue;
    copy_heads(from, to);
  }
  return GRAFT_OK;
}

static graft_status GRAFT_CALL run(graft_initializer* base, const graft_exec* exec,
                                   const graft_init_args* args, graft_error* error) {
  (void)base;
  (void)exec;
  for (int i = 0; i < N_ROLES; ++i) TRY(copy_role(args, roles[i], error));
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- the component */

static void GRAFT_CALL destroy(graft_initializer* base) { free(base); }

static const void* GRAFT_CALL initializer_extension(graft_initializer* base, const char* id) {
  (void)base;
  (void)id;
  return NULL;
}

static const graft_initializer_vtbl table = {
    .struct_size = sizeof(graft_initializer_vtbl),
    .n_needs = N_NEEDS,
    .needs = needs,
    .destroy = destroy,
    .run = run,
    .get_extension = initializer_extension,
};

static const DLDataType dtypes[] = {{kDLFloat, 32, 1}};
static const DLDeviceType devices[] = {kDLCPU};

static const graft_desc description = {
    .struct_size = sizeof(graft_desc),
    .id = "org.graft.conformance.initializer",
    .alias = "healthy_initializer",
    .name = "Copy of the projections",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .citation = "",
    .description = "What the mutants of an initializer are made of.",
    .dtypes = dtypes,
    .devices = devices,
    .n_dtypes = 1,
    .n_devices = 1,
};
static const graft_desc* const descriptions[] = {&description};

static graft_status GRAFT_CALL create(const char* id, const graft_config* config,
                                      graft_initializer** out, graft_error* error) {
  (void)config;
  TRY(expect_init(error));
  if (strcmp(id, description.id) != 0)
    return fail(error, GRAFT_NOT_FOUND, "id", "expected %s, got %s", description.id, id);
  graft_initializer* const self = malloc(sizeof *self);
  if (self == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  *self = (graft_initializer){.v = &table};
  *out = self;
  return GRAFT_OK;
}

static const graft_initializer_factory factory = {
    .struct_size = sizeof(graft_initializer_factory),
    .count = 1,
    .descs = descriptions,
    .create = create,
};

static const void* GRAFT_CALL library_extension(const char* id) {
  return id != NULL && strcmp(id, GRAFT_EXT_INITIALIZER_FACTORY) == 0 ? &factory : NULL;
}
