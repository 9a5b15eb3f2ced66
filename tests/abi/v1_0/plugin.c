/* A plugin as an author of ABI 1.0 wrote it: never edited, compiled with the header beside it and
 * loaded by today's host (v1_0_test.cpp). It has one component of each kind and uses every
 * service of the host. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graft/graft.h"

#define ROLE_WEIGHT "org.example.role.weight"

static const graft_host* host_; /* of the first init until the last deinit */
static int inits;

static graft_status fail(graft_error* error, graft_status code, const char* where,
                         const char* message) {
  if (error != NULL && GRAFT_HAS(graft_error, error, message)) {
    error->code = code;
    snprintf(error->where, sizeof error->where, "%s", where);
    snprintf(error->message, sizeof error->message, "%s", message);
  }
  return code;
}

static const void* service(const char* id) { return host_->get_extension(host_, id); }

static int64_t numel(const DLTensor* tensor) {
  int64_t n = 1;
  for (int32_t axis = 0; axis < tensor->ndim; ++axis) n *= tensor->shape[axis];
  return n;
}

static float* floats(const DLTensor* tensor) { return (float*)tensor->data; }

/* ---------------------------------------------------------------- mixer */

/* s_t = keep s_{t-1} + x_t,  y_t = weight s_t, each channel by itself. */
typedef struct mixer {
  graft_mixer base;
  double keep;
  int64_t width;
  graft_param_spec weight;
  graft_tensor_spec saved, state, tap;
  const graft_param_spec* params[1];
  const graft_tensor_spec *saved_list[1], *state_list[1], *tap_list[1];
} mixer;

static mixer* mixer_of(graft_mixer* handle) { return (mixer*)handle->self; }

static void mixer_destroy(graft_mixer* handle) { free(mixer_of(handle)); }

static graft_status mixer_param_specs(graft_mixer* handle, const graft_param_spec* const** specs,
                                      uint32_t* n, graft_error* error) {
  (void)error;
  *specs = mixer_of(handle)->params;
  *n = 1;
  return GRAFT_OK;
}

static graft_tensor_spec tensor_spec(const char* name, const char* axes, int32_t ndim, int64_t a,
                                     int64_t b, int64_t c) {
  graft_tensor_spec spec = {.struct_size = sizeof spec, .name = name, .axes = axes, .ndim = ndim};
  spec.shape[0] = a, spec.shape[1] = b, spec.shape[2] = c;
  spec.dtype = (DLDataType){kDLFloat, 32, 1};
  return spec;
}

static graft_status mixer_plan(graft_mixer* handle, const graft_plan_in* in, graft_plan_out* out,
                               graft_error* error) {
  mixer* self = mixer_of(handle);
  if (in->dtype.code != kDLFloat || in->dtype.bits != 32 || in->device_type != kDLCPU)
    return fail(error, GRAFT_UNIMPLEMENTED, "plan", "only float32 on the CPU");
  self->saved = tensor_spec("sums", "batch,tokens,model", 3, in->batch, in->tokens, self->width);
  self->tap = self->saved;
  self->tap.name = "org.example.sums";
  self->state = tensor_spec("sum", "batch,model", 2, in->batch, self->width, 0);
  out->n_saved = (in->flags & GRAFT_X_TRAINING) != 0;
  out->saved = self->saved_list;
  out->n_state = out->n_taps = 1;
  out->state = self->state_list;
  out->taps = self->tap_list;
  out->workspace_forward = out->workspace_backward = out->workspace_step =
      (uint64_t)(in->batch * self->width) * sizeof(float);
  return GRAFT_OK;
}

typedef struct forward_job {
  const mixer* self;
  const graft_mixer_forward* call;
  float* sums; /* [B,model] */
} forward_job;

static void forward_row(const forward_job* job, int64_t row) {
  const graft_mixer_forward* call = job->call;
  const int64_t tokens = call->x->shape[1], width = job->self->width;
  const float* weight = floats(call->params[0]);
  float* sum = job->sums + row * width;
  for (int64_t d = 0; d < width; ++d)
    sum[d] = call->state_in != NULL ? floats(call->state_in[0])[row * width + d] : 0.0F;
  for (int64_t t = 0; t < tokens; ++t) {
    const int real =
        call->pad_mask == NULL || ((const uint8_t*)call->pad_mask->data)[row * tokens + t] != 0;
    for (int64_t d = 0; d < width; ++d) {
      const int64_t at = (row * tokens + t) * width + d;
      if (real) sum[d] = (float)(job->self->keep * sum[d]) + floats(call->x)[at];
      floats(call->y)[at] = real ? weight[d] * sum[d] : 0.0F;
      if (call->saved != NULL) floats(call->saved[0])[at] = real ? sum[d] : 0.0F;
      if (call->taps != NULL && call->taps[0] != NULL)
        floats(call->taps[0])[at] = real ? sum[d] : 0.0F;
    }
  }
  if (call->state_out == NULL) return;
  for (int64_t d = 0; d < width; ++d) floats(call->state_out[0])[row * width + d] = sum[d];
}

static void GRAFT_CALL forward_rows(void* arg, int64_t begin, int64_t end, int32_t worker) {
  (void)worker;
  for (int64_t row = begin; row < end; ++row) forward_row((const forward_job*)arg, row);
}

static graft_status mixer_forward(graft_mixer* handle, const graft_exec* exec,
                                  const graft_mixer_forward* call, graft_error* error) {
  const mixer* self = mixer_of(handle);
  if (call->x == NULL || call->x->ndim != 3 || call->x->shape[2] != self->width)
    return fail(error, GRAFT_INVALID_ARGUMENT, "tensor:x", "expected [B,T,model]");
  if (call->n_params != 1 || call->n_state != 1 || call->n_taps != 1)
    return fail(error, GRAFT_INVALID_ARGUMENT, "params", "the counts are not the plan's");
  forward_job job = {self, call, (float*)exec->workspace};
  const graft_host_parallel* pool = service(GRAFT_HOST_EXT_PARALLEL);
  if (pool == NULL || pool->num_threads(host_) < 1)
    forward_rows(&job, 0, call->x->shape[0], 0);
  else
    pool->parallel_for(host_, 0, call->x->shape[0], 1, forward_rows, &job);
  return GRAFT_OK;
}

static graft_status mixer_backward(graft_mixer* handle, const graft_exec* exec,
                                   const graft_mixer_backward* call, graft_error* error) {
  const mixer* self = mixer_of(handle);
  const graft_mixer_forward* fwd = call->fwd;
  const int64_t batch = fwd->x->shape[0], tokens = fwd->x->shape[1], width = self->width;
  float* dsum = (float*)exec->workspace;
  float* dweight =
      call->dparams != NULL && call->dparams[0] != NULL ? floats(call->dparams[0]) : NULL;
  if (fwd->saved == NULL || fwd->n_saved != 1)
    return fail(error, GRAFT_FAILED_PRECONDITION, "saved", "there was no training forward");
  if (dweight != NULL && (exec->flags & GRAFT_X_ACCUMULATE) == 0)
    memset(dweight, 0, (size_t)width * sizeof(float));
  for (int64_t row = 0; row < batch; ++row) {
    memset(dsum, 0, (size_t)width * sizeof(float));
    for (int64_t t = tokens; t-- > 0;) {
      const int real =
          fwd->pad_mask == NULL || ((const uint8_t*)fwd->pad_mask->data)[row * tokens + t] != 0;
      for (int64_t d = 0; d < width; ++d) {
        const int64_t at = (row * tokens + t) * width + d;
        if (real) {
          dsum[d] += floats(call->dy)[at] * floats(fwd->params[0])[d];
          if (dweight != NULL) dweight[d] += floats(call->dy)[at] * floats(fwd->saved[0])[at];
        }
        if (call->dx != NULL) floats(call->dx)[at] = real ? dsum[d] : 0.0F;
        if (real) dsum[d] *= (float)self->keep;
      }
    }
  }
  return GRAFT_OK;
}

/* Schema 1 had one number for all channels. */
static graft_status mixer_migrate(graft_mixer* handle, uint32_t old_schema, uint32_t n_old,
                                  const char* const* old_names, const DLTensor* const* old_params,
                                  DLTensor* const* params, graft_error* error) {
  const mixer* self = mixer_of(handle);
  if (old_schema != 1)
    return fail(error, GRAFT_UNIMPLEMENTED, "param_schema", "only 1 can be read");
  for (uint32_t i = 0; i < n_old; ++i) {
    if (strcmp(old_names[i], "scale") != 0) continue;
    for (int64_t d = 0; d < self->width; ++d) floats(params[0])[d] = floats(old_params[i])[0];
    return GRAFT_OK;
  }
  return fail(error, GRAFT_DATA_LOSS, "param:scale", "is missing");
}

static graft_status mixer_set(graft_mixer* handle, const char* what, uint32_t n,
                              const double* values, DLTensor* const* params, uint8_t* written,
                              graft_error* error) {
  const mixer* self = mixer_of(handle);
  if (strcmp(what, GRAFT_NATURAL_OUTPUT_GATE) != 0)
    return fail(error, GRAFT_UNIMPLEMENTED, what, "this mixer has no such quantity");
  if (n != 1) return fail(error, GRAFT_INVALID_ARGUMENT, what, "this mixer has one head");
  for (int64_t d = 0; d < self->width; ++d) floats(params[0])[d] = (float)values[0];
  if (written != NULL) written[0] = 1;
  return GRAFT_OK;
}

static const void* mixer_extension(graft_mixer* handle, const char* id) {
  static const graft_mixer_migrate migrate = {sizeof migrate, 0, mixer_migrate};
  static const graft_mixer_domain domain = {sizeof domain, 0, mixer_set};
  (void)handle;
  if (id == NULL) return NULL;
  if (strcmp(id, GRAFT_EXT_MIXER_MIGRATE) == 0) return &migrate;
  return strcmp(id, GRAFT_EXT_MIXER_DOMAIN) == 0 ? &domain : NULL;
}

static const graft_mixer_vtbl mixer_table = {
    .struct_size = sizeof(graft_mixer_vtbl),
    .param_schema = 2,
    .destroy = mixer_destroy,
    .param_specs = mixer_param_specs,
    .plan = mixer_plan,
    .forward = mixer_forward,
    .backward = mixer_backward,
    .step = mixer_forward,
    .get_extension = mixer_extension,
};

static const graft_option keep_option = {
    .struct_size = sizeof(graft_option),
    .key = "keep",
    .doc = "what is left of the sum after a token",
    .def = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 0.5}},
    .min = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 0.0}},
    .max = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 1.0}},
};
static const char* const start_choices[] = {"ones", "zeros", NULL};
static const graft_option start_option = {
    .struct_size = sizeof(graft_option),
    .flags = GRAFT_OPT_SHAPES,
    .key = "start",
    .doc = "of the weight",
    .def = {.type = GRAFT_STRING, .count = 1, .u = {.s = "ones"}},
    .one_of = start_choices,
};
static const graft_option* const mixer_options[] = {&keep_option, &start_option};
static const DLDataType dtypes[] = {{kDLFloat, 32, 1}};
static const DLDeviceType devices[] = {kDLCPU};
static const graft_desc mixer_desc = {
    .struct_size = sizeof(graft_desc),
    .n_options = 2,
    .id = "org.example.v1-0.mixer",
    .alias = "v1-0-mixer",
    .name = "Sum",
    .version = "1.0.0",
    .license = "MIT",
    .citation = "",
    .description = "a weighted sum that fades",
    .caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO | GRAFT_CAP_PAD_MASK |
            GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_BATCH_INVARIANT | GRAFT_CAP_THREAD_INVARIANT,
    .options = mixer_options,
    .dtypes = dtypes,
    .devices = devices,
    .n_dtypes = 1,
    .n_devices = 1,
};
static const graft_desc* const mixer_descs[] = {&mixer_desc};

static graft_status mixer_create(const char* id, const graft_layer_info* layer,
                                 const graft_config* config, graft_mixer** out,
                                 graft_error* error) {
  if (strcmp(id, mixer_desc.id) != 0) return fail(error, GRAFT_NOT_FOUND, "id", id);
  mixer* self = calloc(1, sizeof *self);
  if (self == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  self->base.v = &mixer_table;
  self->base.self = self;
  self->width = layer->model_dim;
  self->weight = (graft_param_spec){.struct_size = sizeof(graft_param_spec),
                                    .flags = GRAFT_P_TRAINABLE,
                                    .name = "weight",
                                    .role = ROLE_WEIGHT,
                                    .axes = "model",
                                    .domain = "",
                                    .ndim = 1,
                                    .init = GRAFT_INIT_ONES};
  self->weight.shape[0] = self->width;
  for (uint32_t i = 0; i < config->count; ++i) {
    if (strcmp(config->keys[i], "keep") == 0) self->keep = config->values[i].u.f;
    if (strcmp(config->keys[i], "start") == 0 && strcmp(config->values[i].u.s, "zeros") == 0)
      self->weight.init = GRAFT_INIT_ZEROS;
  }
  self->params[0] = &self->weight;
  self->saved_list[0] = &self->saved;
  self->state_list[0] = &self->state;
  self->tap_list[0] = &self->tap;
  *out = &self->base;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- initializer */

static const graft_role_need role_needs[] = {
    {GRAFT_ROLE_QUERY, GRAFT_NEED_TEACHER | GRAFT_NEED_REQUIRED, 0},
    {ROLE_WEIGHT, GRAFT_NEED_REQUIRED, 0},
    {GRAFT_ROLE_OUTPUT, 0, 0}};
static const graft_calibration_need calibration_needs[] = {
    {GRAFT_SIGNAL_BLOCK_INPUT, GRAFT_NEED_REQUIRED, 0}};

static const graft_named_tensor* find(const graft_named_tensor* const* all, uint32_t n,
                                      const char* role, const char* name, uint32_t* index) {
  for (uint32_t i = 0; i < n; ++i) {
    if (index != NULL) *index = i;
    if (strcmp(role != NULL ? all[i]->role : all[i]->name, role != NULL ? role : name) == 0)
      return all[i];
  }
  return NULL;
}

/* The mean of the inputs, and that the probed outputs are the weight times what the mixer sums. */
static graft_status mean_of_inputs(const graft_init_args* args, double* mean, graft_error* error) {
  static const char* const taps[] = {"y", "org.example.sums"};
  double sum = 0;
  int64_t count = 0;
  for (;;) {
    const graft_named_tensor* const* signals = NULL;
    uint32_t n = 0;
    const graft_status status = args->next_batch(args->ctx, &signals, &n, error);
    if (status == GRAFT_NOT_FOUND) break;
    if (status != GRAFT_OK) return status;
    const graft_named_tensor* x = find(signals, n, NULL, GRAFT_SIGNAL_BLOCK_INPUT, NULL);
    if (x == NULL) return fail(error, GRAFT_NOT_FOUND, "signal", GRAFT_SIGNAL_BLOCK_INPUT);
    const DLTensor* out[2] = {NULL, NULL};
    const graft_status probed = args->probe(args->ctx, 2, taps, out, error);
    if (probed != GRAFT_OK) return probed;
    for (int64_t i = 0; i < numel(x->tensor); ++i, ++count) {
      if (fabs(floats(out[0])[i] - 2.0 * floats(out[1])[i]) > 1e-5)
        return fail(error, GRAFT_INTERNAL, "probe", "y is not twice the sum");
      sum += floats(x->tensor)[i];
    }
  }
  *mean = count == 0 ? 0 : sum / (double)count;
  return GRAFT_OK;
}

/* weight = (mean of the inputs, through the host's algebra where it has one) + the teacher's first
 * number */
static graft_status initializer_run(graft_initializer* handle, const graft_exec* exec,
                                    const graft_init_args* args, graft_error* error) {
  (void)handle, (void)exec;
  uint32_t at = 0;
  const graft_named_tensor* from =
      find(args->teacher, args->n_teacher, GRAFT_ROLE_QUERY, NULL, NULL);
  const graft_named_tensor* to = find(args->student, args->n_student, ROLE_WEIGHT, NULL, &at);
  if (from == NULL || to == NULL) return fail(error, GRAFT_NOT_FOUND, "role", "is missing");
  const graft_mixer_vtbl* v = args->mixer->v;
  const graft_mixer_domain* domain =
      v->get_extension == NULL ? NULL : v->get_extension(args->mixer, GRAFT_EXT_MIXER_DOMAIN);
  if (domain == NULL) return fail(error, GRAFT_FAILED_PRECONDITION, "mixer", "has no domain");
  const double two = 2;
  DLTensor* params[1] = {to->tensor};
  graft_status status = domain->set(args->mixer, GRAFT_NATURAL_OUTPUT_GATE, 1, &two, params,
                                    args->student_written + at, error);
  if (status != GRAFT_OK) return status;
  double first = 0, mean = 0;
  status = mean_of_inputs(args, &first, error);
  if (status == GRAFT_OK) status = args->rewind(args->ctx, error);
  if (status == GRAFT_OK) status = mean_of_inputs(args, &mean, error);
  if (status != GRAFT_OK) return status;
  if (first != mean) return fail(error, GRAFT_INTERNAL, "rewind", "two passes differ");
  for (int64_t i = 0; i < numel(to->tensor); ++i)
    floats(to->tensor)[i] = (float)mean + floats(from->tensor)[0];
  args->student_written[at] = 1;
  return GRAFT_OK;
}

static void initializer_destroy(graft_initializer* handle) { free(handle); }

static const graft_initializer_vtbl initializer_table = {
    .struct_size = sizeof(graft_initializer_vtbl),
    .n_needs = 3,
    .needs = role_needs,
    .n_calibration = 1,
    .calibration = calibration_needs,
    .destroy = initializer_destroy,
    .run = initializer_run,
};
static const graft_desc initializer_desc = {.struct_size = sizeof(graft_desc),
                                            .id = "org.example.v1-0.initializer",
                                            .alias = "v1-0-initializer",
                                            .version = "1.0.0",
                                            .license = "MIT"};
static const graft_desc* const initializer_descs[] = {&initializer_desc};

static graft_status initializer_create(const char* id, const graft_config* config,
                                       graft_initializer** out, graft_error* error) {
  (void)id, (void)config;
  graft_initializer* made = calloc(1, sizeof *made);
  if (made == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  made->v = &initializer_table;
  *out = made;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- objective */

static const graft_signal_need signal_needs[] = {
    {GRAFT_SIGNAL_STUDENT_HIDDEN, GRAFT_NEED_REQUIRED | GRAFT_NEED_GRAD, 0},
    {GRAFT_SIGNAL_TEACHER_HIDDEN, GRAFT_NEED_REQUIRED, 0},
    {GRAFT_SIGNAL_LOSS_MASK, 0, 0}};

static graft_status objective_workspace(graft_objective* handle, const graft_objective_args* args,
                                        uint64_t* bytes, graft_error* error) {
  (void)handle, (void)error;
  *bytes = (uint64_t)(args->signals[0]->shape[0] * args->signals[0]->shape[1]) * sizeof(double);
  return GRAFT_OK;
}

/* Half the squared distance of a token, summed over the tokens that count and divided by their
 * number. */
static graft_status objective_run(graft_objective* handle, const graft_exec* exec,
                                  const graft_objective_args* args, graft_error* error) {
  (void)handle;
  const DLTensor *student = args->signals[0], *teacher = args->signals[1], *mask = args->signals[2];
  const int64_t tokens = student->shape[0] * student->shape[1], width = student->shape[2];
  double* losses = (double*)exec->workspace;
  if (exec->workspace_bytes < (uint64_t)tokens * sizeof(double))
    return fail(error, GRAFT_INVALID_ARGUMENT, "workspace", "is too small");
  double count = 0, loss = 0;
  for (int64_t t = 0; t < tokens; ++t)
    count += mask == NULL || ((const uint8_t*)mask->data)[t] != 0 ? 1 : 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const int counts = mask == NULL || ((const uint8_t*)mask->data)[t] != 0;
    losses[t] = 0;
    for (int64_t d = 0; d < width; ++d) {
      const int64_t at = t * width + d;
      const double gap = counts ? (double)floats(student)[at] - (double)floats(teacher)[at] : 0;
      losses[t] += 0.5 * gap * gap;
      if (args->grads != NULL && args->grads[0] != NULL)
        floats(args->grads[0])[at] = (float)(args->grad_scale * gap / count);
    }
    loss += losses[t];
  }
  floats(args->loss)[0] = (float)(loss / count);
  if (args->metric != NULL) {
    const DLTensor scalar = {&count, {kDLCPU, 0}, 0, {kDLFloat, 64, 1}, NULL, NULL, 0};
    args->metric(args->metric_ctx, GRAFT_METRIC_WEIGHT, &scalar);
  }
  return GRAFT_OK;
}

static void objective_destroy(graft_objective* handle) { free(handle); }

static const graft_objective_vtbl objective_table = {
    .struct_size = sizeof(graft_objective_vtbl),
    .n_needs = 3,
    .needs = signal_needs,
    .destroy = objective_destroy,
    .workspace = objective_workspace,
    .run = objective_run,
};
static const graft_desc objective_desc = {.struct_size = sizeof(graft_desc),
                                          .id = "org.example.v1-0.objective",
                                          .alias = "v1-0-objective",
                                          .version = "1.0.0",
                                          .license = "MIT",
                                          .dtypes = dtypes,
                                          .devices = devices,
                                          .n_dtypes = 1,
                                          .n_devices = 1};
static const graft_desc* const objective_descs[] = {&objective_desc};

static graft_status objective_create(const char* id, const graft_config* config,
                                     graft_objective** out, graft_error* error) {
  (void)id, (void)config;
  graft_objective* made = calloc(1, sizeof *made);
  if (made == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  made->v = &objective_table;
  *out = made;
  return GRAFT_OK;
}

/* ---------------------------------------------------------------- library */

/* Every service the host has, once. */
static graft_status try_services(graft_error* error) {
  const graft_host_memory* memory = service(GRAFT_HOST_EXT_MEMORY);
  if (memory != NULL) {
    const DLDevice cpu = {kDLCPU, 0};
    void* p = memory->alloc(host_, cpu, NULL, 100, 128);
    if (p == NULL || (uintptr_t)p % 128 != 0)
      return fail(error, GRAFT_INTERNAL, GRAFT_HOST_EXT_MEMORY, "is not aligned");
    memory->free(host_, cpu, NULL, p);
  }
  const graft_host_blas* blas = service(GRAFT_HOST_EXT_BLAS);
  if (blas != NULL) {
    float a[4] = {2, 1, 1, 2}, x[2] = {3, 3}, c[2] = {0, 0};
    int64_t square[2] = {2, 2}, square_strides[2] = {2, 1}, column[2] = {2, 1}, ones[2] = {1, 1};
    const DLDataType f32 = {kDLFloat, 32, 1};
    DLTensor ta = {a, {kDLCPU, 0}, 2, f32, square, square_strides, 0};
    DLTensor tx = {x, {kDLCPU, 0}, 2, f32, column, ones, 0}, tc = tx;
    tc.data = c;
    graft_status status = blas->spd_solve(host_, &ta, &tx, NULL, error);
    if (status == GRAFT_OK) status = blas->gemm(host_, 0, 0, 1, &ta, &tx, 0, &tc, NULL, error);
    if (status != GRAFT_OK) return status;
    if (fabs(c[0] - 3.0) > 1e-5 || fabs(c[1] - 3.0) > 1e-5)
      return fail(error, GRAFT_INTERNAL, GRAFT_HOST_EXT_BLAS, "a (a^-1 x) is not x");
  }
  return GRAFT_OK;
}

static graft_status init(const graft_host* host, const char* library_path, graft_error* error) {
  char line[256];
  if (inits == 0) host_ = host;
  const graft_status status = try_services(error);
  if (status != GRAFT_OK) return status;
  ++inits;
  snprintf(line, sizeof line, "loaded from %s by %s %s", library_path, host->name, host->version);
  if (host->should_stop(host) == 0) host->log(host, GRAFT_LOG_DEBUG, line);
  return GRAFT_OK;
}

static void deinit(void) {
  if (--inits == 0) host_ = NULL;
}

static const void* library_extension(const char* id) {
  static const graft_mixer_factory mixers = {sizeof mixers, 1, mixer_descs, mixer_create};
  static const graft_initializer_factory initializers = {sizeof initializers, 1, initializer_descs,
                                                         initializer_create};
  static const graft_objective_factory objectives = {sizeof objectives, 1, objective_descs,
                                                     objective_create};
  if (id == NULL) return NULL;
  if (strcmp(id, GRAFT_EXT_MIXER_FACTORY) == 0) return &mixers;
  if (strcmp(id, GRAFT_EXT_INITIALIZER_FACTORY) == 0) return &initializers;
  return strcmp(id, GRAFT_EXT_OBJECTIVE_FACTORY) == 0 ? &objectives : NULL;
}

static const graft_plugin plugin = {
    .struct_size = sizeof(graft_plugin),
    .id = "org.example.v1-0",
    .version = "1.0.0",
    .license = "MIT",
    .init = init,
    .deinit = deinit,
    .get_extension = library_extension,
};

GRAFT_EXPORT graft_status GRAFT_CALL graft_plugin_negotiate(const graft_negotiate_in* in,
                                                            graft_negotiate_out* out,
                                                            graft_error* error) {
  if (in->min_abi > GRAFT_ABI_CURRENT || in->max_abi < GRAFT_ABI_CURRENT)
    return fail(error, GRAFT_ABI_MISMATCH, "abi", "this plugin speaks graft ABI 1.0");
  if (in->dlpack_major != DLPACK_MAJOR_VERSION)
    return fail(error, GRAFT_ABI_MISMATCH, "dlpack_major", "this plugin speaks DLPack 1");
  out->abi = GRAFT_ABI_CURRENT;
  out->plugin = &plugin;
  return GRAFT_OK;
}
