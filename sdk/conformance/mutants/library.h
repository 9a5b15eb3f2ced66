/* The library around the plugin that includes this: PLUGIN_ID and library_extension() are the
 * plugin's. */
#ifndef GRAFT_CONFORMANCE_MUTANTS_LIBRARY_H_
#define GRAFT_CONFORMANCE_MUTANTS_LIBRARY_H_
#include <pthread.h>
#include <unistd.h>

#include "base.h"

static const void* GRAFT_CALL library_extension(const char* id);

static int users; /* inits without their deinit */

/* For create(). */
static graft_status expect_init(graft_error* error) {
  if (users > 0) return GRAFT_OK;
  return fail(error, GRAFT_FAILED_PRECONDITION, "library",
              "expected a call of init() before this one");
}

static void* idle(void* nothing) {
  pause();
  return nothing;
}

static graft_status GRAFT_CALL init(const graft_host* host, const char* library_path,
                                    graft_error* error) {
  (void)host;
  (void)library_path;
  (void)error;
  if (MUTANT_IS(PRINTS)) {
    puts("mutant: loaded");
    fflush(stdout);
  }
  if (MUTANT_IS(STARTS_THREAD)) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, idle, NULL) == 0) pthread_detach(thread);
  }
  ++users;
  return GRAFT_OK;
}

static void GRAFT_CALL deinit(void) { users = MUTANT_IS(INIT_FLAG) ? 0 : users - 1; }

static const graft_plugin library = {
    .struct_size = sizeof(graft_plugin),
    .id = PLUGIN_ID,
    .vendor = "graft",
    .url = "",
    .version = "1.0.0",
    .license = "Apache-2.0",
    .build_tags = "",
    .init = init,
    .deinit = deinit,
    .get_extension = library_extension,
};

GRAFT_EXPORT graft_status GRAFT_CALL graft_plugin_negotiate(const graft_negotiate_in* in,
                                                            graft_negotiate_out* out,
                                                            graft_error* error) {
  const bool spoken = in->min_abi <= GRAFT_ABI_CURRENT && GRAFT_ABI_CURRENT <= in->max_abi;
  if (!spoken && !MUTANT_IS(ANY_ABI)) {
    return fail(error, GRAFT_ABI_MISMATCH, "abi",
                "the host speaks graft ABI %u.%u to %u.%u, this plugin %u.%u",
                GRAFT_ABI_MAJOR(in->min_abi), GRAFT_ABI_MINOR(in->min_abi),
                GRAFT_ABI_MAJOR(in->max_abi), GRAFT_ABI_MINOR(in->max_abi),
                GRAFT_ABI_MAJOR(GRAFT_ABI_CURRENT), GRAFT_ABI_MINOR(GRAFT_ABI_CURRENT));
  }
  out->abi = GRAFT_ABI_CURRENT;
  out->plugin = &library;
  return GRAFT_OK;
}

#endif /* GRAFT_CONFORMANCE_MUTANTS_LIBRARY_H_ */
