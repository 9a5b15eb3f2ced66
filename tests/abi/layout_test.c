/* The layout of the ABI, held still: a size, an offset or a number that moves breaks plugins that
 * are already built. Compiled by each compiler in each standard the header claims (see
 * CMakeLists.txt), with -Wpadded; once more against the header as it was published
 * (GRAFT_PUBLISHED_1_0). */
#include "graft/graft.h"

#ifdef __cplusplus
#include <string_view>
#define CHECK(condition, text) static_assert(condition, text)
#define TEXT(name, string) CHECK(std::string_view(name) == string, #name " has changed")
#else
#define CHECK(condition, text) _Static_assert(condition, text)
#define TEXT(name, string) CHECK(sizeof(name) == sizeof(string), #name " has changed")
#endif
#define AT(type, field, offset) \
  CHECK(offsetof(type, field) == (offset), #type "." #field " has moved")
#define FROZEN(type, size) CHECK(sizeof(type) == (size), "the size of " #type " has changed")
#define IS(name, value) CHECK((name) == (value), #name " has changed")
/* Structs may have grown since. */
#ifdef GRAFT_PUBLISHED_1_0
#define SIZE FROZEN
#else
#define SIZE(type, size) CHECK(sizeof(type) >= (size), #type " has shrunk")
#endif

#include "v1_0/layout.inc"

#ifdef GRAFT_PUBLISHED_1_0
IS(GRAFT_ABI_CURRENT, 0x00010000u);
#else
/* ---- today. What grows is changed here, and its new fields and numbers are added below. */
IS(GRAFT_ABI_CURRENT, 0x00010000u);
#undef SIZE
#define SIZE FROZEN
SIZE(graft_error, 1024);
SIZE(graft_option, 80);
SIZE(graft_config, 24);
SIZE(graft_host, 56);
SIZE(graft_host_memory, 24);
SIZE(graft_host_parallel, 24);
SIZE(graft_host_blas, 24);
SIZE(graft_plugin, 80);
SIZE(graft_negotiate_in, 32);
SIZE(graft_negotiate_out, 16);
SIZE(graft_desc, 104);
SIZE(graft_layer_info, 112);
SIZE(graft_param_spec, 128);
SIZE(graft_tensor_spec, 88);
SIZE(graft_exec, 64);
SIZE(graft_plan_in, 40);
SIZE(graft_plan_out, 64);
SIZE(graft_mixer_forward, 104);
SIZE(graft_mixer_backward, 64);
SIZE(graft_mixer_vtbl, 64);
SIZE(graft_mixer_factory, 24);
SIZE(graft_mixer_migrate, 16);
SIZE(graft_mixer_domain, 16);
SIZE(graft_named_tensor, 56);
SIZE(graft_init_args, 88);
SIZE(graft_initializer_vtbl, 56);
SIZE(graft_initializer_factory, 24);
SIZE(graft_objective_args, 56);
SIZE(graft_objective_vtbl, 48);
SIZE(graft_objective_factory, 24);
#endif

/* A pedantic compiler wants a translation unit to hold something. */
typedef int graft_layout_is_frozen;
