/* The mathematics of a Kimi Delta Attention block, without the ABI around it: kernel.c computes
 * what plugin.c asks for. All numbers of a call are float, or all are double. */
#ifndef KDA_KERNEL_H_
#define KDA_KERNEL_H_
#include <stdbool.h>

#include "graft/graft.h"

/* Parameters, in the order of param_specs for those that a configuration has. */
enum kda_param {
  PARAM_Q,
  PARAM_Q_BIAS,
  PARAM_K,
  PARAM_K_BIAS,
  PARAM_V,
  PARAM_V_BIAS,
  PARAM_DECAY_IN, /* the two factors of a low-rank gate; a full-rank one has the second alone */
  PARAM_DECAY,
  PARAM_DT_BIAS,
  PARAM_A_LOG,
  PARAM_WRITE,
  PARAM_WRITE_BIAS,
  PARAM_GATE_IN,
  PARAM_GATE,
  PARAM_GATE_BIAS,
  PARAM_NORM,
  PARAM_O,
  PARAM_O_BIAS,
  N_PARAMS
};

/* What the forward pass computes for each token and the backward pass reads again. */
enum kda_activation {
  ACT_Q,
  ACT_K,
  ACT_V,
  ACT_DECAY_LOW,
  ACT_DECAY, /* before softplus */
  ACT_WRITE, /* before sigmoid */
  ACT_GATE_LOW,
  ACT_GATE, /* before sigmoid */
  ACT_HEAD, /* what the recurrence gives */
  N_ACTIVATIONS
};

/* A block's sizes and options. Queries, keys and values of a head are all `dim` wide. */
typedef struct kda_block {
  int64_t model, heads, dim;
  int64_t decay_rank, gate_rank; /* 0: full rank */
  bool silu_q, silu_k, silu_v;
  double norm_eps;
  int32_t n_rope; /* pairs of a head that are rotated; 0: no RoPE */
  const double* rope_inv_freq;
  double rope_factor;
} kda_block;

/* Entries of an activation per token; 0 where the block has it not. */
int64_t kda_width(const kda_block* block, int activation);

/* The backward pass starts from states kept every so many tokens. */
enum { KDA_SEGMENT = 32 };

/* One call. Tensors are row-major without gaps; NULL is "not there" or "not wanted". */
typedef struct kda_call {
  const kda_block* block;
  const graft_host* host;
  const graft_host_blas* blas;         /* NULL: plain loops */
  const graft_host_parallel* parallel; /* NULL: one thread */
  int64_t batch, tokens;
  int64_t slots; /* heads computed at once, each with its own scratch memory */
  const void* x;
  const uint8_t* real; /* the pad mask */
  const int64_t* positions;
  const void* params[N_PARAMS];
  const void* state_in;
  const int64_t* next_in;
  /* Written by forward, read by backward. `checkpoints` NULL: inference. */
  void* activations[N_ACTIVATIONS];
  void* checkpoints; /* [B,H,ceil(T / KDA_SEGMENT),dim,dim] */
  /* Written by forward. */
  void* y;
  void* state_out;
  int64_t* next_out;
  void *head_output, *pre_output, *log_decay, *write_gate;
  /* Scratch memory, by kda_lay_out_*(). */
  void* x0;            /* x with zeros at pads */
  void *cosine, *sine; /* [B,T,n_rope] */
  void* pre;           /* [B,T,H*dim] */
  void* head_scratch;  /* `slots` times what a head needs */
  int64_t* position;   /* [B,T] */
} kda_call;

typedef struct kda_gradients {
  const void *dy, *dstate_out;
  const void *dhead_output, *dpre_output, *dlog_decay, *dwrite_gate;
  void *dx, *dstate_in;
  void* dparams[N_PARAMS];
  bool accumulate; /* dparams += */
  /* Scratch memory. */
  void* dy0; /* dy with zeros at pads */
  void* dpre;
  void* dactivations[N_ACTIVATIONS];
  void* partial; /* [B,H,dim+1]: a head's part in the gradients of norm weight and A_log */
} kda_gradients;

/* Points the call's (and gradients') scratch memory into `workspace` and gives its size in bytes;
 * NULL asks for the size. In inference the activations lie there too. */
uint64_t kda_lay_out_forward(kda_call* call, size_t real_size, bool training, void* workspace);
uint64_t kda_lay_out_backward(kda_call* call, kda_gradients* gradients, size_t real_size,
                              void* workspace);

/* What a token and a head need of it, in numbers. */
int64_t kda_token_size(const kda_block* block);
int64_t kda_forward_head_size(const kda_block* block);
int64_t kda_backward_head_size(const kda_block* block);

/* Fills call->position, and call->next_out. */
void kda_find_positions(const kda_call* call);
void kda_write_next_positions(const kda_call* call);

graft_status kda_forward_f32(const kda_call* call, graft_error* error);
graft_status kda_forward_f64(const kda_call* call, graft_error* error);
graft_status kda_backward_f32(const kda_call* call, const kda_gradients* gradients,
                              graft_error* error);
graft_status kda_backward_f64(const kda_call* call, const kda_gradients* gradients,
                              graft_error* error);

#endif /* KDA_KERNEL_H_ */
