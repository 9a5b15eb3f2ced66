/* graft.h - the whole SDK ABI: C11, no includes but the vendored dlpack.h (major 1).
 *
 * The ABI is 0.x: it may still change with each minor number, and host and plugin must speak the same one.
 *
 * Rules (short form; the long form is docs/abi.md):
 *  R1 every struct starts with `struct_size`; the side that FILLS it writes sizeof. Where the caller hands a struct
 *     over to be filled (graft_error, graft_negotiate_out, graft_plan_out) it zeroes it and writes its sizeof first:
 *     that is the room there is, and the callee writes no field behind it.
 *  R2 structs only grow at the end, every field is 8-byte sized or explicitly paired: no hidden padding.
 *  R3 a reader never touches a field past struct_size (GRAFT_HAS); never compares sizes for equality.
 *  R4 who allocates frees; nothing allocated by one side is freed by the other.
 *  R5 no C++ exception, longjmp, signal or abort() leaves a call. No stdout/stderr: use host->log.
 *  R6 strings are UTF-8, NUL-terminated; plugin strings live until deinit, host strings until the call returns.
 *  R7 arrays of growable structs are arrays of POINTERS (an old plugin's element is shorter: indexing by
 *     sizeof would stride wrong). Only structs without struct_size (graft_value, graft_*_need) are frozen and packed.
 *  R8 thread tags: [main] one thread at a time per library; [inst] one thread at a time per instance,
 *     any OS thread; [any] reentrant.
 *
 * Tensors: row-major, `strides` filled, `byte_offset` 0, data aligned to 64 bytes, outputs overlapping neither inputs
 * nor each other, except where a comment says so. No elements (T = 0, B = 0) is legal, and then data may be NULL. A
 * plugin borrows them for the length of the call.
 *
 * Functions: a graft_status other than GRAFT_OK means that nothing was made and outputs are undefined; the instance
 * stays usable. Pointers to functions that may be NULL are marked [optional]. get_extension() everywhere gives NULL
 * for an id it does not know, and for NULL; what it gives lives as long as what it was asked of.
 */
#ifndef GRAFT_GRAFT_H_
#define GRAFT_GRAFT_H_
#include <stddef.h>
#include <stdint.h>
#include "dlpack/dlpack.h"
#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define GRAFT_EXPORT __declspec(dllexport)
#define GRAFT_CALL __cdecl
#else
#define GRAFT_EXPORT __attribute__((visibility("default")))
#define GRAFT_CALL
#endif

#define GRAFT_ABI(major, minor) (((uint32_t)(major) << 16) | (uint32_t)(minor))
#define GRAFT_ABI_CURRENT GRAFT_ABI(0, 1)
#define GRAFT_ABI_MAJOR(abi) ((uint32_t)(abi) >> 16)
#define GRAFT_ABI_MINOR(abi) ((uint32_t)(abi) & 0xffffu)
/* Is `field` within what the filler of *p knew? */
#define GRAFT_HAS(type, p, field) \
  ((p)->struct_size >= offsetof(type, field) + sizeof(((type*)0)->field))

/* ---------------------------------------------------------------- errors */
/* OK; CANCELLED: should_stop() said so; INVALID_ARGUMENT: a wrong option, shape, dtype or NULL; NOT_FOUND: no such id,
 * role, tap, or the end of a pass; RESOURCE_EXHAUSTED: no memory; FAILED_PRECONDITION: not in this state, on this
 * machine or with this matrix; OUT_OF_RANGE: a value outside its range; UNIMPLEMENTED: a thing one need not have;
 * INTERNAL: a bug, or an exception; DATA_LOSS: parameters that cannot be read; ABI_MISMATCH: no common version. */
typedef int32_t graft_status;
enum { GRAFT_OK = 0, GRAFT_CANCELLED = 1, GRAFT_INVALID_ARGUMENT = 3, GRAFT_NOT_FOUND = 5,
       GRAFT_RESOURCE_EXHAUSTED = 8, GRAFT_FAILED_PRECONDITION = 9, GRAFT_OUT_OF_RANGE = 11,
       GRAFT_UNIMPLEMENTED = 12, GRAFT_INTERNAL = 13, GRAFT_DATA_LOSS = 15, GRAFT_ABI_MISMATCH = 100 };

/* Caller-owned, caller-zeroed. The callee writes; nobody frees. `where` is a path such as
 * "config.chunk_size", "param:q_proj.weight", "tensor:x". Always NUL-terminated, cut at the end. */
typedef struct graft_error {
  uint32_t struct_size;
  graft_status code;
  char where[128];
  char message[888];
} graft_error;

/* ---------------------------------------------------------------- values, option schema */
enum { GRAFT_BOOL = 1, GRAFT_INT = 2, GRAFT_FLOAT = 3, GRAFT_STRING = 4, GRAFT_INT_LIST = 5, GRAFT_FLOAT_LIST = 6 };
typedef struct graft_value {
  uint32_t type;  /* GRAFT_BOOL ... */
  uint32_t count; /* lists: number of items; else 1 */
  union { int64_t i; double f; const char* s; const int64_t* il; const double* fl; } u; /* a bool is i: 0 or 1 */
} graft_value;

enum { GRAFT_OPT_REQUIRED = 1u << 0, GRAFT_OPT_DEPRECATED = 1u << 1, GRAFT_OPT_SHAPES = 1u << 2 /* changes parameter
       shapes: stored in the checkpoint and may not differ on load */ };
typedef struct graft_option {
  uint32_t struct_size;
  uint32_t flags;
  const char* key; /* dotted, below the component's TOML table: "feature_map.dim" */
  const char* doc; /* one line, used by --help */
  graft_value def;               /* def.type is the option's type, also where the value is required */
  graft_value min, max;          /* GRAFT_INT or GRAFT_FLOAT, inclusive, of each item of a list; type 0 = unbounded */
  const char* const* one_of;     /* NULL-terminated, for GRAFT_STRING; NULL = free */
} graft_option;

/* Complete and validated by the host against the schema: every option present, of the declared type, defaults filled.
 * Lives until the call returns. */
typedef struct graft_config {
  uint32_t struct_size;
  uint32_t count;
  const char* const* keys;
  const graft_value* values;
} graft_config;

/* ---------------------------------------------------------------- host */
/* Log levels. The last two blame the other side, for a layer that stands between. */
enum { GRAFT_LOG_TRACE, GRAFT_LOG_DEBUG, GRAFT_LOG_INFO, GRAFT_LOG_WARN, GRAFT_LOG_ERROR,
       GRAFT_LOG_PLUGIN_MISBEHAVING, GRAFT_LOG_HOST_MISBEHAVING };
/* What init() is given. Valid until the process ends; after the last deinit its services may be gone (NULL). */
typedef struct graft_host {
  uint32_t struct_size;
  uint32_t abi; /* negotiated */
  const char* name;
  const char* version;
  void* ctx;
  void (GRAFT_CALL* log)(const struct graft_host*, int32_t level, const char* message);            /* [any] */
  int32_t (GRAFT_CALL* should_stop)(const struct graft_host*);  /* [any] 1: end soon, with GRAFT_CANCELLED */
  const void* (GRAFT_CALL* get_extension)(const struct graft_host*, const char* id);               /* [any] */
} graft_host;

#define GRAFT_HOST_EXT_MEMORY "graft.host-memory/1" /* device memory from the host's caching allocator */
typedef struct graft_host_memory {
  uint32_t struct_size;
  uint32_t reserved;
  /* NULL: none left, a device this host does not serve, or an `align` that is no power of two. 0 bytes have an address;
   * alignment is 64 at least. free() takes the same device and stream, and NULL. */
  void* (GRAFT_CALL* alloc)(const graft_host*, DLDevice, void* stream, uint64_t bytes, uint64_t align); /* [any] */
  void (GRAFT_CALL* free)(const graft_host*, DLDevice, void* stream, void* p);                          /* [any] */
} graft_host_memory;

#define GRAFT_HOST_EXT_PARALLEL "graft.host-parallel/1" /* the host's one thread pool; plugins start no threads */
typedef struct graft_host_parallel {
  uint32_t struct_size;
  uint32_t reserved;
  int32_t (GRAFT_CALL* num_threads)(const graft_host*); /* [any] at least 1 */
  /* [any] Calls fn for pieces of [begin, end) of `grain` items or more (the last may be shorter) and returns when all
   * are done. worker < num_threads(), and no two pieces with one worker run at once. fn lets no exception out. */
  void (GRAFT_CALL* parallel_for)(const graft_host*, int64_t begin, int64_t end, int64_t grain,
                               void (GRAFT_CALL* fn)(void* arg, int64_t begin, int64_t end, int32_t worker),
                               void* arg);
} graft_host_parallel;

/* Dense algebra for plugins that link no LibTorch: on the exec's stream and the host's threads. Row-major, strides free;
 * float32, float64, or bf16 inputs with float32 accumulation. [any] */
#define GRAFT_HOST_EXT_BLAS "graft.host-blas/1"
typedef struct graft_host_blas {
  uint32_t struct_size;
  uint32_t reserved;
  /* c = alpha op(a) op(b) + beta c; 2-D, or 3-D with equal batch. op = transpose of the last two dims when trans_x. */
  graft_status (GRAFT_CALL* gemm)(const graft_host*, int32_t trans_a, int32_t trans_b, double alpha, const DLTensor* a,
                                  const DLTensor* b, double beta, DLTensor* c, void* stream, graft_error*);
  /* x := a^-1 x for symmetric positive definite a [n,n] and x [n,m]; solved in float64, stored in x's dtype.
   * GRAFT_FAILED_PRECONDITION when a is not positive definite. */
  graft_status (GRAFT_CALL* spd_solve)(const graft_host*, const DLTensor* a, DLTensor* x, void* stream, graft_error*);
} graft_host_blas;

/* ---------------------------------------------------------------- library entry */
/* A library stays loaded until the process ends, so everything here may be static. */
typedef struct graft_plugin {
  uint32_t struct_size;
  uint32_t reserved;
  const char* id;         /* reverse DNS of the library: "org.example.gdn-pack" */
  const char* vendor;
  const char* url;
  const char* version;    /* semver of the library */
  const char* license;    /* SPDX expression */
  const char* build_tags; /* "compiler=gcc-13;cxx11abi=1;libtorch=2.8.0;cudart=12.6" - "" when torch-free. A tag (but
                             the compiler) that host and plugin both have and that differs: the plugin is refused */
  /* [main] [optional] Before anything below. Counted: a library may be opened by several parts of a process, each with
   * a host of its own, and every init that succeeded has one deinit. `library_path` lives until the call returns. */
  graft_status (GRAFT_CALL* init)(const graft_host*, const char* library_path, graft_error*);
  void (GRAFT_CALL* deinit)(void); /* [main] [optional] after the last instance is destroyed; never at exit() */
  const void* (GRAFT_CALL* get_extension)(const char* id); /* [any] the factories: GRAFT_EXT_MIXER_FACTORY, ... */
} graft_plugin;

typedef struct graft_negotiate_in {
  uint32_t struct_size;
  uint32_t dlpack_major;
  uint32_t min_abi, max_abi; /* what the host speaks */
  const char* host_name;
  const char* host_version;
} graft_negotiate_in;
typedef struct graft_negotiate_out {
  uint32_t struct_size;
  uint32_t abi; /* picked by the plugin: the highest both speak; both sides use this one from here on */
  const graft_plugin* plugin;
} graft_negotiate_out;
/* The ONLY exported symbol. [main] No other plugin code runs first (no static constructors with effects). May be called
 * several times and gives the same plugin. GRAFT_ABI_MISMATCH when there is no common version. */
typedef graft_status (GRAFT_CALL* graft_plugin_negotiate_fn)(const graft_negotiate_in*, graft_negotiate_out*, graft_error*);
#define GRAFT_ENTRY_SYMBOL "graft_plugin_negotiate"
GRAFT_EXPORT graft_status GRAFT_CALL graft_plugin_negotiate(const graft_negotiate_in*, graft_negotiate_out*, graft_error*);

/* ---------------------------------------------------------------- shared descriptors */
/* Capability bits. Unknown bits are ignored by old hosts, so a bit may only ADD freedom. A bit whose function is NULL
 * is an error; a function whose bit is not set is not called. */
#define GRAFT_CAP_BACKWARD          (1ull << 0)
#define GRAFT_CAP_STEP              (1ull << 1)  /* O(1) decode with a fixed-size state */
#define GRAFT_CAP_STATE_IO          (1ull << 2)  /* forward can start from and return a state */
#define GRAFT_CAP_PAD_MASK          (1ull << 3)
#define GRAFT_CAP_VARLEN            (1ull << 4)  /* packed sequences via seq_offsets */
#define GRAFT_CAP_STRIDED           (1ull << 5)  /* accepts non-contiguous inputs */
#define GRAFT_CAP_DETERMINISTIC     (1ull << 6)  /* bitwise, same device, same inputs, flag set */
#define GRAFT_CAP_BATCH_INVARIANT   (1ull << 7)  /* row b does not depend on B or on other rows, bitwise */
#define GRAFT_CAP_THREAD_INVARIANT  (1ull << 8)
#define GRAFT_CAP_GRAPH_CAPTURE     (1ull << 9)  /* safe inside CUDA graph capture */
#define GRAFT_CAP_STATEFUL_GRAD     (1ull << 10) /* gradients through state_in/state_out */
#define GRAFT_CAP_TAPS_ONLY         (1ull << 11) /* forward with y NULL, outside of training: state and wanted taps only */

/* A component. Lives until the process ends; strings but id may be NULL or "". */
typedef struct graft_desc {
  uint32_t struct_size;
  uint32_t n_options;
  const char* id;          /* "org.example.gdn": stable for ever, unique among the library's components of this kind */
  const char* alias;       /* "gdn" - what --mixer takes; ids work too, and alone where plugins share an alias */
  const char* name;
  const char* version;
  const char* license;     /* SPDX; may differ from the library's */
  const char* citation;    /* BibTeX or URL; the host prints it in the run record */
  const char* description;
  uint64_t caps;
  const graft_option* const* options;
  const DLDataType* dtypes;   /* of x and y, n_dtypes of them */
  const DLDeviceType* devices;/* n_devices of them */
  uint32_t n_dtypes, n_devices;
} graft_desc;

/* graft_layer_info.flags: what the teacher's block has. */
#define GRAFT_LAYER_QKV_BIAS          (1u << 0)
#define GRAFT_LAYER_O_BIAS            (1u << 1)
#define GRAFT_LAYER_QK_NORM           (1u << 2)
#define GRAFT_LAYER_PARALLEL_RESIDUAL (1u << 3)

/* What the block replaces. Dimensions are the teacher's. Lives until the call returns: copy what you keep. */
typedef struct graft_layer_info {
  uint32_t struct_size;
  int32_t layer, n_layers, n_heads, n_kv_heads, head_dim;
  int64_t model_dim, max_positions;
  double rope_theta;       /* 0 = no RoPE */
  double rope_fraction;    /* Pythia: rotary_pct */
  const char* rope_scaling;/* "" | "llama3" | ... */
  const char* family;      /* "llama", "qwen3", "gpt-neox": a hint, never required */
  DLDataType param_dtype;
  uint32_t flags;          /* GRAFT_LAYER_* */
  double norm_eps;
  const double* rope_inv_freq; /* [n_rope_freq] inverse frequencies after scaling; pair i rotates dims (i, i + n_rope_freq)
                                  of the first 2*n_rope_freq dims of a head by position * rope_inv_freq[i] */
  int32_t n_rope_freq;     /* 0 = no RoPE */
  uint32_t reserved;
  double rope_attention_factor; /* cos and sin are multiplied by it; 1 for most scalings */
} graft_layer_info;

/* Semantic roles are open strings; the well-known ones are macros. A third party adds its own under its
 * reverse DNS ("org.example.role.conv-mix") without asking anybody. */
/* A bias of a projection has the projection's role with "-bias" behind it: GRAFT_ROLE_QUERY_BIAS and so on. */
#define GRAFT_ROLE_QUERY       "graft.role.query"
#define GRAFT_ROLE_KEY         "graft.role.key"
#define GRAFT_ROLE_VALUE       "graft.role.value"
#define GRAFT_ROLE_OUTPUT      "graft.role.output"
#define GRAFT_ROLE_DECAY_GATE  "graft.role.decay-gate"
#define GRAFT_ROLE_DECAY_BIAS  "graft.role.decay-bias"   /* dt_bias */
#define GRAFT_ROLE_DECAY_SCALE "graft.role.decay-scale"  /* A_log: the factor of a decay gate */
#define GRAFT_ROLE_WRITE_GATE  "graft.role.write-gate"   /* beta / dt */
#define GRAFT_ROLE_WRITE_GATE_BIAS  "graft.role.write-gate-bias"
#define GRAFT_ROLE_OUTPUT_GATE "graft.role.output-gate"
#define GRAFT_ROLE_OUTPUT_GATE_BIAS "graft.role.output-gate-bias"
#define GRAFT_ROLE_FEATURE_MAP_Q "graft.role.feature-map-query"
#define GRAFT_ROLE_FEATURE_MAP_K "graft.role.feature-map-key"
#define GRAFT_ROLE_SHORT_CONV  "graft.role.short-conv"
#define GRAFT_ROLE_QUERY_BIAS  "graft.role.query-bias"
#define GRAFT_ROLE_KEY_BIAS    "graft.role.key-bias"
#define GRAFT_ROLE_VALUE_BIAS  "graft.role.value-bias"
#define GRAFT_ROLE_OUTPUT_BIAS "graft.role.output-bias"
#define GRAFT_ROLE_QUERY_NORM  "graft.role.query-norm"   /* [head_dim] RMSNorm weight of each query head */
#define GRAFT_ROLE_KEY_NORM    "graft.role.key-norm"
#define GRAFT_ROLE_NORM        "graft.role.norm"         /* RMSNorm weight of the head output */

/* How a parameter starts before an initializer sees it. CONSTANT: init_a. NORMAL: mean init_a, deviation init_b.
 * UNIFORM: from init_a to init_b. EYE: ones on the diagonal of the last two axes, for each index of those before. */
enum { GRAFT_INIT_ZEROS, GRAFT_INIT_ONES, GRAFT_INIT_CONSTANT, GRAFT_INIT_NORMAL, GRAFT_INIT_UNIFORM, GRAFT_INIT_EYE };
/* TRAINABLE: has a gradient. NO_DECAY: no weight decay. FP32: never kept in fewer bits. OPTIONAL: may be missing in a
 * checkpoint, and then keeps its default. */
enum { GRAFT_P_TRAINABLE = 1u << 0, GRAFT_P_NO_DECAY = 1u << 1, GRAFT_P_FP32 = 1u << 2, GRAFT_P_OPTIONAL = 1u << 3 };
/* Lives until the mixer is destroyed. */
typedef struct graft_param_spec {
  uint32_t struct_size;
  uint32_t flags;       /* GRAFT_P_* */
  const char* name;     /* stable for ever within param_schema: the checkpoint key */
  const char* role;
  const char* axes;     /* one label per axis, comma-separated: "heads*key,model"; "heads"; "channels,kernel" */
  const char* domain;   /* raw = f(natural value): "" (raw is the value itself) | "log" | "neg-log" | "logit" |
                           "softplus-inv" | "silu-inv". A gate's weight and bias carry the same domain: the gate is
                           f^-1(W x + b). */
  const char* doc;
  int64_t shape[6];     /* row-major; a projection is [out, in]: y = x W^T */
  int32_t ndim;
  int32_t heads;        /* heads on the "heads" axis, 0 = none: lets an initializer repeat GQA heads */
  int32_t head_dim;
  int32_t init;
  double init_a, init_b;
} graft_param_spec;

typedef struct graft_tensor_spec { /* state, saved, tap */
  uint32_t struct_size;
  uint32_t flags;
  const char* name;
  const char* axes;     /* "batch,heads,key,value" */
  const char* doc;
  int64_t shape[6];     /* for the given plan; batch first */
  int32_t ndim;
  DLDataType dtype;
} graft_tensor_spec;

/* Well-known taps (graft_plan_out.taps). The conformance kit checks W_o pre_output (+ b_o) == y where a mixer has an
 * output role. */
#define GRAFT_TAP_HEAD_OUTPUT "head_output" /* [B,T,H,d_v] what the recurrence gives, before norm and gate */
#define GRAFT_TAP_PRE_OUTPUT  "pre_output"  /* [B,T,H*d_v] after norm and gate, before the output projection */
#define GRAFT_TAP_LOG_DECAY   "log_decay"   /* [B,T,H] log of what the state is multiplied by before a token; 0 at pads */
#define GRAFT_TAP_WRITE_GATE  "write_gate"  /* [B,T,H] how strongly a token is written; 0 at pads */

/* ---------------------------------------------------------------- one call's surroundings */
#define GRAFT_X_TRAINING      (1ull << 0)
#define GRAFT_X_DETERMINISTIC (1ull << 1)
#define GRAFT_X_ACCUMULATE    (1ull << 2) /* dparams += ; otherwise dparams = */
typedef struct graft_exec {
  uint32_t struct_size;
  int32_t device_type, device_id;
  uint32_t reserved;
  uint64_t flags;
  void* stream;            /* cudaStream_t for kDLCUDA, else NULL. The device is set. All work goes here: no sync, no
                              default stream, no cudaMalloc, no cudaDeviceReset */
  void* workspace;         /* plan's bytes, 256-aligned, contents undefined on entry and exit */
  uint64_t workspace_bytes;
  uint64_t seed, offset;   /* counter-based randomness: same pair, same numbers. No global RNG */
} graft_exec;

typedef struct graft_plan_in {
  uint32_t struct_size;
  int32_t device_type, device_id;
  DLDataType dtype;        /* of x and y */
  uint64_t flags;          /* GRAFT_X_* */
  int64_t batch, tokens;
} graft_plan_in;
typedef struct graft_plan_out { /* pointers live until the next plan() on this instance or destroy */
  uint32_t struct_size;
  uint32_t n_saved, n_state, n_taps;
  uint64_t workspace_forward, workspace_backward, workspace_step;
  const graft_tensor_spec* const* saved; /* forward writes, backward reads; the host owns and may recompute them */
  const graft_tensor_spec* const* state;
  const graft_tensor_spec* const* taps;  /* optional intermediates an objective may ask for, by name */
} graft_plan_out;

/* ---------------------------------------------------------------- mixer */
typedef struct graft_mixer_forward {
  uint32_t struct_size;
  uint32_t n_params, n_state, n_saved, n_taps;
  uint32_t reserved;
  const DLTensor* x;               /* [B,T,model] */
  DLTensor* y;                     /* [B,T,model]; NULL = not wanted, with CAP_TAPS_ONLY */
  const DLTensor* positions;       /* [B,T] i64 or NULL */
  const DLTensor* pad_mask;        /* [B,T] u8, 1 = real; NULL = all real */
  const DLTensor* seq_offsets;     /* [N+1] i32, packed; NULL unless CAP_VARLEN */
  const DLTensor* const* params;   /* in param_specs order */
  const DLTensor* const* state_in; /* NULL = zero state */
  DLTensor* const* state_out;      /* NULL = not wanted; may alias state_in in step() */
  DLTensor* const* saved;          /* NULL = inference */
  DLTensor* const* taps;           /* NULL entries = not wanted */
} graft_mixer_forward;
typedef struct graft_mixer_backward {
  uint32_t struct_size;
  uint32_t reserved;
  const graft_mixer_forward* fwd;     /* the tensors of that forward; y, state_out and taps are NULL: save what you need */
  const DLTensor* dy;
  const DLTensor* const* dstate_out;  /* NULL = zero; otherwise GRAFT_CAP_STATEFUL_GRAD */
  const DLTensor* const* dtaps;       /* NULL, or NULL entries = zero */
  DLTensor* dx;                    /* NULL = not wanted; written (=) */
  DLTensor* const* dparams;        /* NULL, or NULL entries = frozen; = or += by GRAFT_X_ACCUMULATE */
  DLTensor* const* dstate_in;      /* NULL = not wanted; written (=) */
} graft_mixer_backward;

typedef struct graft_mixer graft_mixer;
typedef struct graft_mixer_vtbl {
  uint32_t struct_size;
  uint32_t param_schema;           /* bumped when names, shapes or meaning of params change */
  void (GRAFT_CALL* destroy)(graft_mixer*);                                                              /* [inst] */
  /* The same answer each time, owned by the mixer. */
  graft_status (GRAFT_CALL* param_specs)(graft_mixer*, const graft_param_spec* const** specs, uint32_t* n, graft_error*); /* [inst] */
  /* The only place that decides on sizes. forward, backward and step follow the plan of their sizes, dtype and flags and
   * allocate nothing that lasts; GRAFT_UNIMPLEMENTED for a dtype or device that is not among the declared. */
  graft_status (GRAFT_CALL* plan)(graft_mixer*, const graft_plan_in*, graft_plan_out*, graft_error*);                 /* [inst] */
  graft_status (GRAFT_CALL* forward)(graft_mixer*, const graft_exec*, const graft_mixer_forward*, graft_error*);      /* [inst] */
  graft_status (GRAFT_CALL* backward)(graft_mixer*, const graft_exec*, const graft_mixer_backward*, graft_error*);    /* CAP_BACKWARD */
  graft_status (GRAFT_CALL* step)(graft_mixer*, const graft_exec*, const graft_mixer_forward*, graft_error*);         /* CAP_STEP, T==1 */
  const void* (GRAFT_CALL* get_extension)(graft_mixer*, const char* id);                                  /* [any] [optional] */
} graft_mixer_vtbl;
struct graft_mixer { const graft_mixer_vtbl* v; void* self; };

#define GRAFT_EXT_MIXER_FACTORY "graft.mixer-factory/1"
typedef struct graft_mixer_factory {
  uint32_t struct_size;
  uint32_t count;
  const graft_desc* const* descs;
  /* [any] `id` is one of descs'. *out is set with GRAFT_OK only, is ready for every call, and belongs to the plugin until
   * its destroy(). */
  graft_status (GRAFT_CALL* create)(const char* id, const graft_layer_info*, const graft_config*, graft_mixer** out, graft_error*);
} graft_mixer_factory;

/* optional, per instance: read a checkpoint written under an older param_schema */
#define GRAFT_EXT_MIXER_MIGRATE "graft.mixer-migrate/1"
typedef struct graft_mixer_migrate {
  uint32_t struct_size;
  uint32_t reserved;
  /* Old parameters by name under `old_schema` -> new ones in param_specs order, already filled with their defaults.
   * GRAFT_UNIMPLEMENTED: this old_schema cannot be read. [inst] */
  graft_status (GRAFT_CALL* migrate)(graft_mixer*, uint32_t old_schema, uint32_t n_old, const char* const* old_names,
                                     const DLTensor* const* old_params, DLTensor* const* params, graft_error*);
} graft_mixer_migrate;

/* optional, per instance: natural value -> raw parameters ("half-life 32 tokens" -> A_log, dt_bias), for initializers.
 * After set() the quantity is `values[h]` for every head and token, whatever the input: the input-dependent part of the
 * gate is zeroed. */
#define GRAFT_EXT_MIXER_DOMAIN "graft.mixer-domain/1"
#define GRAFT_NATURAL_HALF_LIFE   "half-life"   /* tokens until a head's state has halved; > 0, inf = no decay */
#define GRAFT_NATURAL_WRITE_GATE  "write-gate"  /* 0..1: strength of a write */
#define GRAFT_NATURAL_OUTPUT_GATE "output-gate" /* factor of the head's output */
typedef struct graft_mixer_domain {
  uint32_t struct_size;
  uint32_t reserved;
  /* values: [n], n = heads. params: in param_specs order, float32 on the CPU, contiguous; only those behind `what` are
   * written, and written[i] (may be NULL) is set to 1 for them. GRAFT_UNIMPLEMENTED: this mixer, as configured, has no
   * such quantity or cannot make it constant. [inst] */
  graft_status (GRAFT_CALL* set)(graft_mixer*, const char* what, uint32_t n, const double* values,
                                 DLTensor* const* params, uint8_t* written, graft_error*);
} graft_mixer_domain;
/* reserved, exact build_tags match only: at::Tensor in, at::Tensor out, graph kept */
#define GRAFT_EXT_TORCH_NATIVE "graft.torch-native/1"

/* ---------------------------------------------------------------- initializer */
/* `required` 0: used when there. */
typedef struct graft_role_need { const char* role; uint32_t on_teacher, required; } graft_role_need;
typedef struct graft_named_tensor { /* a parameter or a signal, on the CPU in float32 unless its doc says otherwise */
  uint32_t struct_size, flags;
  const char* name; const char* role; const char* axes; const char* domain;
  int32_t heads, head_dim;
  DLTensor* tensor;
} graft_named_tensor;

/* Calibration signals of one layer, teacher-forced. An initializer names those it wants; the host computes no other. */
#define GRAFT_SIGNAL_BLOCK_INPUT     "block.input"     /* [B,T,model] x: the block's input, after the layer's norm */
#define GRAFT_SIGNAL_BLOCK_OUTPUT    "block.output"    /* [B,T,model] y: after the output projection */
#define GRAFT_SIGNAL_HEAD_CONTEXT    "head.context"    /* [B,T,H,d_v] attention-weighted values, before the output projection */
#define GRAFT_SIGNAL_ATTENTION_PROBS "attention.probs" /* [B,H,T,T] rows sum to 1 over s <= t */
#define GRAFT_SIGNAL_RESIDUAL        "residual"        /* [B,T,model] the stream the block's output is added to, plus that output */

typedef struct graft_calibration_need {
  const char* name;      /* GRAFT_SIGNAL_* */
  uint32_t required;     /* 0: used when there */
  uint32_t max_sequences;/* how many sequences it wants, 0 = all; the host gives it on the FIRST batches only */
} graft_calibration_need;

typedef struct graft_init_args {
  uint32_t struct_size;
  uint32_t n_teacher, n_student;
  uint32_t n_batches;                /* calibration batches of one pass; 0 when there is no calibration text */
  const graft_layer_info* layer;
  const graft_named_tensor* const* teacher;    /* read-only, same role vocabulary */
  const graft_named_tensor* const* student;    /* in param_specs order; already filled with the specs' defaults */
  uint8_t* student_written;          /* out: [n_student], 1 = this initializer set it */
  graft_mixer* mixer;                /* the target, for GRAFT_EXT_MIXER_DOMAIN; run it through probe() */
  void* ctx;                         /* first argument of the three calls below */
  /* Next batch of the pass, GRAFT_NOT_FOUND at its end; then rewind() starts another. The signals live until the next
   * next_batch() or rewind(). A signal is left out of a batch where the host has none (see max_sequences). */
  graft_status (GRAFT_CALL* next_batch)(void* ctx, const graft_named_tensor* const** signals, uint32_t* n, graft_error*);
  graft_status (GRAFT_CALL* rewind)(void* ctx, graft_error*);
  /* Runs the target mixer, with its parameters as they stand now, on the current batch's block.input; out[i] is the tap
   * `taps[i]` (or "y", the block's output) and lives until the next probe(), next_batch() or rewind(). NOT_FOUND names
   * an unknown tap and those there are. */
  graft_status (GRAFT_CALL* probe)(void* ctx, uint32_t n, const char* const* taps, const DLTensor** out, graft_error*);
} graft_init_args;
typedef struct graft_initializer graft_initializer;
/* Tables of an instance may depend on its configuration; they live until destroy(). One instance may serve several
 * layers, one after the other. */
typedef struct graft_initializer_vtbl {
  uint32_t struct_size;
  uint32_t n_needs;
  const graft_role_need* needs;         /* checked by the host before any weight is loaded */
  uint32_t n_calibration;
  uint32_t reserved;
  const graft_calibration_need* calibration;
  void (GRAFT_CALL* destroy)(graft_initializer*);
  graft_status (GRAFT_CALL* run)(graft_initializer*, const graft_exec*, const graft_init_args*, graft_error*);        /* [inst] */
  const void* (GRAFT_CALL* get_extension)(graft_initializer*, const char* id); /* [any] [optional] */
} graft_initializer_vtbl;
struct graft_initializer { const graft_initializer_vtbl* v; void* self; };
#define GRAFT_EXT_INITIALIZER_FACTORY "graft.initializer-factory/1"
typedef struct graft_initializer_factory {
  uint32_t struct_size;
  uint32_t count;
  const graft_desc* const* descs;
  graft_status (GRAFT_CALL* create)(const char* id, const graft_config*, graft_initializer** out, graft_error*);
} graft_initializer_factory;

/* ---------------------------------------------------------------- objective */
/* Signals, by name. The loss of a batch is a sum over real tokens divided by their number (or by their weight), so it
 * depends neither on padding nor on how a batch is split. */
#define GRAFT_SIGNAL_STUDENT_LOGITS "student.logits"       /* [N,V] */
#define GRAFT_SIGNAL_TEACHER_LOGITS "teacher.logits"       /* [N,V] */
#define GRAFT_SIGNAL_LABELS         "labels"               /* [N] i64 */
#define GRAFT_SIGNAL_STUDENT_HIDDEN "student.layer.hidden" /* [B,T,model] output of the converted block */
#define GRAFT_SIGNAL_TEACHER_HIDDEN "teacher.layer.hidden" /* [B,T,model] output of the teacher's block */
#define GRAFT_SIGNAL_STUDENT_TAP    "student.layer.tap:"   /* + tap name */
#define GRAFT_SIGNAL_LOSS_MASK      "loss_mask"            /* [B,T] (or [N]) u8, 1 = counts */
#define GRAFT_SIGNAL_TOKEN_WEIGHT   "token_weight"         /* [B,T] (or [N]) f32 >= 0, weight of a token */
/* The metric by which an objective tells what it divided its sum by: the tokens that count, or their weight. A host that
 * computes a batch in parts weighs them by it. */
#define GRAFT_METRIC_WEIGHT "weight"
typedef struct graft_signal_need { const char* name; uint32_t want_grad, optional; } graft_signal_need;
typedef struct graft_objective_args {
  uint32_t struct_size;
  uint32_t n_signals;
  const DLTensor* const* signals;    /* in needs order */
  DLTensor* const* grads;            /* dLoss/dsignal, written (=), already times grad_scale; NULL = not wanted */
  DLTensor* loss;                    /* f32 scalar on the device: no sync */
  double grad_scale;
  void (GRAFT_CALL* metric)(void* ctx, const char* name, const DLTensor* scalar); /* [optional] a figure for the log */
  void* metric_ctx;
} graft_objective_args;
typedef struct graft_objective graft_objective;
typedef struct graft_objective_vtbl {
  uint32_t struct_size;
  uint32_t n_needs;
  const graft_signal_need* needs;
  void (GRAFT_CALL* destroy)(graft_objective*);
  /* [inst] [optional] Bytes that run() wants for signals of these shapes; their data is not there yet. */
  graft_status (GRAFT_CALL* workspace)(graft_objective*, const graft_objective_args*, uint64_t* bytes, graft_error*);
  graft_status (GRAFT_CALL* run)(graft_objective*, const graft_exec*, const graft_objective_args*, graft_error*);     /* [inst] */
  const void* (GRAFT_CALL* get_extension)(graft_objective*, const char* id); /* [any] [optional] */
} graft_objective_vtbl;
struct graft_objective { const graft_objective_vtbl* v; void* self; };
#define GRAFT_EXT_OBJECTIVE_FACTORY "graft.objective-factory/1"
typedef struct graft_objective_factory {
  uint32_t struct_size;
  uint32_t count;
  const graft_desc* const* descs;
  graft_status (GRAFT_CALL* create)(const char* id, const graft_config*, graft_objective** out, graft_error*);
} graft_objective_factory;

#ifdef __cplusplus
}
#endif
#endif /* GRAFT_GRAFT_H_ */
