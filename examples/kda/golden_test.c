/* Compares the plugin with reference.py's figures (golden.h): outputs, states, taps and all
 * gradients, in float64 and float32. The host here offers no services, so the plain matrix products
 * are tested too.
 *
 *   golden_test build/plugins/kda.so
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"
#include "graft/graft.h"

static void die(const char* what, const graft_error* error) {
  fprintf(stderr, "%s: %s: %s\n", what, error->where, error->message);
  exit(1);
}

static const void* no_extension(const graft_host* host, const char* id) {
  (void)host;
  (void)id;
  return NULL;
}
static const graft_host host = {.struct_size = sizeof host,
                                .abi = GRAFT_ABI_CURRENT,
                                .name = "golden_test",
                                .version = "1",
                                .get_extension = no_extension};

/* ---------------------------------------------------------------- tensors */

typedef struct tensor {
  DLTensor dl;
  int64_t shape[6], strides[6];
} tensor;

static size_t count_of(const tensor* t) {
  size_t n = 1;
  for (int i = 0; i < t->dl.ndim; ++i) n *= (size_t)t->shape[i];
  return n;
}

/* Filled with 0xFF bytes: NaN, where nothing is written. Nothing is freed: the process ends soon.
 */
static tensor* make(DLDataType dtype, int32_t ndim, const int64_t* shape) {
  tensor* const t = calloc(1, sizeof *t);
  int64_t stride = 1;
  t->dl = (DLTensor){.device = {kDLCPU, 0},
                     .ndim = ndim,
                     .dtype = dtype,
                     .shape = t->shape,
                     .strides = t->strides};
  for (int i = ndim; i-- > 0; stride *= shape[i]) {
    t->shape[i] = shape[i];
    t->strides[i] = stride;
  }
  const size_t bytes = (count_of(t) * dtype.bits / 8 + 64) / 64 * 64;
  t->dl.data = aligned_alloc(64, bytes);
  memset(t->dl.data, 0xFF, bytes);
  return t;
}

static void set(tensor* t, const double* values) {
  for (size_t i = 0; i < count_of(t); ++i) {
    if (t->dl.dtype.bits == 64) {
      ((double*)t->dl.data)[i] = values[i];
    } else {
      ((float*)t->dl.data)[i] = (float)values[i];
    }
  }
}

static int failures;
static double worst;

/* The largest difference, relative to the largest value. */
static void compare(const char* name, const tensor* got, const double* want, double allowed) {
  double size = 1e-3, off = 0;
  for (size_t i = 0; i < count_of(got); ++i) size = fmax(size, fabs(want[i]));
  for (size_t i = 0; i < count_of(got); ++i) {
    const double value =
        got->dl.dtype.bits == 64 ? ((double*)got->dl.data)[i] : ((float*)got->dl.data)[i];
    const double d = fabs(value - want[i]) / size;
    if (!(d <= off)) off = d;
  }
  worst = fmax(worst, off);
  if (off <= allowed) return;
  ++failures;
  printf("%s: off by %g of the largest, %g allowed\n", name, off, allowed);
}

/* ---------------------------------------------------------------- the plugin */

static graft_mixer* open_mixer(const char* file) {
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  graft_plugin_negotiate_fn negotiate;
  void* const symbol = dlsym(library, GRAFT_ENTRY_SYMBOL);
  memcpy(&negotiate, &symbol, sizeof negotiate);
  graft_error error = {.struct_size = sizeof error};
  const graft_negotiate_in in = {sizeof in,         DLPACK_MAJOR_VERSION, GRAFT_ABI_CURRENT,
                                 GRAFT_ABI_CURRENT, "golden_test",        "1"};
  graft_negotiate_out out = {.struct_size = sizeof out};
  if (negotiate(&in, &out, &error) != GRAFT_OK) die("negotiate", &error);
  if (out.plugin->init(&host, file, &error) != GRAFT_OK) die("init", &error);
  const graft_mixer_factory* const factory = out.plugin->get_extension(GRAFT_EXT_MIXER_FACTORY);
  const graft_desc* const desc = factory->descs[0];
  const char* keys[32];
  graft_value values[32];
  for (uint32_t i = 0; i < desc->n_options; ++i) {
    const char* const key = keys[i] = desc->options[i]->key;
    values[i] = desc->options[i]->def;
    if (strcmp(key, "rope") == 0 || strcmp(key, "write_gate_bias") == 0) values[i].u.i = 1;
    if (strcmp(key, "decay_rank") == 0 || strcmp(key, "output_gate_rank") == 0)
      values[i].u.i = RANK;
  }
  const graft_config config = {sizeof config, desc->n_options, keys, values};
  const graft_layer_info layer = {.struct_size = sizeof layer,
                                  .n_layers = 1,
                                  .n_heads = H,
                                  .n_kv_heads = H,
                                  .head_dim = K,
                                  .model_dim = D,
                                  .rope_inv_freq = inv_freq,
                                  .n_rope_freq = PAIRS,
                                  .rope_attention_factor = 1,
                                  .flags = GRAFT_LAYER_QKV_BIAS | GRAFT_LAYER_O_BIAS};
  graft_mixer* mixer = NULL;
  if (factory->create(desc->id, &layer, &config, &mixer, &error) != GRAFT_OK) die("create", &error);
  return mixer;
}

enum { MOST = 32 };
static void make_all(uint32_t n, const graft_tensor_spec* const* specs, tensor** tensors,
                     DLTensor** pointers) {
  for (uint32_t i = 0; i < n; ++i) {
    tensors[i] = make(specs[i]->dtype, specs[i]->ndim, specs[i]->shape);
    pointers[i] = &tensors[i]->dl;
  }
}

static void run(graft_mixer* mixer, DLDataType dtype, double allowed) {
  static const int64_t x_shape[] = {B, T, D}, mask_shape[] = {B, T};
  graft_error error = {.struct_size = sizeof error};
  const graft_plan_in in = {.struct_size = sizeof in,
                            .device_type = kDLCPU,
                            .dtype = dtype,
                            .flags = GRAFT_X_TRAINING,
                            .batch = B,
                            .tokens = T};
  graft_plan_out plan = {.struct_size = sizeof plan};
  if (mixer->v->plan(mixer, &in, &plan, &error) != GRAFT_OK) die("plan", &error);

  tensor *params[MOST], *dparams[MOST], *saved[MOST], *state_in[2], *state_out[2], *taps[4],
      *dtaps[4], *dstate[2], *dstate_in[2];
  DLTensor *param_list[MOST], *dparam_list[MOST], *saved_list[MOST], *in_list[2], *out_list[2],
      *tap_list[4], *dtap_list[4], *dstate_list[2], *dstate_in_list[2];
  const graft_param_spec* const* specs;
  uint32_t n_params;
  mixer->v->param_specs(mixer, &specs, &n_params, &error);
  for (uint32_t i = 0; i < n_params; ++i) {
    param_list[i] = &(params[i] = make(dtype, specs[i]->ndim, specs[i]->shape))->dl;
    dparam_list[i] = &(dparams[i] = make(dtype, specs[i]->ndim, specs[i]->shape))->dl;
    for (size_t k = 0; k < sizeof inputs / sizeof inputs[0]; ++k) {
      if (strcmp(inputs[k].name, specs[i]->name) == 0) set(params[i], inputs[k].value);
    }
  }
  make_all(plan.n_saved, plan.saved, saved, saved_list);
  make_all(plan.n_state, plan.state, state_in, in_list);
  make_all(plan.n_state, plan.state, state_out, out_list);
  make_all(plan.n_state, plan.state, dstate, dstate_list);
  make_all(plan.n_state, plan.state, dstate_in, dstate_in_list);
  make_all(plan.n_taps, plan.taps, taps, tap_list);
  make_all(plan.n_taps, plan.taps, dtaps, dtap_list);
  tensor *x = make(dtype, 3, x_shape), *y = make(dtype, 3, x_shape), *dx = make(dtype, 3, x_shape),
         *dy = make(dtype, 3, x_shape);
  tensor* const mask = make((DLDataType){kDLUInt, 8, 1}, 2, mask_shape);
  memcpy(mask->dl.data, real_tokens, sizeof real_tokens);
  set(x, inputs[0].value);
  set(state_in[0], inputs[1].value);
  memcpy(state_in[1]->dl.data, start, sizeof start);

  graft_exec exec = {.struct_size = sizeof exec, .device_type = kDLCPU, .flags = GRAFT_X_TRAINING};
  exec.workspace_bytes = plan.workspace_forward > plan.workspace_backward ? plan.workspace_forward
                                                                          : plan.workspace_backward;
  exec.workspace = aligned_alloc(256, (exec.workspace_bytes + 255) / 256 * 256);
  memset(exec.workspace, 0xFF, exec.workspace_bytes);
  graft_mixer_forward call = {.struct_size = sizeof call,
                              .n_params = n_params,
                              .n_state = plan.n_state,
                              .n_saved = plan.n_saved,
                              .n_taps = plan.n_taps,
                              .x = &x->dl,
                              .y = &y->dl,
                              .pad_mask = &mask->dl,
                              .params = (const DLTensor* const*)param_list,
                              .state_in = (const DLTensor* const*)in_list,
                              .state_out = out_list,
                              .saved = saved_list,
                              .taps = tap_list};
  if (mixer->v->forward(mixer, &exec, &call, &error) != GRAFT_OK) die("forward", &error);
  worst = 0;
  compare("y", y, want_y, allowed);
  compare("state", state_out[0], want_state, allowed);
  compare("head_output", taps[0], want_head_output, allowed);
  compare("pre_output", taps[1], want_pre_output, allowed);
  compare("log_decay", taps[2], want_log_decay, allowed);
  compare("write_gate", taps[3], want_write_gate, allowed);
  if (memcmp(state_out[1]->dl.data, end, sizeof end) != 0) {
    ++failures;
    printf("next_position is not what it should be\n");
  }
  printf("float%d: outputs within %.1e", dtype.bits, worst);

  worst = 0;
  set(dy, d_y);
  set(dstate[0], d_state);
  dstate_list[1] = dstate_in_list[1] = NULL; /* a position has no gradient */
  set(dtaps[0], d_head_output);
  set(dtaps[1], d_pre_output);
  set(dtaps[2], d_log_decay);
  set(dtaps[3], d_write_gate);
  call.y = NULL;
  call.state_out = NULL;
  call.taps = NULL;
  memset(exec.workspace, 0xFF, exec.workspace_bytes);
  const graft_mixer_backward back = {.struct_size = sizeof back,
                                     .fwd = &call,
                                     .dy = &dy->dl,
                                     .dx = &dx->dl,
                                     .dparams = dparam_list,
                                     .dstate_out = (const DLTensor* const*)dstate_list,
                                     .dstate_in = dstate_in_list,
                                     .dtaps = (const DLTensor* const*)dtap_list};
  if (mixer->v->backward(mixer, &exec, &back, &error) != GRAFT_OK) die("backward", &error);
  compare("dx", dx, inputs[0].gradient, allowed);
  compare("dstate_in", dstate_in[0], inputs[1].gradient, allowed);
  for (uint32_t i = 0; i < n_params; ++i) {
    for (size_t k = 0; k < sizeof inputs / sizeof inputs[0]; ++k) {
      if (strcmp(inputs[k].name, specs[i]->name) == 0)
        compare(specs[i]->name, dparams[i], inputs[k].gradient, allowed);
    }
  }
  printf(", gradients within %.1e of the reference, relative to the largest\n", worst);
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: golden_test PLUGIN.so\n");
    return 2;
  }
  graft_mixer* const mixer = open_mixer(argv[1]);
  run(mixer, (DLDataType){kDLFloat, 64, 1}, 1e-12);
  run(mixer, (DLDataType){kDLFloat, 32, 1}, 2e-5);
  mixer->v->destroy(mixer);
  return failures == 0 ? 0 : 1;
}
