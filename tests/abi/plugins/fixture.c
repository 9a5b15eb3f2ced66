/* A minimal plugin with one mixer whose parts CMakeLists.txt replaces one at a time: each fixture
 * is this file with one thing wrong. FIX_* are the parts and their right values. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "graft/graft.h"

#ifndef FIX_ID
#define FIX_ID "org.example.fixture"
#endif
#ifndef FIX_ALIAS
#define FIX_ALIAS "fixture"
#endif
#ifndef FIX_TAGS
#define FIX_TAGS ""
#endif
#ifndef FIX_CAPS
#define FIX_CAPS 0
#endif
#ifndef FIX_PICKED_ABI
#define FIX_PICKED_ABI GRAFT_ABI_CURRENT
#endif
#ifndef FIX_NEGOTIATE_STATUS
#define FIX_NEGOTIATE_STATUS GRAFT_OK
#endif
#ifndef FIX_NEGOTIATE_MESSAGE
#define FIX_NEGOTIATE_MESSAGE ""
#endif
#ifndef FIX_PLUGIN
#define FIX_PLUGIN &library.plugin
#endif
#ifndef FIX_INIT
#define FIX_INIT init
#endif
#ifndef FIX_GET_EXTENSION
#define FIX_GET_EXTENSION library_extension
#endif
#ifndef FIX_DESCS
#define FIX_DESCS descriptions
#endif
#ifndef FIX_CREATE
#define FIX_CREATE create
#endif
#ifndef FIX_FORWARD
#define FIX_FORWARD forward
#endif
#ifndef FIX_DESTROY
#define FIX_DESTROY destroy
#endif
#ifndef FIX_STEP
#define FIX_STEP NULL
#endif
/* Bytes each struct says it has, more or less than ours. */
#ifndef FIX_GROWTH
#define FIX_GROWTH 0
#endif
#define SIZE_OF(type) ((uint32_t)(sizeof(type) + (FIX_GROWTH > 0 ? FIX_GROWTH : 0)))
#define SIZE_TO(type, last) \
  ((uint32_t)(FIX_GROWTH < 0 ? offsetof(type, last) + sizeof(((type*)0)->last) : SIZE_OF(type)))
/* What a newer side has behind the fields we know: never zero, so that a reader who goes too far
 * shows. */
#define TAIL unsigned char tail[FIX_GROWTH > 0 ? FIX_GROWTH : 8]
#define TAIL_BYTES \
  { 0xDB, 0xDB, 0xDB, 0xDB, 0xDB, 0xDB, 0xDB, 0xDB }

static int counts[4]; /* init, deinit, create, destroy */

static void destroy(graft_mixer* mixer) {
  ++counts[3];
  free(mixer);
}

static graft_status param_specs(graft_mixer* mixer, const graft_param_spec* const** specs,
                                uint32_t* n, graft_error* error) {
  static const struct {
    graft_param_spec spec;
    TAIL;
  } weight = {{SIZE_TO(graft_param_spec, init),
               GRAFT_P_TRAINABLE,
               "weight",
               GRAFT_ROLE_QUERY,
               "out,in",
               "",
               "",
               {2, 3},
               2,
               0,
               0,
               GRAFT_INIT_ONES,
               0,
               0},
              TAIL_BYTES};
  static const graft_param_spec* const all[] = {&weight.spec};
  (void)mixer, (void)error;
  *specs = all;
  *n = 1;
  return GRAFT_OK;
}

static graft_status plan(graft_mixer* mixer, const graft_plan_in* in, graft_plan_out* out,
                         graft_error* error) {
  (void)mixer, (void)in, (void)error;
  out->workspace_forward = 64;
  return GRAFT_OK;
}

static graft_status forward(graft_mixer* mixer, const graft_exec* exec,
                            const graft_mixer_forward* call, graft_error* error) {
  (void)mixer, (void)exec, (void)call, (void)error;
  return GRAFT_OK;
}

static const struct {
  graft_mixer_vtbl table;
  TAIL;
} mixer_table = {{SIZE_TO(graft_mixer_vtbl, forward), 1, FIX_DESTROY, param_specs, plan,
                  FIX_FORWARD, NULL, FIX_STEP, NULL},
                 TAIL_BYTES};

static const struct {
  graft_desc desc;
  TAIL;
} description = {{SIZE_TO(graft_desc, caps), 0, FIX_ID ".mixer", FIX_ALIAS, "Fixture", "1.0.0",
                  "Apache-2.0", "", "a mixer for tests", FIX_CAPS, NULL, NULL, NULL, 0, 0},
                 TAIL_BYTES};
static const graft_desc* const descriptions[] = {&description.desc};

static graft_status create(const char* id, const graft_layer_info* layer,
                           const graft_config* config, graft_mixer** out, graft_error* error) {
  (void)id, (void)layer, (void)config, (void)error;
  graft_mixer* mixer = malloc(sizeof *mixer);
  if (mixer == NULL) return GRAFT_RESOURCE_EXHAUSTED;
  mixer->v = &mixer_table.table;
  mixer->self = mixer;
  ++counts[2];
  *out = mixer;
  return GRAFT_OK;
}

static const struct {
  graft_mixer_factory factory;
  TAIL;
} factory = {{SIZE_OF(graft_mixer_factory), 1, FIX_DESCS, FIX_CREATE}, TAIL_BYTES};

static graft_status init(const graft_host* host, const char* path, graft_error* error) {
  (void)path, (void)error;
  ++counts[0];
  host->log(host, GRAFT_LOG_DEBUG, "init");
  return GRAFT_OK;
}

static graft_status failing_init(const graft_host* host, const char* path, graft_error* error) {
  (void)host, (void)path;
  strcpy(error->where, "init");
  strcpy(error->message, "no licence key on this machine");
  return GRAFT_FAILED_PRECONDITION;
}

static void deinit(void) { ++counts[1]; }

static const void* library_extension(const char* id) {
  if (strcmp(id, GRAFT_EXT_MIXER_FACTORY) == 0) return &factory;
  if (strcmp(id, "org.example.counts") == 0) return counts;
  return NULL;
}

static const struct {
  graft_plugin plugin;
  TAIL;
} library = {{SIZE_OF(graft_plugin), 0, FIX_ID, "graft", "", "1.0.0", "Apache-2.0", FIX_TAGS,
              FIX_INIT, deinit, FIX_GET_EXTENSION},
             TAIL_BYTES};

#ifdef FIX_UNDEFINED
int graft_fixture_nobody_defines_this(void);
int graft_fixture_calls_it(void);
int graft_fixture_calls_it(void) { return graft_fixture_nobody_defines_this(); }
#endif

#ifdef FIX_ENTRY
GRAFT_EXPORT int FIX_ENTRY(void);
int FIX_ENTRY(void) {
  (void)library, (void)failing_init, (void)counts;
  return 0;
}
#else
graft_status graft_plugin_negotiate(const graft_negotiate_in* in, graft_negotiate_out* out,
                                    graft_error* error) {
  (void)in, (void)failing_init;
#ifdef FIX_CRASH
  FIX_CRASH;
#endif
  error->code = FIX_NEGOTIATE_STATUS;
  strcpy(error->message, FIX_NEGOTIATE_MESSAGE);
  out->abi = FIX_PICKED_ABI;
  out->plugin = FIX_PLUGIN;
  return FIX_NEGOTIATE_STATUS;
}
#endif
