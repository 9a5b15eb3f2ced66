/* Every struct of the ABI in the interface of a library, for abidw and abidiff
 * (surface_test.cmake): they see what offsets and sizes do not, such as the signature of a function
 * pointer. */
#include "graft/graft.h"

#define USE(type)                                         \
  GRAFT_EXPORT void surface_of_##type(const type* value); \
  void surface_of_##type(const type* value) { (void)value; }

USE(graft_error)
USE(graft_value)
USE(graft_option)
USE(graft_config)
USE(graft_host)
USE(graft_host_memory)
USE(graft_host_parallel)
USE(graft_host_blas)
USE(graft_plugin)
USE(graft_negotiate_in)
USE(graft_negotiate_out)
USE(graft_desc)
USE(graft_layer_info)
USE(graft_param_spec)
USE(graft_tensor_spec)
USE(graft_exec)
USE(graft_plan_in)
USE(graft_plan_out)
USE(graft_mixer_forward)
USE(graft_mixer_backward)
USE(graft_mixer_vtbl)
USE(graft_mixer)
USE(graft_mixer_factory)
USE(graft_mixer_migrate)
USE(graft_mixer_domain)
USE(graft_role_need)
USE(graft_calibration_need)
USE(graft_signal_need)
USE(graft_named_tensor)
USE(graft_init_args)
USE(graft_initializer_vtbl)
USE(graft_initializer)
USE(graft_initializer_factory)
USE(graft_objective_args)
USE(graft_objective_vtbl)
USE(graft_objective)
USE(graft_objective_factory)

graft_status graft_plugin_negotiate(const graft_negotiate_in* in, graft_negotiate_out* out,
                                    graft_error* error) {
  (void)in, (void)out, (void)error;
  return GRAFT_OK;
}
