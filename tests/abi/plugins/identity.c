/* A plugin in plain C for the tests: the mixer y = scale * x. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graft/graft.h"

/* ---------------------------------------------------------------- errors */

/* Says what went wrong and where; gives back the status to return. */
static graft_status fail(graft_error* error, graft_status code, const char* where,
                         const char* message) {
  if (error != NULL && GRAFT_HAS(graft_error, error, message)) {
    error->code = code;
    snprintf(error->where, sizeof error->where, "%s", where);
    snprintf(error->message, sizeof error->message, "%s", message);
  }
  return code;
}

/* ---------------------------------------------------------------- one instance */

typedef struct identity {
  graft_mixer base; /* what the host holds */
  double scale;
} identity;

static identity* self_of(graft_mixer* mixer) { return (identity*)mixer->self; }

static void destroy(graft_mixer* mixer) { free(self_of(mixer)); }

static graft_status param_specs(graft_mixer* mixer, const graft_param_spec* const** specs,
                                uint32_t* n, graft_error* error) {
  (void)mixer;
  (void)error;
  *specs = NULL;
  *n = 0;
  return GRAFT_OK;
}

/* No saved tensors, no state, no workspace: the answer is the zeros the caller put there. */
static graft_status plan(graft_mixer* mixer, const graft_plan_in* in, graft_plan_out* out,
                         graft_error* error) {
  (void)mixer;
  (void)out;
  if (in->dtype.code != kDLFloat || in->dtype.bits != 32 || in->dtype.lanes != 1) {
    return fail(error, GRAFT_UNIMPLEMENTED, "plan.dtype", "only float32 is there");
  }
  return GRAFT_OK;
}

/* to = scale * from for two tensors of one shape; the host passes them row-major without gaps. */
static graft_status scaled_copy(double scale, const DLTensor* from, const char* from_name,
                                DLTensor* to, graft_error* error) {
  int64_t n = 1;
  if (from == NULL || to == NULL)
    return fail(error, GRAFT_INVALID_ARGUMENT, from_name, "a tensor is missing (NULL)");
  if (from->ndim != 3 || to->ndim != 3)
    return fail(error, GRAFT_INVALID_ARGUMENT, from_name, "expected [B,T,model]");
  for (int axis = 0; axis < 3; ++axis) {
    if (from->shape[axis] != to->shape[axis]) {
      return fail(error, GRAFT_INVALID_ARGUMENT, from_name, "input and output differ in shape");
    }
    n *= from->shape[axis];
  }
  for (int64_t i = 0; i < n; ++i)
    ((float*)to->data)[i] = (float)(scale * ((const float*)from->data)[i]);
  return GRAFT_OK;
}

static graft_status forward(graft_mixer* mixer, const graft_exec* exec,
                            const graft_mixer_forward* call, graft_error* error) {
  (void)exec;
  return scaled_copy(self_of(mixer)->scale, call->x, "tensor:x", call->y, error);
}

static graft_status backward(graft_mixer* mixer, const graft_exec* exec,
                             const graft_mixer_backward* call, graft_error* error) {
  (void)exec;
  if (call->dx == NULL) return GRAFT_OK; /* not wanted */
  return scaled_copy(self_of(mixer)->scale, call->dy, "tensor:dy", call->dx, error);
}

/* The host asks for an extension by id; NULL for those that are not there. */
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
    .step = forward, /* one token is a sequence of one token */
    .get_extension = mixer_extension,
};

/* ---------------------------------------------------------------- the component */

static const graft_option scale_option = {
    .struct_size = sizeof(graft_option),
    .key = "scale",
    .doc = "factor between input and output",
    .def = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 1.0}},
    .min = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = -100.0}},
    .max = {.type = GRAFT_FLOAT, .count = 1, .u = {.f = 100.0}},
};
static const graft_option* const options[] = {&scale_option};
static const DLDataType dtypes[] = {{kDLFloat, 32, 1}};
static const DLDeviceType devices[] = {kDLCPU};

static const graft_desc description = {
    .struct_size = sizeof(graft_desc),
    .n_options = 1,
    .id = "org.example.identity",
    .alias = "identity",
    .name = "Identity",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .citation = "",
    .description = "y = scale * x",
    .caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO |
            GRAFT_CAP_DETERMINISTIC | GRAFT_CAP_BATCH_INVARIANT | GRAFT_CAP_THREAD_INVARIANT,
    .options = options,
    .dtypes = dtypes,
    .devices = devices,
    .n_dtypes = 1,
    .n_devices = 1,
};
static const graft_desc* const descriptions[] = {&description};

/* The configuration is complete and checked: every option of the schema is there. */
static graft_status create(const char* id, const graft_layer_info* layer,
                           const graft_config* config, graft_mixer** out, graft_error* error) {
  (void)layer;
  if (strcmp(id, description.id) != 0) return fail(error, GRAFT_NOT_FOUND, "id", id);
  identity* self = malloc(sizeof *self);
  if (self == NULL) return fail(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  self->base.v = &table;
  self->base.self = self;
  self->scale = 1.0;
  for (uint32_t i = 0; i < config->count; ++i) {
    if (strcmp(config->keys[i], "scale") == 0) self->scale = config->values[i].u.f;
  }
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

static graft_status init(const graft_host* host, const char* library_path, graft_error* error) {
  (void)host; /* keep it to log, or to ask for services */
  (void)library_path;
  (void)error;
  return GRAFT_OK;
}

static void deinit(void) {}

static const void* library_extension(const char* id) {
  return strcmp(id, GRAFT_EXT_MIXER_FACTORY) == 0 ? &factory : NULL;
}

static const graft_plugin plugin = {
    .struct_size = sizeof(graft_plugin),
    .id = "org.example.identity-pack",
    .vendor = "graft",
    .url = "",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .build_tags = "",
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
  if (in->min_abi > spoken || in->max_abi < spoken) {
    return fail(error, GRAFT_ABI_MISMATCH, "abi",
                "this plugin speaks graft ABI 1.0, which the host does not offer");
  }
  if (in->dlpack_major != DLPACK_MAJOR_VERSION) {
    return fail(error, GRAFT_ABI_MISMATCH, "dlpack_major", "this plugin speaks DLPack 1");
  }
  out->abi = spoken;
  out->plugin = &plugin;
  return GRAFT_OK;
}
