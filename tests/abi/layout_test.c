/* The layout of ABI 1.0, frozen: a size or an offset that moves breaks plugins that are already
 * built. Compiled by each compiler in each standard the header claims (see CMakeLists.txt), with
 * -Wpadded. */
#include "graft/graft.h"

#ifdef __cplusplus
#define CHECK(condition, text) static_assert(condition, text)
#else
#define CHECK(condition, text) _Static_assert(condition, text)
#endif
#define AT(type, field, offset) \
  CHECK(offsetof(type, field) == (offset), #type "." #field " has moved")
#define SIZE(type, size) CHECK(sizeof(type) == (size), "the size of " #type " has changed")
#define IS(name, value) CHECK((name) == (value), #name " has changed")

AT(graft_error, struct_size, 0);
AT(graft_error, code, 4);
AT(graft_error, where, 8);
AT(graft_error, message, 136);
SIZE(graft_error, 1024);

AT(graft_value, type, 0);
AT(graft_value, count, 4);
AT(graft_value, u, 8);
SIZE(graft_value, 16);

AT(graft_option, struct_size, 0);
AT(graft_option, flags, 4);
AT(graft_option, key, 8);
AT(graft_option, doc, 16);
AT(graft_option, def, 24);
AT(graft_option, min, 40);
AT(graft_option, max, 56);
AT(graft_option, one_of, 72);
SIZE(graft_option, 80);

AT(graft_config, struct_size, 0);
AT(graft_config, count, 4);
AT(graft_config, keys, 8);
AT(graft_config, values, 16);
SIZE(graft_config, 24);

AT(graft_host, struct_size, 0);
AT(graft_host, abi, 4);
AT(graft_host, name, 8);
AT(graft_host, version, 16);
AT(graft_host, ctx, 24);
AT(graft_host, log, 32);
AT(graft_host, should_stop, 40);
AT(graft_host, get_extension, 48);
SIZE(graft_host, 56);

AT(graft_host_memory, struct_size, 0);
AT(graft_host_memory, reserved, 4);
AT(graft_host_memory, alloc, 8);
AT(graft_host_memory, free, 16);
SIZE(graft_host_memory, 24);

AT(graft_host_parallel, struct_size, 0);
AT(graft_host_parallel, reserved, 4);
AT(graft_host_parallel, num_threads, 8);
AT(graft_host_parallel, parallel_for, 16);
SIZE(graft_host_parallel, 24);

AT(graft_host_blas, struct_size, 0);
AT(graft_host_blas, reserved, 4);
AT(graft_host_blas, gemm, 8);
AT(graft_host_blas, spd_solve, 16);
SIZE(graft_host_blas, 24);

AT(graft_plugin, struct_size, 0);
AT(graft_plugin, reserved, 4);
AT(graft_plugin, id, 8);
AT(graft_plugin, vendor, 16);
AT(graft_plugin, url, 24);
AT(graft_plugin, version, 32);
AT(graft_plugin, license, 40);
AT(graft_plugin, build_tags, 48);
AT(graft_plugin, init, 56);
AT(graft_plugin, deinit, 64);
AT(graft_plugin, get_extension, 72);
SIZE(graft_plugin, 80);

AT(graft_negotiate_in, struct_size, 0);
AT(graft_negotiate_in, dlpack_major, 4);
AT(graft_negotiate_in, min_abi, 8);
AT(graft_negotiate_in, max_abi, 12);
AT(graft_negotiate_in, host_name, 16);
AT(graft_negotiate_in, host_version, 24);
SIZE(graft_negotiate_in, 32);

AT(graft_negotiate_out, struct_size, 0);
AT(graft_negotiate_out, abi, 4);
AT(graft_negotiate_out, plugin, 8);
SIZE(graft_negotiate_out, 16);

AT(graft_desc, struct_size, 0);
AT(graft_desc, n_options, 4);
AT(graft_desc, id, 8);
AT(graft_desc, alias, 16);
AT(graft_desc, name, 24);
AT(graft_desc, version, 32);
AT(graft_desc, license, 40);
AT(graft_desc, citation, 48);
AT(graft_desc, description, 56);
AT(graft_desc, caps, 64);
AT(graft_desc, options, 72);
AT(graft_desc, dtypes, 80);
AT(graft_desc, devices, 88);
AT(graft_desc, n_dtypes, 96);
AT(graft_desc, n_devices, 100);
SIZE(graft_desc, 104);

AT(graft_layer_info, struct_size, 0);
AT(graft_layer_info, layer, 4);
AT(graft_layer_info, n_layers, 8);
AT(graft_layer_info, n_heads, 12);
AT(graft_layer_info, n_kv_heads, 16);
AT(graft_layer_info, head_dim, 20);
AT(graft_layer_info, model_dim, 24);
AT(graft_layer_info, max_positions, 32);
AT(graft_layer_info, rope_theta, 40);
AT(graft_layer_info, rope_fraction, 48);
AT(graft_layer_info, rope_scaling, 56);
AT(graft_layer_info, family, 64);
AT(graft_layer_info, param_dtype, 72);
AT(graft_layer_info, flags, 76);
AT(graft_layer_info, norm_eps, 80);
AT(graft_layer_info, rope_inv_freq, 88);
AT(graft_layer_info, n_rope_freq, 96);
AT(graft_layer_info, reserved, 100);
AT(graft_layer_info, rope_attention_factor, 104);
SIZE(graft_layer_info, 112);

AT(graft_param_spec, struct_size, 0);
AT(graft_param_spec, flags, 4);
AT(graft_param_spec, name, 8);
AT(graft_param_spec, role, 16);
AT(graft_param_spec, axes, 24);
AT(graft_param_spec, domain, 32);
AT(graft_param_spec, doc, 40);
AT(graft_param_spec, shape, 48);
AT(graft_param_spec, ndim, 96);
AT(graft_param_spec, heads, 100);
AT(graft_param_spec, head_dim, 104);
AT(graft_param_spec, init, 108);
AT(graft_param_spec, init_a, 112);
AT(graft_param_spec, init_b, 120);
SIZE(graft_param_spec, 128);

AT(graft_tensor_spec, struct_size, 0);
AT(graft_tensor_spec, flags, 4);
AT(graft_tensor_spec, name, 8);
AT(graft_tensor_spec, axes, 16);
AT(graft_tensor_spec, doc, 24);
AT(graft_tensor_spec, shape, 32);
AT(graft_tensor_spec, ndim, 80);
AT(graft_tensor_spec, dtype, 84);
SIZE(graft_tensor_spec, 88);

AT(graft_exec, struct_size, 0);
AT(graft_exec, device_type, 4);
AT(graft_exec, device_id, 8);
AT(graft_exec, reserved, 12);
AT(graft_exec, flags, 16);
AT(graft_exec, stream, 24);
AT(graft_exec, workspace, 32);
AT(graft_exec, workspace_bytes, 40);
AT(graft_exec, seed, 48);
AT(graft_exec, offset, 56);
SIZE(graft_exec, 64);

AT(graft_plan_in, struct_size, 0);
AT(graft_plan_in, device_type, 4);
AT(graft_plan_in, device_id, 8);
AT(graft_plan_in, dtype, 12);
AT(graft_plan_in, flags, 16);
AT(graft_plan_in, batch, 24);
AT(graft_plan_in, tokens, 32);
SIZE(graft_plan_in, 40);

AT(graft_plan_out, struct_size, 0);
AT(graft_plan_out, n_saved, 4);
AT(graft_plan_out, n_state, 8);
AT(graft_plan_out, n_taps, 12);
AT(graft_plan_out, workspace_forward, 16);
AT(graft_plan_out, workspace_backward, 24);
AT(graft_plan_out, workspace_step, 32);
AT(graft_plan_out, saved, 40);
AT(graft_plan_out, state, 48);
AT(graft_plan_out, taps, 56);
SIZE(graft_plan_out, 64);

AT(graft_mixer_forward, struct_size, 0);
AT(graft_mixer_forward, n_params, 4);
AT(graft_mixer_forward, n_state, 8);
AT(graft_mixer_forward, n_saved, 12);
AT(graft_mixer_forward, n_taps, 16);
AT(graft_mixer_forward, reserved, 20);
AT(graft_mixer_forward, x, 24);
AT(graft_mixer_forward, y, 32);
AT(graft_mixer_forward, positions, 40);
AT(graft_mixer_forward, pad_mask, 48);
AT(graft_mixer_forward, seq_offsets, 56);
AT(graft_mixer_forward, params, 64);
AT(graft_mixer_forward, state_in, 72);
AT(graft_mixer_forward, state_out, 80);
AT(graft_mixer_forward, saved, 88);
AT(graft_mixer_forward, taps, 96);
SIZE(graft_mixer_forward, 104);

AT(graft_mixer_backward, struct_size, 0);
AT(graft_mixer_backward, reserved, 4);
AT(graft_mixer_backward, fwd, 8);
AT(graft_mixer_backward, dy, 16);
AT(graft_mixer_backward, dstate_out, 24);
AT(graft_mixer_backward, dtaps, 32);
AT(graft_mixer_backward, dx, 40);
AT(graft_mixer_backward, dparams, 48);
AT(graft_mixer_backward, dstate_in, 56);
SIZE(graft_mixer_backward, 64);

AT(graft_mixer_vtbl, struct_size, 0);
AT(graft_mixer_vtbl, param_schema, 4);
AT(graft_mixer_vtbl, destroy, 8);
AT(graft_mixer_vtbl, param_specs, 16);
AT(graft_mixer_vtbl, plan, 24);
AT(graft_mixer_vtbl, forward, 32);
AT(graft_mixer_vtbl, backward, 40);
AT(graft_mixer_vtbl, step, 48);
AT(graft_mixer_vtbl, get_extension, 56);
SIZE(graft_mixer_vtbl, 64);

AT(graft_mixer, v, 0);
AT(graft_mixer, self, 8);
SIZE(graft_mixer, 16);

AT(graft_mixer_factory, struct_size, 0);
AT(graft_mixer_factory, count, 4);
AT(graft_mixer_factory, descs, 8);
AT(graft_mixer_factory, create, 16);
SIZE(graft_mixer_factory, 24);

AT(graft_mixer_migrate, struct_size, 0);
AT(graft_mixer_migrate, reserved, 4);
AT(graft_mixer_migrate, migrate, 8);
SIZE(graft_mixer_migrate, 16);

AT(graft_mixer_domain, struct_size, 0);
AT(graft_mixer_domain, reserved, 4);
AT(graft_mixer_domain, set, 8);
SIZE(graft_mixer_domain, 16);

AT(graft_role_need, role, 0);
AT(graft_role_need, flags, 8);
AT(graft_role_need, reserved, 12);
SIZE(graft_role_need, 16);

AT(graft_named_tensor, struct_size, 0);
AT(graft_named_tensor, flags, 4);
AT(graft_named_tensor, name, 8);
AT(graft_named_tensor, role, 16);
AT(graft_named_tensor, axes, 24);
AT(graft_named_tensor, domain, 32);
AT(graft_named_tensor, heads, 40);
AT(graft_named_tensor, head_dim, 44);
AT(graft_named_tensor, tensor, 48);
SIZE(graft_named_tensor, 56);

AT(graft_calibration_need, name, 0);
AT(graft_calibration_need, flags, 8);
AT(graft_calibration_need, max_sequences, 12);
SIZE(graft_calibration_need, 16);

AT(graft_init_args, struct_size, 0);
AT(graft_init_args, n_teacher, 4);
AT(graft_init_args, n_student, 8);
AT(graft_init_args, n_batches, 12);
AT(graft_init_args, layer, 16);
AT(graft_init_args, teacher, 24);
AT(graft_init_args, student, 32);
AT(graft_init_args, student_written, 40);
AT(graft_init_args, mixer, 48);
AT(graft_init_args, ctx, 56);
AT(graft_init_args, next_batch, 64);
AT(graft_init_args, rewind, 72);
AT(graft_init_args, probe, 80);
SIZE(graft_init_args, 88);

AT(graft_initializer_vtbl, struct_size, 0);
AT(graft_initializer_vtbl, n_needs, 4);
AT(graft_initializer_vtbl, needs, 8);
AT(graft_initializer_vtbl, n_calibration, 16);
AT(graft_initializer_vtbl, reserved, 20);
AT(graft_initializer_vtbl, calibration, 24);
AT(graft_initializer_vtbl, destroy, 32);
AT(graft_initializer_vtbl, run, 40);
AT(graft_initializer_vtbl, get_extension, 48);
SIZE(graft_initializer_vtbl, 56);

AT(graft_initializer, v, 0);
AT(graft_initializer, self, 8);
SIZE(graft_initializer, 16);

AT(graft_initializer_factory, struct_size, 0);
AT(graft_initializer_factory, count, 4);
AT(graft_initializer_factory, descs, 8);
AT(graft_initializer_factory, create, 16);
SIZE(graft_initializer_factory, 24);

AT(graft_signal_need, name, 0);
AT(graft_signal_need, flags, 8);
AT(graft_signal_need, reserved, 12);
SIZE(graft_signal_need, 16);

AT(graft_objective_args, struct_size, 0);
AT(graft_objective_args, n_signals, 4);
AT(graft_objective_args, signals, 8);
AT(graft_objective_args, grads, 16);
AT(graft_objective_args, loss, 24);
AT(graft_objective_args, grad_scale, 32);
AT(graft_objective_args, metric, 40);
AT(graft_objective_args, metric_ctx, 48);
SIZE(graft_objective_args, 56);

AT(graft_objective_vtbl, struct_size, 0);
AT(graft_objective_vtbl, n_needs, 4);
AT(graft_objective_vtbl, needs, 8);
AT(graft_objective_vtbl, destroy, 16);
AT(graft_objective_vtbl, workspace, 24);
AT(graft_objective_vtbl, run, 32);
AT(graft_objective_vtbl, get_extension, 40);
SIZE(graft_objective_vtbl, 48);

AT(graft_objective, v, 0);
AT(graft_objective, self, 8);
SIZE(graft_objective, 16);

AT(graft_objective_factory, struct_size, 0);
AT(graft_objective_factory, count, 4);
AT(graft_objective_factory, descs, 8);
AT(graft_objective_factory, create, 16);
SIZE(graft_objective_factory, 24);

IS(GRAFT_ABI_CURRENT, 0x00010000u);
IS(GRAFT_ABI(3, 7), 0x00030007u);
IS(GRAFT_ABI_MAJOR(GRAFT_ABI(3, 7)), 3u);
IS(GRAFT_ABI_MINOR(GRAFT_ABI(3, 7)), 7u);

IS(GRAFT_OK, 0);
IS(GRAFT_CANCELLED, 1);
IS(GRAFT_INVALID_ARGUMENT, 3);
IS(GRAFT_NOT_FOUND, 5);
IS(GRAFT_RESOURCE_EXHAUSTED, 8);
IS(GRAFT_FAILED_PRECONDITION, 9);
IS(GRAFT_OUT_OF_RANGE, 11);
IS(GRAFT_UNIMPLEMENTED, 12);
IS(GRAFT_INTERNAL, 13);
IS(GRAFT_DATA_LOSS, 15);
IS(GRAFT_ABI_MISMATCH, 100);

IS(GRAFT_BOOL, 1);
IS(GRAFT_INT, 2);
IS(GRAFT_FLOAT, 3);
IS(GRAFT_STRING, 4);
IS(GRAFT_INT_LIST, 5);
IS(GRAFT_FLOAT_LIST, 6);
IS(GRAFT_OPT_REQUIRED, 1);
IS(GRAFT_OPT_DEPRECATED, 2);
IS(GRAFT_OPT_SHAPES, 4);

IS(GRAFT_LOG_TRACE, 0);
IS(GRAFT_LOG_ERROR, 4);
IS(GRAFT_LOG_PLUGIN_MISBEHAVING, 5);
IS(GRAFT_LOG_HOST_MISBEHAVING, 6);

IS(GRAFT_CAP_BACKWARD, 0x1ull);
IS(GRAFT_CAP_STEP, 0x2ull);
IS(GRAFT_CAP_STATE_IO, 0x4ull);
IS(GRAFT_CAP_PAD_MASK, 0x8ull);
IS(GRAFT_CAP_VARLEN, 0x10ull);
IS(GRAFT_CAP_STRIDED, 0x20ull);
IS(GRAFT_CAP_DETERMINISTIC, 0x40ull);
IS(GRAFT_CAP_BATCH_INVARIANT, 0x80ull);
IS(GRAFT_CAP_THREAD_INVARIANT, 0x100ull);
IS(GRAFT_CAP_GRAPH_CAPTURE, 0x200ull);
IS(GRAFT_CAP_STATEFUL_GRAD, 0x400ull);
IS(GRAFT_CAP_TAPS_ONLY, 0x800ull);
IS(GRAFT_X_TRAINING, 0x1ull);
IS(GRAFT_X_DETERMINISTIC, 0x2ull);
IS(GRAFT_X_ACCUMULATE, 0x4ull);

IS(GRAFT_LAYER_QKV_BIAS, 1u);
IS(GRAFT_LAYER_O_BIAS, 2u);
IS(GRAFT_LAYER_QK_NORM, 4u);
IS(GRAFT_LAYER_PARALLEL_RESIDUAL, 8u);

IS(GRAFT_INIT_ZEROS, 0);
IS(GRAFT_INIT_ONES, 1);
IS(GRAFT_INIT_CONSTANT, 2);
IS(GRAFT_INIT_NORMAL, 3);
IS(GRAFT_INIT_UNIFORM, 4);
IS(GRAFT_INIT_EYE, 5);
IS(GRAFT_P_TRAINABLE, 1);
IS(GRAFT_P_NO_DECAY, 2);
IS(GRAFT_P_FP32, 4);
IS(GRAFT_P_OPTIONAL, 8);

/* A pedantic compiler wants a translation unit to hold something. */
typedef int graft_layout_is_frozen;
