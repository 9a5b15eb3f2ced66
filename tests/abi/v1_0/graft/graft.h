/* graft.h - the whole SDK ABI: C11, no includes but the vendored dlpack.h (major 1).
 *
 * Versions: a plugin built with 1.m works in every host 1.n, n >= m. The host offers the range it speaks; the plugin
 * answers with one version in it, the highest it speaks, else GRAFT_ABI_MISMATCH (so one that needs 1.m is refused by
 * an older host). Its tables are the same whatever is picked, since several hosts in one process may negotiate. Minor:
 * fields at the end, new bits, numbers, ids; a side uses no value newer than the picked version. Major: all else.
 * Everything here is since 1.0; what a later minor adds says @since.
 *
 * Rules (short form; the long form is docs/abi.md):
 *  R1 every struct starts with `struct_size`; the side that FILLS it writes sizeof. Where the caller hands a struct
 *     over to be filled (graft_error, graft_negotiate_out, graft_plan_out) it zeroes it and writes its sizeof first:
 *     that is the room there is, the callee writes no field behind it, and may lower struct_size to what it wrote.
 *     No struct_size, frozen: graft_value, graft_*_need and the handles graft_mixer, graft_initializer,
 *     graft_objective; a handle's `v` stays the same until destroy(). A graft_error* may be NULL: nothing is written;
 *     else its `code` is the status returned, and its struct_size stays the caller's.
 *  R2 structs only grow at the end, every field is 8-byte sized or explicitly paired: no hidden padding. `reserved`,
 *     and flag bits that have no name here, are written 0 and not looked at.
 *  R3 a reader never touches a field past struct_size (GRAFT_HAS); never compares sizes for equality.
 *  R4 who allocates frees; nothing allocated by one side is freed by the other.
 *  R5 no C++ exception, longjmp, signal or abort() leaves a call. No stdout/stderr: use host->log.
 *  R6 strings are UTF-8, NUL-terminated; plugin strings live until deinit, host strings until the call returns. Where
 *     a string may be missing, NULL and "" are the same.
 *  R7 arrays of growable structs are arrays of POINTERS (an old plugin's element is shorter: indexing by
 *     sizeof would stride wrong). Only structs without struct_size (graft_value, graft_*_need) are frozen and packed.
 *     Where the count is 0 the array may be NULL.
 *  R8 thread tags: [main] one thread at a time per library; [inst] one thread at a time per instance,
 *     any OS thread; [any] reentrant.
 *  R9 names (roles, taps, signals, natural values, domains, metrics, extension ids) not in this header
 *     are under their author's reverse DNS ("org.example.role.conv-mix"): nobody is to be asked.
 *
 * Tensors: on the call's device, contiguous, row-major, `strides` filled, `byte_offset` 0, data aligned to 64 bytes,
 * outputs overlapping neither inputs nor each other, except where a comment says so. No elements (T = 0, B = 0) is legal,
 * and then data may be NULL; of a scalar (ndim 0) shape and strides may be NULL; the stride of an axis of size 1 says
 * nothing. Borrowed for the length of the call: the plugin keeps none.
 * Letters in shapes: B batch, T tokens, H query heads, G key-value heads, d_k and d_v width of a head, model the width of
 * the stream, N tokens of a batch in a row, V vocabulary.
 *
 * Functions: pointers are never NULL, of functions and of arguments, but where it is said: [optional] marks functions that
 * may be. A graft_status other than GRAFT_OK means that nothing was made and outputs are undefined; the instance stays
 * usable. get_extension() everywhere gives NULL for an id it does not know, and for NULL; what it gives, the same each
 * time, lives as long as what it was asked of.
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

/* A version as one number, ordered as versions are; GRAFT_ABI_CURRENT is that of this header. */
#define GRAFT_ABI(major, minor) (((uint32_t)(major) << 16) | (uint32_t)(minor))
#define GRAFT_ABI_CURRENT GRAFT_ABI(1, 0)
#define GRAFT_ABI_MAJOR(abi) ((uint32_t)(abi) >> 16)
#define GRAFT_ABI_MINOR(abi) ((uint32_t)(abi) & 0xffffu)
/* Is `field` within what the filler of *p knew? */
#define GRAFT_HAS(type, p, field) \
  ((p)->struct_size >= offsetof(type, field) + sizeof(((type*)0)->field))

/* ---------------------------------------------------------------- errors */
/* OK; CANCELLED: should_stop() said so; INVALID_ARGUMENT: a wrong option, shape, dtype or NULL; NOT_FOUND: no such id,
 * role, tap, or the end of a pass; RESOURCE_EXHAUSTED: no memory; FAILED_PRECONDITION: not in this state, on this
 * machine or with this matrix; OUT_OF_RANGE: a value outside its range; UNIMPLEMENTED: a thing one need not have;
 * INTERNAL: a bug, or an exception; DATA_LOSS: parameters that cannot be read; ABI_MISMATCH: no common version.
 * A reader takes a number that it does not know for INTERNAL. */
typedef int32_t graft_status;
enum { GRAFT_OK = 0, GRAFT_CANCELLED = 1, GRAFT_INVALID_ARGUMENT = 3, GRAFT_NOT_FOUND = 5,
       GRAFT_RESOURCE_EXHAUSTED = 8, GRAFT_FAILED_PRECONDITION = 9, GRAFT_OUT_OF_RANGE = 11,
       GRAFT_UNIMPLEMENTED = 12, GRAFT_INTERNAL = 13, GRAFT_DATA_LOSS = 15, GRAFT_ABI_MISMATCH = 100 };

/* Caller-owned, caller-zeroed. The callee writes, when it fails; nobody frees. Both texts are always NUL-terminated, cut
 * at the end, and may be "". */
typedef struct graft_error {
  uint32_t struct_size;
  graft_status code;     /* the status the call returned */
  char where[128];       /* a path: "config.chunk_size", "param:q_proj.weight", "tensor:x", "role:graft.role.query" */
  char message[888];     /* for people: what was expected, what came, and the way out */
} graft_error;

/* ---------------------------------------------------------------- values, option schema */
/* graft_value.type. 0 is no value. A reader refuses a type that it does not know. */
enum { GRAFT_BOOL = 1, GRAFT_INT = 2, GRAFT_FLOAT = 3, GRAFT_STRING = 4, GRAFT_INT_LIST = 5, GRAFT_FLOAT_LIST = 6 };
/* Frozen. What it points to lives as long as the struct it is in. */
typedef struct graft_value {
  uint32_t type;  /* GRAFT_BOOL ... */
  uint32_t count; /* lists: number of items; else 1 */
  union { int64_t i; double f; const char* s; const int64_t* il; const double* fl; } u; /* a bool is i: 0 or 1 */
} graft_value;

/* graft_option.flags. REQUIRED: the user has to give it. DEPRECATED: works, with a warning. SHAPES: changes parameter
 * shapes: stored in the checkpoint and may not differ on load. */
enum { GRAFT_OPT_REQUIRED = 1u << 0, GRAFT_OPT_DEPRECATED = 1u << 1, GRAFT_OPT_SHAPES = 1u << 2 };
/* One option of a component, filled by the plugin; lives until deinit. */
typedef struct graft_option {
  uint32_t struct_size;
  uint32_t flags;                /* GRAFT_OPT_* */
  const char* key;               /* dotted, below the component's TOML table: "feature_map.dim"; unique, stable for ever */
  const char* doc;               /* one line, used by --help; may be NULL */
  graft_value def;               /* the default, within the bounds below; def.type is the option's type, also where the
                                    value is required and the default not used */
  graft_value min, max;          /* GRAFT_INT or GRAFT_FLOAT, inclusive, of each item of a list; type 0 = unbounded */
  const char* const* one_of;     /* NULL-terminated, for GRAFT_STRING; NULL = free */
} graft_option;

/* Filled by the host; complete and checked by it against the schema: every option present, of the declared type,
 * defaults filled, no other key. Lives until the call returns. */
typedef struct graft_config {
  uint32_t struct_size;
  uint32_t count;                /* of keys and values */
  const char* const* keys;       /* the options' keys, in any order */
  const graft_value* values;     /* packed; values[i] is that of keys[i] */
} graft_config;

/* ---------------------------------------------------------------- host */
/* Log levels. The last two blame the other side, for a layer that stands between. A level that the host does not know
 * counts as ERROR. */
enum { GRAFT_LOG_TRACE, GRAFT_LOG_DEBUG, GRAFT_LOG_INFO, GRAFT_LOG_WARN, GRAFT_LOG_ERROR,
       GRAFT_LOG_PLUGIN_MISBEHAVING, GRAFT_LOG_HOST_MISBEHAVING };
/* What init() is given, filled by the host. It, its strings and its functions stay valid until the process ends; after
 * the last deinit get_extension() may give NULL for what it gave before. */
typedef struct graft_host {
  uint32_t struct_size;
  uint32_t abi;        /* the version negotiated with this host */
  const char* name;    /* of the program: for messages, never to be decided by */
  const char* version;
  void* ctx;           /* the host's own */
  void (GRAFT_CALL* log)(const struct graft_host*, int32_t level, const char* message); /* [any] GRAFT_LOG_*; one line,
                                                                                           without its end */
  int32_t (GRAFT_CALL* should_stop)(const struct graft_host*);  /* [any] 1: end soon, with GRAFT_CANCELLED. Cheap: long
                                                                   calls ask many times a second */
  const void* (GRAFT_CALL* get_extension)(const struct graft_host*, const char* id);    /* [any] GRAFT_HOST_EXT_* */
} graft_host;

#define GRAFT_HOST_EXT_MEMORY "graft.host-memory/1" /* device memory from the host's caching allocator */
typedef struct graft_host_memory {
  uint32_t struct_size;
  uint32_t reserved;
  /* [any] Memory for work on `stream` (NULL on the CPU), aligned to `align`, and to 64 at least; contents undefined.
   * 0 bytes have an address. NULL: none left, a device this host does not serve, or an `align` that is no power of two. */
  void* (GRAFT_CALL* alloc)(const graft_host*, DLDevice, void* stream, uint64_t bytes, uint64_t align);
  /* [any] What alloc() gave, with the same host, device and stream; or NULL, and then nothing is done. */
  void (GRAFT_CALL* free)(const graft_host*, DLDevice, void* stream, void* p);
} graft_host_memory;

#define GRAFT_HOST_EXT_PARALLEL "graft.host-parallel/1" /* the host's one thread pool; plugins start no threads */
typedef struct graft_host_parallel {
  uint32_t struct_size;
  uint32_t reserved;
  /* [any] At least 1. That of the calling thread; it may differ between calls: ask in the call that uses it. */
  int32_t (GRAFT_CALL* num_threads)(const graft_host*);
  /* [any] Calls fn for pieces of [begin, end) of `grain` items or more (the last may be shorter; a grain < 1 counts as 1)
   * and returns when all are done; begin >= end: fn is not called. 0 <= worker < num_threads(), and no two pieces with one
   * worker run at once. Worker numbers are of one parallel_for; a nested one runs on its caller's thread. fn lets no
   * exception out. */
  void (GRAFT_CALL* parallel_for)(const graft_host*, int64_t begin, int64_t end, int64_t grain,
                               void (GRAFT_CALL* fn)(void* arg, int64_t begin, int64_t end, int32_t worker),
                               void* arg);
} graft_host_parallel;

/* Dense algebra for plugins that link no LibTorch: on `stream` (the exec's; NULL on the CPU) and the host's threads.
 * Strides free. May be called from a piece of parallel_for. Results may depend on the number of threads. */
#define GRAFT_HOST_EXT_BLAS "graft.host-blas/1"
typedef struct graft_host_blas {
  uint32_t struct_size;
  uint32_t reserved;
  /* [any] c = alpha op(a) op(b) + beta c; op = transpose of the last two axes when trans_x is not 0. Either a, b, c are
   * all float64, or each is float32 or bf16 and sums are float32. All 2-D, or all 3-D with equal batch: no broadcasting.
   * c overlaps neither; beta 0: c is not read; k = 0: c = beta c. GRAFT_INVALID_ARGUMENT for anything else. */
  graft_status (GRAFT_CALL* gemm)(const graft_host*, int32_t trans_a, int32_t trans_b, double alpha, const DLTensor* a,
                                  const DLTensor* b, double beta, DLTensor* c, void* stream, graft_error*);
  /* [any] x := a^-1 x for symmetric positive definite a [n,n] and x [n,m], each float32 or float64; only a's lower
   * triangle is read. Solved in float64, stored in x's dtype. GRAFT_FAILED_PRECONDITION when a is not positive definite. */
  graft_status (GRAFT_CALL* spd_solve)(const graft_host*, const DLTensor* a, DLTensor* x, void* stream, graft_error*);
} graft_host_blas;

/* ---------------------------------------------------------------- library entry */
/* A library, filled by the plugin. It stays loaded until the process ends, so everything here may be static. Strings but
 * id may be NULL or "". */
typedef struct graft_plugin {
  uint32_t struct_size;
  uint32_t reserved;
  const char* id;         /* reverse DNS of the library: "org.example.gdn-pack"; stable for ever */
  const char* vendor;     /* who made it, for people */
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

/* Filled by the host; lives until the call returns. */
typedef struct graft_negotiate_in {
  uint32_t struct_size;
  uint32_t dlpack_major;     /* 1 */
  uint32_t min_abi, max_abi; /* what the host speaks, both included */
  const char* host_name;     /* as in graft_host */
  const char* host_version;
} graft_negotiate_in;
/* Filled by the plugin. */
typedef struct graft_negotiate_out {
  uint32_t struct_size;
  uint32_t abi; /* picked by the plugin: the highest both speak; both sides use this one from here on */
  const graft_plugin* plugin; /* the same in each call */
} graft_negotiate_out;
/* The ONLY exported symbol. [main] No other plugin code runs first (no static constructors with effects). May be called
 * several times and gives the same plugin. GRAFT_ABI_MISMATCH when there is no common version of the ABI or DLPack. */
typedef graft_status (GRAFT_CALL* graft_plugin_negotiate_fn)(const graft_negotiate_in*, graft_negotiate_out*, graft_error*);
#define GRAFT_ENTRY_SYMBOL "graft_plugin_negotiate"
GRAFT_EXPORT graft_status GRAFT_CALL graft_plugin_negotiate(const graft_negotiate_in*, graft_negotiate_out*, graft_error*);

/* ---------------------------------------------------------------- shared descriptors */
/* Capability bits of a mixer. Unknown bits are ignored by old hosts, so a bit may only ADD freedom. A bit whose function
 * is NULL is an error; a function whose bit is not set is not called. */
#define GRAFT_CAP_BACKWARD          (1ull << 0)  /* backward() */
#define GRAFT_CAP_STEP              (1ull << 1)  /* step(): O(1) decode with a fixed-size state; wants STATE_IO too */
#define GRAFT_CAP_STATE_IO          (1ull << 2)  /* forward can start from and return a state */
#define GRAFT_CAP_PAD_MASK          (1ull << 3)  /* pad_mask is kept; without it none is given */
#define GRAFT_CAP_VARLEN            (1ull << 4)  /* reserved: a host of ABI 1.0 packs nothing */
#define GRAFT_CAP_STRIDED           (1ull << 5)  /* accepts non-contiguous x and dy */
#define GRAFT_CAP_DETERMINISTIC     (1ull << 6)  /* with GRAFT_X_DETERMINISTIC: bitwise the same, on the same device with
                                                    the same inputs and number of threads */
#define GRAFT_CAP_BATCH_INVARIANT   (1ull << 7)  /* row b does not depend on B or on other rows, bitwise */
#define GRAFT_CAP_THREAD_INVARIANT  (1ull << 8)  /* results do not depend on the number of threads, bitwise */
#define GRAFT_CAP_GRAPH_CAPTURE     (1ull << 9)  /* safe inside CUDA graph capture */
#define GRAFT_CAP_STATEFUL_GRAD     (1ull << 10) /* gradients through state_in/state_out */
#define GRAFT_CAP_TAPS_ONLY         (1ull << 11) /* forward with y NULL, outside of training: state and wanted taps only */

/* A component, filled by the plugin. Lives until the process ends; strings but id may be NULL or "". */
typedef struct graft_desc {
  uint32_t struct_size;
  uint32_t n_options;
  const char* id;          /* "org.example.gdn": stable for ever, unique among the library's components of this kind */
  const char* alias;       /* "gdn" - what --mixer takes; ids work too, and alone where plugins share an alias */
  const char* name;        /* for people */
  const char* version;     /* semver of the component */
  const char* license;     /* SPDX; may differ from the library's */
  const char* citation;    /* BibTeX or URL; the host prints it in the run record */
  const char* description; /* one line */
  uint64_t caps;           /* GRAFT_CAP_*; 0 of an initializer or objective */
  const graft_option* const* options; /* [n_options] */
  const DLDataType* dtypes;   /* [n_dtypes] of x and y; objective: of logits or hidden signals; initializer: not read */
  const DLDeviceType* devices;/* [n_devices] where it computes; initializer: not read, it is kDLCPU */
  uint32_t n_dtypes, n_devices;
} graft_desc;

/* graft_layer_info.flags: what the teacher's block has. */
#define GRAFT_LAYER_QKV_BIAS          (1u << 0) /* biases of query, key and value projections */
#define GRAFT_LAYER_O_BIAS            (1u << 1) /* a bias of the output projection */
#define GRAFT_LAYER_QK_NORM           (1u << 2) /* RMSNorm of each query and key head, before RoPE */
#define GRAFT_LAYER_PARALLEL_RESIDUAL (1u << 3) /* the MLP reads the stream before attention's output is added */

/* What the block replaces, filled by the host. Dimensions are the teacher's. Lives until the call returns: copy what you
 * keep. */
typedef struct graft_layer_info {
  uint32_t struct_size;
  int32_t layer, n_layers; /* layer: from 0 */
  int32_t n_heads, n_kv_heads; /* n_heads is a multiple of n_kv_heads */
  int32_t head_dim;        /* of queries, keys and values alike */
  int64_t model_dim;       /* may differ from n_heads * head_dim */
  int64_t max_positions;   /* that the teacher was made for */
  double rope_theta;       /* for messages, as are the next two: n_rope_freq decides */
  double rope_fraction;    /* share of a head's dims that turns: Pythia's rotary_pct */
  const char* rope_scaling;/* "" | "llama3" | ... */
  const char* family;      /* "llama", "qwen3", "gpt-neox": a hint, never required */
  DLDataType param_dtype;  /* the teacher's, as the host computes with it; says nothing about params */
  uint32_t flags;          /* GRAFT_LAYER_* */
  double norm_eps;         /* of the teacher's norms */
  const double* rope_inv_freq; /* [n_rope_freq] inverse frequencies after scaling; pair i rotates dims (i, i + n_rope_freq)
                                  of the first 2*n_rope_freq dims of a head by position * rope_inv_freq[i] */
  int32_t n_rope_freq;     /* 0 = no RoPE */
  uint32_t reserved;
  double rope_attention_factor; /* cos and sin are multiplied by it; 1 for most scalings */
} graft_layer_info;

/* Semantic roles of parameters, by which an initializer finds what it fills, and in what the teacher's tensors are named;
 * docs/roles.md has the shape of each. At most one parameter of a mixer has a given role. A bias of a projection, conv or
 * feature map has its role with "-bias" behind it, macro or not. */
#define GRAFT_ROLE_QUERY            "graft.role.query"            /* projections, [out, model] */
#define GRAFT_ROLE_QUERY_BIAS       "graft.role.query-bias"
#define GRAFT_ROLE_KEY              "graft.role.key"
#define GRAFT_ROLE_KEY_BIAS         "graft.role.key-bias"
#define GRAFT_ROLE_VALUE            "graft.role.value"
#define GRAFT_ROLE_VALUE_BIAS       "graft.role.value-bias"
#define GRAFT_ROLE_OUTPUT           "graft.role.output"           /* [model, H*d_v] */
#define GRAFT_ROLE_OUTPUT_BIAS      "graft.role.output-bias"
#define GRAFT_ROLE_DECAY_GATE       "graft.role.decay-gate"       /* [H, model], or a row per channel */
#define GRAFT_ROLE_DECAY_GATE_BIAS  "graft.role.decay-gate-bias"  /* dt_bias */
#define GRAFT_ROLE_DECAY_SCALE      "graft.role.decay-scale"      /* A_log: the factor of a decay gate */
#define GRAFT_ROLE_WRITE_GATE       "graft.role.write-gate"       /* beta */
#define GRAFT_ROLE_WRITE_GATE_BIAS  "graft.role.write-gate-bias"
#define GRAFT_ROLE_OUTPUT_GATE      "graft.role.output-gate"
#define GRAFT_ROLE_OUTPUT_GATE_BIAS "graft.role.output-gate-bias"
#define GRAFT_ROLE_FEATURE_MAP_Q    "graft.role.feature-map-query"
#define GRAFT_ROLE_FEATURE_MAP_K    "graft.role.feature-map-key"
#define GRAFT_ROLE_SHORT_CONV       "graft.role.short-conv"       /* one conv over all streams (Mamba-2) */
#define GRAFT_ROLE_SHORT_CONV_Q     "graft.role.short-conv-query" /* one per stream: [channels, 1, width], the last tap */
#define GRAFT_ROLE_SHORT_CONV_K     "graft.role.short-conv-key"   /*   is the current token */
#define GRAFT_ROLE_SHORT_CONV_V     "graft.role.short-conv-value"
#define GRAFT_ROLE_QUERY_NORM       "graft.role.query-norm"       /* [d_k] RMSNorm weight of each query head */
#define GRAFT_ROLE_KEY_NORM         "graft.role.key-norm"
#define GRAFT_ROLE_NORM             "graft.role.norm"             /* RMSNorm weight of the head output */

/* How a parameter starts before an initializer sees it. CONSTANT: init_a. NORMAL: mean init_a, deviation init_b.
 * UNIFORM: from init_a to init_b. EYE: ones on the diagonal of the last two axes, for each index of those before. A host
 * refuses a kind that it does not know. */
enum { GRAFT_INIT_ZEROS, GRAFT_INIT_ONES, GRAFT_INIT_CONSTANT, GRAFT_INIT_NORMAL, GRAFT_INIT_UNIFORM, GRAFT_INIT_EYE };
/* TRAINABLE: has a gradient. NO_DECAY: no weight decay. FP32: never kept in fewer bits, by a host and mixer that agree to
 * do so for others (1.0: none). OPTIONAL: may be missing in a checkpoint, and then keeps its default. */
enum { GRAFT_P_TRAINABLE = 1u << 0, GRAFT_P_NO_DECAY = 1u << 1, GRAFT_P_FP32 = 1u << 2, GRAFT_P_OPTIONAL = 1u << 3 };
/* A parameter, filled by the mixer; lives until it is destroyed. Strings but name may be NULL or "". */
typedef struct graft_param_spec {
  uint32_t struct_size;
  uint32_t flags;       /* GRAFT_P_* */
  const char* name;     /* unique, stable for ever within param_schema: the checkpoint key */
  const char* role;     /* GRAFT_ROLE_*, or "": no initializer fills it by role */
  const char* axes;     /* one label per axis, comma-separated: "heads*key,model"; "heads"; "channels,one,kernel". Open
                           vocabulary; a*b = one axis of a x b, a outermost. "" = not said */
  const char* domain;   /* raw = f(natural value): "" (raw is the value itself) | "log" | "neg-log" | "logit" |
                           "softplus-inv" | "silu-inv" | "residual" (raw is the kernel less the identity kernel). A
                           gate's weight and bias carry the same domain: the gate is f^-1(W x + b). */
  const char* doc;      /* one line */
  int64_t shape[6];     /* [ndim], row-major; a projection is [out, in]: y = x W^T */
  int32_t ndim;         /* 0 to 6 */
  int32_t heads;        /* heads on the axis whose label has "heads", 0 = none: lets an initializer repeat GQA heads */
  int32_t head_dim;     /* what each head has there: key of "heads*key", 1 of "heads"; of a feature map, its features */
  int32_t init;         /* GRAFT_INIT_* */
  double init_a, init_b;
} graft_param_spec;

/* State, saved or tap: filled by the mixer, lives until its next plan() or destroy(). */
typedef struct graft_tensor_spec {
  uint32_t struct_size;
  uint32_t flags;       /* reserved */
  const char* name;     /* unique in its list; taps: GRAFT_TAP_* or the author's */
  const char* axes;     /* as in graft_param_spec: "batch,heads,key,value" */
  const char* doc;      /* one line; may be NULL */
  int64_t shape[6];     /* [ndim], for the given plan; of state and taps the first axis is batch */
  int32_t ndim;         /* 0 to 6 */
  DLDataType dtype;
} graft_tensor_spec;

/* Well-known taps (graft_plan_out.taps). The conformance kit checks W_o pre_output (+ b_o) == y where a mixer has an
 * output role. A mixer whose decay or write gate is per channel gives the mean over the channels. */
#define GRAFT_TAP_HEAD_OUTPUT "head_output" /* [B,T,H,d_v] what the recurrence gives, before norm and gate */
#define GRAFT_TAP_PRE_OUTPUT  "pre_output"  /* [B,T,H*d_v] after norm and gate, before the output projection */
#define GRAFT_TAP_LOG_DECAY   "log_decay"   /* [B,T,H] log of what the state is multiplied by before a token; 0 at pads */
#define GRAFT_TAP_WRITE_GATE  "write_gate"  /* [B,T,H] how strongly a token is written; 0 at pads */

/* ---------------------------------------------------------------- one call's surroundings */
#define GRAFT_X_TRAINING      (1ull << 0) /* forward: a backward may follow; workspaces and saved are planned for it */
#define GRAFT_X_DETERMINISTIC (1ull << 1) /* keep GRAFT_CAP_DETERMINISTIC, where it costs something */
#define GRAFT_X_ACCUMULATE    (1ull << 2) /* backward: dparams += ; otherwise dparams = */
/* Filled by the host; lives until the call returns. */
typedef struct graft_exec {
  uint32_t struct_size;
  int32_t device_type, device_id; /* DLDeviceType; 0 on the CPU */
  uint32_t reserved;
  uint64_t flags;          /* GRAFT_X_* */
  void* stream;            /* cudaStream_t for kDLCUDA, else NULL. The device is set. All work goes here: no sync, no
                              default stream, no cudaMalloc, no cudaDeviceReset */
  void* workspace;         /* at least the planned bytes, 256-aligned, contents undefined on entry and exit; NULL when 0,
                              as always for an initializer */
  uint64_t workspace_bytes;
  uint64_t seed, offset;   /* counter-based randomness: same pair, same numbers. No global RNG. backward gets its
                              forward's; a host may leave both 0 */
} graft_exec;

/* Filled by the host; lives until the call returns. */
typedef struct graft_plan_in {
  uint32_t struct_size;
  int32_t device_type, device_id; /* as in graft_exec. The device is not set */
  DLDataType dtype;        /* of x and y: one of desc's */
  uint64_t flags;          /* the exec's, less GRAFT_X_ACCUMULATE */
  int64_t batch, tokens;   /* B, T >= 0 */
} graft_plan_in;
/* Filled by the mixer; pointers live until the next plan() on this instance or destroy(). */
typedef struct graft_plan_out {
  uint32_t struct_size;
  uint32_t n_saved, n_state, n_taps;
  uint64_t workspace_forward, workspace_backward, workspace_step; /* bytes of exec.workspace for a call of this plan */
  const graft_tensor_spec* const* saved; /* [n_saved] forward writes with TRAINING, backward reads; the host owns and may
                                            recompute them by another forward */
  const graft_tensor_spec* const* state; /* [n_state] what forward and step carry from token to token */
  const graft_tensor_spec* const* taps;  /* [n_taps] optional intermediates an objective may ask for, by name */
} graft_plan_out;

/* ---------------------------------------------------------------- mixer */
/* The tensors of a forward or step, filled by the host: shapes and dtypes are those of param_specs and of the plan. */
typedef struct graft_mixer_forward {
  uint32_t struct_size;
  uint32_t n_params, n_state, n_saved, n_taps; /* param_specs' and the plan's, also where the array is NULL */
  uint32_t reserved;
  const DLTensor* x;               /* [B,T,model] in one of desc's dtypes. With CAP_STRIDED x and dy may have any strides
                                      >= 0 and are aligned to an element */
  DLTensor* y;                     /* [B,T,model] in x's dtype; NULL = not wanted, with CAP_TAPS_ONLY */
  const DLTensor* positions;       /* [B,T] i64: place of each token in its sequence, >= 0, rising over real tokens; at pads
                                      anything >= 0. NULL: real tokens are counted from 0, or on from where state_in ended */
  const DLTensor* pad_mask;        /* [B,T] u8, 1 = real; NULL = all real, and always without CAP_PAD_MASK. A pad (0,
                                      anywhere in a row) is as if it was not there: x, dy there are not read and may be NaN;
                                      y, taps and dx there are 0; state and dparams don't feel it */
  const DLTensor* seq_offsets;     /* reserved: NULL */
  const DLTensor* const* params;   /* [n_params] in param_specs order, none NULL: float32, or float64 where x is float64 */
  const DLTensor* const* state_in; /* [n_state] as state_out left it; NULL = zero state, and always without CAP_STATE_IO.
                                      Given in step() */
  DLTensor* const* state_out;      /* [n_state]; NULL = not wanted, and always without CAP_STATE_IO. Given in step(), where
                                      entry i may be the very tensor state_in[i], never a part of it */
  DLTensor* const* saved;          /* [n_saved]; not NULL where exec has TRAINING and n_saved > 0: a backward may follow;
                                      else NULL = inference */
  DLTensor* const* taps;           /* [n_taps]; NULL = none wanted, NULL entries = not wanted */
} graft_mixer_forward;
/* Filled by the host. dx, dparams, dstate and dtaps have shape and dtype of what they belong to; entries of integer states
 * are NULL. What is NULL need not be computed. */
typedef struct graft_mixer_backward {
  uint32_t struct_size;
  uint32_t reserved;
  const graft_mixer_forward* fwd;     /* the tensors of that forward: the same numbers, maybe at other addresses; y,
                                         state_out and taps are NULL: save what you need */
  const DLTensor* dy;                 /* [B,T,model] in y's dtype, never NULL */
  const DLTensor* const* dstate_out;  /* [n_state]; NULL = zero; otherwise GRAFT_CAP_STATEFUL_GRAD */
  const DLTensor* const* dtaps;       /* [n_taps]; NULL, or NULL entries = zero */
  DLTensor* dx;                    /* NULL = not wanted; written (=) */
  DLTensor* const* dparams;        /* [n_params]; NULL, or NULL entries = frozen; = or += by GRAFT_X_ACCUMULATE */
  DLTensor* const* dstate_in;      /* [n_state]; NULL = not wanted, otherwise GRAFT_CAP_STATEFUL_GRAD; written (=) */
} graft_mixer_backward;

typedef struct graft_mixer graft_mixer;
/* A token mixer of one layer: x -> y, causal, row b of the batch from row b alone. Filled by the plugin, the same for the
 * life of the instance. Calls with different parameters and states interleave on one instance, so nothing may be kept of
 * the contents of one for the next. Between a forward and its backward neither x nor parameters change; addresses may. */
typedef struct graft_mixer_vtbl {
  uint32_t struct_size;
  uint32_t param_schema;           /* bumped when names, shapes or meaning of params change: GRAFT_EXT_MIXER_MIGRATE */
  void (GRAFT_CALL* destroy)(graft_mixer*);                                                              /* [inst] */
  /* [inst] The same answer each time, owned by the mixer until destroy(). */
  graft_status (GRAFT_CALL* param_specs)(graft_mixer*, const graft_param_spec* const** specs, uint32_t* n, graft_error*);
  /* [inst] The only place that decides on sizes, and a pure function of *in: equal inputs, equal answers. The host calls it
   * right before forward, backward (with its forward's sizes and flags) and step (tokens 1); these follow it and allocate
   * nothing that lasts. Names, order and number of state and tap tensors are the same in every plan; state's shapes and
   * dtypes depend on batch and dtype alone, its first axis is batch, its rows are independent, and zero bytes are the start
   * of a sequence. Which optional tensors a call will have isn't known here. GRAFT_UNIMPLEMENTED for a dtype or device that
   * is not among the declared. */
  graft_status (GRAFT_CALL* plan)(graft_mixer*, const graft_plan_in*, graft_plan_out*, graft_error*);
  /* [inst] B rows of T tokens, from state_in. Writes all of y, state_out, saved and the wanted taps. */
  graft_status (GRAFT_CALL* forward)(graft_mixer*, const graft_exec*, const graft_mixer_forward*, graft_error*);
  /* [inst] [optional] with CAP_BACKWARD. The gradients of a forward with TRAINING; may be called again for the same one. */
  graft_status (GRAFT_CALL* backward)(graft_mixer*, const graft_exec*, const graft_mixer_backward*, graft_error*);
  /* [inst] [optional] with CAP_STEP. What forward gives for T = 1, quicker; without TRAINING. */
  graft_status (GRAFT_CALL* step)(graft_mixer*, const graft_exec*, const graft_mixer_forward*, graft_error*);
  const void* (GRAFT_CALL* get_extension)(graft_mixer*, const char* id);  /* [any] [optional] GRAFT_EXT_MIXER_MIGRATE, ... */
} graft_mixer_vtbl;
struct graft_mixer { const graft_mixer_vtbl* v; void* self; /* the plugin's own */ };

#define GRAFT_EXT_MIXER_FACTORY "graft.mixer-factory/1" /* graft_plugin.get_extension; NULL = this library has none */
typedef struct graft_mixer_factory {
  uint32_t struct_size;
  uint32_t count;
  const graft_desc* const* descs; /* [count], the same for the life of the process */
  /* [any] `id` is one of descs', else GRAFT_NOT_FOUND. *out is set with GRAFT_OK only, is ready for every call, and belongs
   * to the plugin until its destroy(). */
  graft_status (GRAFT_CALL* create)(const char* id, const graft_layer_info*, const graft_config*, graft_mixer** out,
                                    graft_error*);
} graft_mixer_factory;

/* optional, per instance: read a checkpoint written under an older param_schema */
#define GRAFT_EXT_MIXER_MIGRATE "graft.mixer-migrate/1"
typedef struct graft_mixer_migrate {
  uint32_t struct_size;
  uint32_t reserved;
  /* [inst] Old parameters by name under `old_schema` -> new ones in param_specs order, already filled with their defaults.
   * old_params, params: float32, CPU, contiguous. The instance was created with the checkpoint's options.
   * GRAFT_UNIMPLEMENTED: this old_schema cannot be read; GRAFT_DATA_LOSS: a parameter it needs is missing or misshapen. */
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
  /* [inst] values: [n], n = heads: a quantity per channel takes its head's value; other n: GRAFT_INVALID_ARGUMENT. params:
   * in param_specs order, float32 on the CPU, contiguous; only those behind `what` are written, and written[i] (`written`
   * may be NULL) is set to 1 for them. GRAFT_OUT_OF_RANGE: no head can have that value. GRAFT_UNIMPLEMENTED: this mixer,
   * as configured, has no such quantity or cannot make it constant. */
  graft_status (GRAFT_CALL* set)(graft_mixer*, const char* what, uint32_t n, const double* values,
                                 DLTensor* const* params, uint8_t* written, graft_error*);
} graft_mixer_domain;
/* reserved, exact build_tags match only: at::Tensor in, at::Tensor out, graph kept */
#define GRAFT_EXT_TORCH_NATIVE "graft.torch-native/1"

/* ---------------------------------------------------------------- needs */
/* Bits of the three need structs. Without REQUIRED: used when there. Bits without a name are 0. */
enum { GRAFT_NEED_REQUIRED = 1u << 0,  /* refused before any weight is loaded where it is missing */
       GRAFT_NEED_TEACHER  = 1u << 1,  /* role: of the source; without it, of the mixer to be filled */
       GRAFT_NEED_GRAD     = 1u << 2   /* signal: a gradient is wanted */ };
/* Frozen and packed; filled by the plugin, names never NULL. */
typedef struct graft_role_need        { const char* role; uint32_t flags, reserved; } graft_role_need;
typedef struct graft_calibration_need { const char* name;  /* GRAFT_SIGNAL_* of calibration */
                                        uint32_t flags, max_sequences; } graft_calibration_need; /* max_sequences: how many
  sequences it wants, 0 = all; rounded up to whole batches: the host gives the signal on the FIRST batches only */
typedef struct graft_signal_need      { const char* name; uint32_t flags, reserved; } graft_signal_need;

/* ---------------------------------------------------------------- initializer */
/* A parameter or a calibration signal, filled by the host: on the CPU in float32. Strings are never NULL. */
typedef struct graft_named_tensor {
  uint32_t struct_size, flags; /* flags: reserved */
  const char* name;            /* of a parameter: the checkpoint key; GRAFT_SIGNAL_* */
  const char* role;            /* as in graft_param_spec, as are all up to head_dim; "" of a signal */
  const char* axes;
  const char* domain;
  int32_t heads, head_dim;     /* 0 of a signal */
  DLTensor* tensor;            /* the student's are written by the initializer; all others are read only */
} graft_named_tensor;

/* Calibration signals of one layer. An initializer names those it wants; the host computes no other. Teacher-forced; or,
 * where the host converts on the student's stream, block.input is the student's and block.output what it should answer,
 * while head.context and attention.probs stay the teacher's. */
#define GRAFT_SIGNAL_BLOCK_INPUT     "block.input"     /* [B,T,model] x: the block's input, after the layer's norm */
#define GRAFT_SIGNAL_BLOCK_OUTPUT    "block.output"    /* [B,T,model] y: after the output projection */
#define GRAFT_SIGNAL_HEAD_CONTEXT    "head.context"    /* [B,T,H,d_v] attention-weighted values, before the output projection */
#define GRAFT_SIGNAL_ATTENTION_PROBS "attention.probs" /* [B,H,T,T] rows sum to 1 over s <= t */
#define GRAFT_SIGNAL_RESIDUAL        "residual"        /* [B,T,model] the stream behind the block: with its output added */

/* One layer to fill, by the host; lives until run() returns. next_batch, rewind and probe are called from run()'s thread
 * only. */
typedef struct graft_init_args {
  uint32_t struct_size;
  uint32_t n_teacher, n_student;
  uint32_t n_batches;                /* calibration batches of one pass; 0 when there is no calibration text */
  const graft_layer_info* layer;
  const graft_named_tensor* const* teacher;    /* [n_teacher] the block this one is filled from: the teacher's attention, or
                                                  the mixer of an earlier stage; roles tell which */
  const graft_named_tensor* const* student;    /* [n_student] in param_specs order, writable; already filled with the specs'
                                                  defaults */
  uint8_t* student_written;          /* [n_student] zeros; set to 1 for each that this initializer wrote */
  graft_mixer* mixer;                /* the target: ask it for extensions only (GRAFT_EXT_MIXER_DOMAIN), and run it through
                                        probe(). Its table may be older than yours (GRAFT_HAS), and may be the host's own
                                        stand-in */
  void* ctx;                         /* first argument of the three calls below */
  /* Next batch of the pass, GRAFT_NOT_FOUND at its end and where n_batches is 0; then rewind() starts another, with the same
   * batches. *signals: [*n], living until the next next_batch() or rewind(). A signal is left out of a batch where the host
   * has none (see max_sequences); the others have the same rows. */
  graft_status (GRAFT_CALL* next_batch)(void* ctx, const graft_named_tensor* const** signals, uint32_t* n, graft_error*);
  graft_status (GRAFT_CALL* rewind)(void* ctx, graft_error*);
  /* Runs the target mixer, with its parameters as they stand now, on the current batch's block.input; out: [n], out[i] is the
   * tap `taps[i]` (or "y", the block's output) and lives until the next probe(), next_batch() or rewind(). NOT_FOUND names
   * an unknown tap and those there are; FAILED_PRECONDITION: there is no current batch. */
  graft_status (GRAFT_CALL* probe)(void* ctx, uint32_t n, const char* const* taps, const DLTensor** out, graft_error*);
} graft_init_args;
typedef struct graft_initializer graft_initializer;
/* Fills a mixer's parameters, on the CPU. Tables of an instance may depend on its configuration; they live until destroy().
 * One instance may serve several layers, one after the other; several instances run at once. */
typedef struct graft_initializer_vtbl {
  uint32_t struct_size;
  uint32_t n_needs;
  const graft_role_need* needs;         /* [n_needs]; checked by the host before any weight is loaded */
  uint32_t n_calibration;
  uint32_t reserved;
  const graft_calibration_need* calibration; /* [n_calibration] signals it reads */
  void (GRAFT_CALL* destroy)(graft_initializer*);                                                        /* [inst] */
  /* [inst] Fills one layer. The same numbers for the same arguments, seed and offset. GRAFT_NOT_FOUND names a missing role. */
  graft_status (GRAFT_CALL* run)(graft_initializer*, const graft_exec*, const graft_init_args*, graft_error*);
  const void* (GRAFT_CALL* get_extension)(graft_initializer*, const char* id);                           /* [any] [optional] */
} graft_initializer_vtbl;
struct graft_initializer { const graft_initializer_vtbl* v; void* self; };
#define GRAFT_EXT_INITIALIZER_FACTORY "graft.initializer-factory/1"
typedef struct graft_initializer_factory {
  uint32_t struct_size;
  uint32_t count;
  const graft_desc* const* descs; /* [count] */
  /* [any] As graft_mixer_factory.create. */
  graft_status (GRAFT_CALL* create)(const char* id, const graft_config*, graft_initializer** out, graft_error*);
} graft_initializer_factory;

/* ---------------------------------------------------------------- objective */
/* Signals, by name: of one layer, or of the whole model. The loss of a batch is a sum over real tokens divided by their
 * number (or by their weight), so it depends neither on padding nor on how a batch is split. */
#define GRAFT_SIGNAL_STUDENT_LOGITS "student.logits"       /* [N,V] */
#define GRAFT_SIGNAL_TEACHER_LOGITS "teacher.logits"       /* [N,V] */
#define GRAFT_SIGNAL_LABELS         "labels"               /* [N] i64: the token to be foretold */
#define GRAFT_SIGNAL_STUDENT_HIDDEN "student.layer.hidden" /* [B,T,model] output of the converted block */
#define GRAFT_SIGNAL_TEACHER_HIDDEN "teacher.layer.hidden" /* [B,T,model] output of the teacher's block */
#define GRAFT_SIGNAL_STUDENT_TAP    "student.layer.tap:"   /* + tap name; shape and dtype are the tap's */
#define GRAFT_SIGNAL_LOSS_MASK      "loss_mask"            /* [B,T] (or [N]) u8, 1 = counts */
#define GRAFT_SIGNAL_TOKEN_WEIGHT   "token_weight"         /* [B,T] (or [N]) f32 >= 0, weight of a token */
/* The metric by which an objective tells what it divided its sum by: the tokens that count, or their weight. A host that
 * computes a batch in parts weighs them by it. Not reported: the host takes the mask's and token_weight's. */
#define GRAFT_METRIC_WEIGHT "weight"
/* One batch, or a part of one; filled by the host, lives until the call returns. */
typedef struct graft_objective_args {
  uint32_t struct_size;
  uint32_t n_signals;                /* n_needs */
  const DLTensor* const* signals;    /* [n_signals] in needs order; NULL only for optional ones that are not there */
  DLTensor* const* grads;            /* [n_signals] dLoss/dsignal in its signal's dtype, written (=), already times
                                        grad_scale; NULL, or NULL entries = not wanted */
  DLTensor* loss;                    /* f32, ndim 0, on the device: no sync. Not times grad_scale */
  double grad_scale;
  /* [optional] A figure for the log. Called during run() on its thread; scalar is float32 or float64, ndim 0, shape and
   * strides may be NULL, on the exec's device or the CPU. The host reads it, or enqueues its copy, before metric returns. */
  void (GRAFT_CALL* metric)(void* ctx, const char* name, const DLTensor* scalar);
  void* metric_ctx;                  /* metric's first argument */
} graft_objective_args;
typedef struct graft_objective graft_objective;
/* A loss and its gradients. Tables as in graft_initializer_vtbl. */
typedef struct graft_objective_vtbl {
  uint32_t struct_size;
  uint32_t n_needs;
  const graft_signal_need* needs;    /* [n_needs] signals it reads; a missing REQUIRED one refuses the stage */
  void (GRAFT_CALL* destroy)(graft_objective*);                                                          /* [inst] */
  /* [inst] [optional] Bytes that run() wants for signals of these shapes; their data is not there yet. NULL: none. */
  graft_status (GRAFT_CALL* workspace)(graft_objective*, const graft_objective_args*, uint64_t* bytes, graft_error*);
  /* [inst] Writes loss and the wanted gradients. */
  graft_status (GRAFT_CALL* run)(graft_objective*, const graft_exec*, const graft_objective_args*, graft_error*);
  const void* (GRAFT_CALL* get_extension)(graft_objective*, const char* id);                             /* [any] [optional] */
} graft_objective_vtbl;
struct graft_objective { const graft_objective_vtbl* v; void* self; };
#define GRAFT_EXT_OBJECTIVE_FACTORY "graft.objective-factory/1"
typedef struct graft_objective_factory {
  uint32_t struct_size;
  uint32_t count;
  const graft_desc* const* descs; /* [count] */
  /* [any] As graft_mixer_factory.create. */
  graft_status (GRAFT_CALL* create)(const char* id, const graft_config*, graft_objective** out, graft_error*);
} graft_objective_factory;

#ifdef __cplusplus
}
#endif
#endif /* GRAFT_GRAFT_H_ */
