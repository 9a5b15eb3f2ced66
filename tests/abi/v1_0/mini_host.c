/* A host as somebody wrote it for ABI 1.0: never edited, compiled with the header beside it, plain
 * dlopen, no other library. It opens a plugin of today, makes each of its components with their
 * default options and runs the mixers:
 *
 *   mini_host PLUGIN.so            0: all is well; 1: it says on stderr what is not
 */
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graft/graft.h"

enum { BATCH = 2, TOKENS = 5, MODEL = 16, HEADS = 2, ALIGNMENT = 64 };

static void stop(const char* format, ...) {
  va_list args;
  va_start(args, format);
  fputs("mini_host: ", stderr);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  exit(1);
}

static graft_error error;

/* Clears the error for the next call. */
static graft_error* fresh(void) {
  memset(&error, 0, sizeof error);
  error.struct_size = sizeof error;
  return &error;
}

static void check(graft_status status, const char* what, const char* call) {
  if (status != GRAFT_OK)
    stop("%s, %s: status %d: %s: %s", what, call, (int)status, error.where, error.message);
}

static void* memory(size_t bytes) {
  void* p = aligned_alloc(256, (bytes / 256 + 1) * 256);
  if (p == NULL) stop("no memory");
  memset(p, 0, bytes);
  return p;
}

/* ---------------------------------------------------------------- tensors */

static size_t bytes_of(const DLTensor* tensor) {
  size_t bytes = tensor->dtype.bits / 8;
  for (int32_t axis = 0; axis < tensor->ndim; ++axis) bytes *= (size_t)tensor->shape[axis];
  return bytes;
}

static DLTensor* tensor_of(int32_t ndim, const int64_t* shape, DLDataType dtype) {
  DLTensor* tensor = memory(sizeof *tensor);
  tensor->device.device_type = kDLCPU;
  tensor->ndim = ndim;
  tensor->dtype = dtype;
  tensor->shape = memory(2 * 6 * sizeof(int64_t));
  tensor->strides = tensor->shape + 6;
  int64_t stride = 1;
  for (int32_t axis = ndim; axis-- > 0;) {
    tensor->shape[axis] = shape[axis];
    tensor->strides[axis] = stride;
    stride *= shape[axis];
  }
  tensor->data = memory(bytes_of(tensor));
  return tensor;
}

static void free_tensor(DLTensor* tensor) {
  free(tensor->data);
  free(tensor->shape);
  free(tensor);
}

static DLTensor** tensors_of(const graft_tensor_spec* const* specs, uint32_t n) {
  DLTensor** list = memory((n + 1) * sizeof *list);
  for (uint32_t i = 0; i < n; ++i)
    list[i] = tensor_of(specs[i]->ndim, specs[i]->shape, specs[i]->dtype);
  return list;
}

static void free_tensors(DLTensor** list, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) free_tensor(list[i]);
  free(list);
}

static float next_number(void) {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / (float)(1u << 24) - 0.5F;
}

static DLTensor* random_input(int64_t tokens) {
  const int64_t shape[] = {BATCH, tokens, MODEL};
  DLTensor* x = tensor_of(3, shape, (DLDataType){kDLFloat, 32, 1});
  for (size_t i = 0; i < bytes_of(x) / sizeof(float); ++i) ((float*)x->data)[i] = next_number();
  return x;
}

/* ---------------------------------------------------------------- parameters */

static float starting_value(const graft_param_spec* spec, int64_t index) {
  const int64_t columns = spec->ndim < 2 ? 1 : spec->shape[spec->ndim - 1];
  const int64_t rows = spec->ndim < 2 ? 1 : spec->shape[spec->ndim - 2];
  switch (spec->init) {
    case GRAFT_INIT_ZEROS:
      return 0;
    case GRAFT_INIT_ONES:
      return 1;
    case GRAFT_INIT_CONSTANT:
      return (float)spec->init_a;
    case GRAFT_INIT_NORMAL:
      return (float)(spec->init_a + spec->init_b * 2 * next_number());
    case GRAFT_INIT_UNIFORM:
      return (float)(spec->init_a + (spec->init_b - spec->init_a) * (next_number() + 0.5F));
    case GRAFT_INIT_EYE:
      return index % columns == index / columns % rows ? 1.0F : 0.0F;
    default:
      stop("parameter %s asks for initialisation kind %d", spec->name, (int)spec->init);
  }
  return 0;
}

static DLTensor** parameters_of(graft_mixer* mixer, const char* id, uint32_t* n) {
  const graft_param_spec* const* specs = NULL;
  check(mixer->v->param_specs(mixer, &specs, n, fresh()), id, "param_specs");
  DLTensor** params = memory((*n + 1) * sizeof *params);
  for (uint32_t i = 0; i < *n; ++i) {
    params[i] = tensor_of(specs[i]->ndim, specs[i]->shape, (DLDataType){kDLFloat, 32, 1});
    for (size_t k = 0; k < bytes_of(params[i]) / sizeof(float); ++k)
      ((float*)params[i]->data)[k] = starting_value(specs[i], (int64_t)k);
  }
  return params;
}

/* ---------------------------------------------------------------- calls */

/* One mixer at work: its parameters, and the state between calls. */
typedef struct run {
  graft_mixer* mixer;
  const graft_desc* desc;
  DLTensor** params;
  uint32_t n_params, n_state;
  DLTensor** state; /* NULL = the start */
} run;

static graft_plan_out plan_of(const run* r, int64_t tokens) {
  graft_plan_in in = {.struct_size = sizeof in, .device_type = kDLCPU, .batch = BATCH};
  in.dtype = (DLDataType){kDLFloat, 32, 1};
  in.tokens = tokens;
  graft_plan_out out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  check(r->mixer->v->plan(r->mixer, &in, &out, fresh()), r->desc->id, "plan");
  return out;
}

/* y for the tokens of x, and r->state behind them. */
static DLTensor* advance(run* r, DLTensor* x, int step) {
  const graft_plan_out plan = plan_of(r, x->shape[1]);
  const int carries = (r->desc->caps & GRAFT_CAP_STATE_IO) != 0;
  const uint64_t bytes = step ? plan.workspace_step : plan.workspace_forward;
  graft_exec exec = {.struct_size = sizeof exec, .device_type = kDLCPU, .workspace_bytes = bytes};
  exec.workspace = bytes == 0 ? NULL : memory(bytes);
  DLTensor* y = tensor_of(3, x->shape, x->dtype);
  DLTensor** next = carries ? tensors_of(plan.state, plan.n_state) : NULL;
  const graft_mixer_forward call = {.struct_size = sizeof call,
                                    .n_params = r->n_params,
                                    .n_state = plan.n_state,
                                    .n_saved = plan.n_saved,
                                    .n_taps = plan.n_taps,
                                    .x = x,
                                    .y = y,
                                    .params = (const DLTensor* const*)r->params,
                                    .state_in = (const DLTensor* const*)r->state,
                                    .state_out = next};
  check((step ? r->mixer->v->step : r->mixer->v->forward)(r->mixer, &exec, &call, fresh()),
        r->desc->id, step ? "step" : "forward");
  if (r->state != NULL) free_tensors(r->state, r->n_state);
  r->state = next;
  r->n_state = plan.n_state;
  free(exec.workspace);
  return y;
}

static void restart(run* r) {
  if (r->state != NULL) free_tensors(r->state, r->n_state);
  r->state = NULL;
}

/* Token t of each row. */
static DLTensor* token(const DLTensor* x, int64_t t) {
  const int64_t shape[] = {BATCH, 1, MODEL};
  DLTensor* one = tensor_of(3, shape, x->dtype);
  for (int64_t row = 0; row < BATCH; ++row)
    memcpy((float*)one->data + row * MODEL, (const float*)x->data + (row * x->shape[1] + t) * MODEL,
           MODEL * sizeof(float));
  return one;
}

/* The whole at once gives finite numbers, and the same as one token after the other. */
static void run_mixer(graft_mixer* mixer, const graft_desc* desc) {
  run r = {.mixer = mixer, .desc = desc};
  r.params = parameters_of(mixer, desc->id, &r.n_params);
  DLTensor* x = random_input(TOKENS);
  DLTensor* y = advance(&r, x, 0);
  for (size_t i = 0; i < bytes_of(y) / sizeof(float); ++i)
    if (!isfinite(((float*)y->data)[i])) stop("%s, forward: y[%zu] is not finite", desc->id, i);
  restart(&r);
  const int steps = (desc->caps & GRAFT_CAP_STEP) != 0;
  for (int64_t t = 0; steps && t < TOKENS; ++t) {
    DLTensor *one = token(x, t), *whole = token(y, t), *got = advance(&r, one, t > 0);
    for (int64_t i = 0; i < BATCH * MODEL; ++i) {
      const double a = ((float*)got->data)[i], b = ((float*)whole->data)[i];
      if (!(fabs(a - b) <= 1e-4 * (1 + fabs(b))))
        stop("%s, step: token %d is %g, forward gave %g", desc->id, (int)t, a, b);
    }
    free_tensor(one), free_tensor(whole), free_tensor(got);
  }
  restart(&r);
  free_tensor(x), free_tensor(y);
  free_tensors(r.params, r.n_params);
  printf("%s: %u parameters, forward%s\n", desc->id, r.n_params, steps ? ", step" : "");
}

/* ---------------------------------------------------------------- components */

/* The defaults of every option; the caller frees keys and values. */
static graft_config defaults_of(const graft_desc* desc) {
  const char** keys = memory((desc->n_options + 1) * sizeof *keys);
  graft_value* values = memory((desc->n_options + 1) * sizeof *values);
  for (uint32_t i = 0; i < desc->n_options; ++i) {
    keys[i] = desc->options[i]->key;
    values[i] = desc->options[i]->def;
  }
  const graft_config config = {sizeof config, desc->n_options, keys, values};
  return config;
}

static void free_config(const graft_config* config) {
  free((void*)(uintptr_t)config->keys);
  free((void*)(uintptr_t)config->values);
}

static graft_layer_info small_layer(void) {
  static const double frequencies[] = {1.0, 0.3, 0.1, 0.03};
  graft_layer_info layer = {.struct_size = sizeof layer, .n_layers = 2, .n_heads = HEADS};
  layer.n_kv_heads = HEADS;
  layer.head_dim = MODEL / HEADS;
  layer.model_dim = MODEL;
  layer.max_positions = 128;
  layer.rope_theta = 10000;
  layer.rope_fraction = 1;
  layer.rope_scaling = "";
  layer.family = "llama";
  layer.param_dtype = (DLDataType){kDLFloat, 32, 1};
  layer.norm_eps = 1e-5;
  layer.rope_inv_freq = frequencies;
  layer.n_rope_freq = MODEL / HEADS / 2;
  layer.rope_attention_factor = 1;
  return layer;
}

static uint32_t use_mixers(const graft_mixer_factory* factory) {
  const graft_layer_info layer = small_layer();
  for (uint32_t i = 0; i < factory->count; ++i) {
    const graft_desc* desc = factory->descs[i];
    const graft_config config = defaults_of(desc);
    graft_mixer* mixer = NULL;
    check(factory->create(desc->id, &layer, &config, &mixer, fresh()), desc->id, "create");
    free_config(&config);
    run_mixer(mixer, desc);
    mixer->v->destroy(mixer);
  }
  return factory->count;
}

static uint32_t make_initializers(const graft_initializer_factory* factory) {
  for (uint32_t i = 0; i < factory->count; ++i) {
    const graft_desc* desc = factory->descs[i];
    const graft_config config = defaults_of(desc);
    graft_initializer* made = NULL;
    check(factory->create(desc->id, &config, &made, fresh()), desc->id, "create");
    free_config(&config);
    for (uint32_t k = 0; k < made->v->n_needs; ++k)
      if (made->v->needs[k].role[0] == '\0') stop("%s needs a role of no name", desc->id);
    printf("%s: %u roles, %u signals\n", desc->id, made->v->n_needs, made->v->n_calibration);
    made->v->destroy(made);
  }
  return factory->count;
}

static uint32_t make_objectives(const graft_objective_factory* factory) {
  for (uint32_t i = 0; i < factory->count; ++i) {
    const graft_desc* desc = factory->descs[i];
    const graft_config config = defaults_of(desc);
    graft_objective* made = NULL;
    check(factory->create(desc->id, &config, &made, fresh()), desc->id, "create");
    free_config(&config);
    for (uint32_t k = 0; k < made->v->n_needs; ++k)
      if (made->v->needs[k].name[0] == '\0') stop("%s needs a signal of no name", desc->id);
    printf("%s: %u signals\n", desc->id, made->v->n_needs);
    made->v->destroy(made);
  }
  return factory->count;
}

/* ---------------------------------------------------------------- the host */

static void GRAFT_CALL log_line(const graft_host* host, int32_t level, const char* message) {
  (void)host;
  fprintf(stderr, "[%d] %s\n", (int)level, message);
}
static int32_t GRAFT_CALL never_stop(const graft_host* host) {
  (void)host;
  return 0;
}
static const void* GRAFT_CALL no_services(const graft_host* host, const char* id) {
  (void)host, (void)id;
  return NULL;
}

static const graft_plugin* negotiate(const char* file) {
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) stop("%s", dlerror());
  graft_plugin_negotiate_fn entry;
  void* symbol = dlsym(library, GRAFT_ENTRY_SYMBOL);
  memcpy(&entry, &symbol, sizeof entry);
  if (symbol == NULL) stop("%s has no symbol %s", file, GRAFT_ENTRY_SYMBOL);
  const graft_negotiate_in in = {sizeof in,       DLPACK_MAJOR_VERSION, GRAFT_ABI(1, 0),
                                 GRAFT_ABI(1, 0), "mini_host",          "1.0.0"};
  graft_negotiate_out out = {.struct_size = sizeof out};
  check(entry(&in, &out, fresh()), file, "negotiate");
  if (out.abi != GRAFT_ABI(1, 0)) stop("%s picked ABI %x", file, (unsigned)out.abi);
  return out.plugin;
}

int main(int argc, char** argv) {
  if (argc != 2) stop("usage: mini_host PLUGIN.so");
  const graft_plugin* plugin = negotiate(argv[1]);
  static graft_host host = {.struct_size = sizeof host,
                            .abi = GRAFT_ABI(1, 0),
                            .name = "mini_host",
                            .version = "1.0.0",
                            .log = log_line,
                            .should_stop = never_stop,
                            .get_extension = no_services};
  if (plugin->init != NULL) check(plugin->init(&host, argv[1], fresh()), plugin->id, "init");
  const graft_mixer_factory* mixers = plugin->get_extension(GRAFT_EXT_MIXER_FACTORY);
  const graft_initializer_factory* initializers =
      plugin->get_extension(GRAFT_EXT_INITIALIZER_FACTORY);
  const graft_objective_factory* objectives = plugin->get_extension(GRAFT_EXT_OBJECTIVE_FACTORY);
  const uint32_t made = (mixers == NULL ? 0 : use_mixers(mixers)) +
                        (initializers == NULL ? 0 : make_initializers(initializers)) +
                        (objectives == NULL ? 0 : make_objectives(objectives));
  if (made == 0) stop("%s has no component", plugin->id);
  if (plugin->deinit != NULL) plugin->deinit();
  return 0;
}
