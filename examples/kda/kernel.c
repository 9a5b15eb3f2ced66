/* What the two types of numbers have in common: sizes, scratch memory, positions. */
#include "kernel.h"

int64_t kda_width(const kda_block* block, int activation) {
  switch (activation) {
    case ACT_WRITE:
      return block->heads;
    case ACT_DECAY_LOW:
      return block->decay_rank;
    case ACT_GATE_LOW:
      return block->gate_rank;
    default:
      return block->heads * block->dim;
  }
}

/* ---------------------------------------------------------------- memory */

typedef struct arena {
  char* base;
  uint64_t used;
} arena;

static void* take(arena* from, int64_t count, size_t size) {
  void* const at = from->base == NULL ? NULL : from->base + from->used;
  from->used += ((uint64_t)count * size + 63) / 64 * 64;
  return at;
}

/* What reading one token of a head needs: query, key, decay; then error, output and a spare row. */
int64_t kda_token_size(const kda_block* block) { return 6 * block->dim; }
int64_t kda_forward_head_size(const kda_block* block) {
  return block->dim * block->dim + kda_token_size(block);
}
/* The states of a segment and the tokens between them, the gradient of the state, and spare rows.
 */
int64_t kda_backward_head_size(const kda_block* block) {
  return (KDA_SEGMENT + 2) * block->dim * block->dim + KDA_SEGMENT * kda_token_size(block) +
         6 * block->dim;
}

static void lay_out_common(kda_call* call, size_t size, int64_t head_size, arena* memory) {
  const kda_block* const block = call->block;
  const int64_t n = call->batch * call->tokens;
  call->x0 = take(memory, n * block->model, size);
  call->cosine = take(memory, n * block->n_rope, size);
  call->sine = take(memory, n * block->n_rope, size);
  call->position = take(memory, n, sizeof(int64_t));
  call->pre = take(memory, n * block->heads * block->dim, size);
  call->head_scratch = take(memory, call->slots * head_size, size);
}

uint64_t kda_lay_out_forward(kda_call* call, size_t size, bool training, void* workspace) {
  arena memory = {workspace, 0};
  lay_out_common(call, size, kda_forward_head_size(call->block), &memory);
  for (int i = 0; i < N_ACTIVATIONS && !training; ++i) {
    const int64_t width = kda_width(call->block, i);
    call->activations[i] = take(&memory, call->batch * call->tokens * width, size);
  }
  return memory.used;
}

uint64_t kda_lay_out_backward(kda_call* call, kda_gradients* gradients, size_t size,
                              void* workspace) {
  arena memory = {workspace, 0};
  const kda_block* const block = call->block;
  const int64_t n = call->batch * call->tokens;
  lay_out_common(call, size, kda_backward_head_size(block), &memory);
  gradients->dy0 = take(&memory, n * block->model, size);
  gradients->dpre = take(&memory, n * block->heads * block->dim, size);
  for (int i = 0; i < N_ACTIVATIONS; ++i)
    gradients->dactivations[i] = take(&memory, n * kda_width(block, i), size);
  gradients->partial = take(&memory, call->batch * block->heads * (block->dim + 1), size);
  return memory.used;
}

/* ---------------------------------------------------------------- positions */

/* The call's positions, or a count of the real tokens from where the state left off. */
void kda_find_positions(const kda_call* call) {
  for (int64_t b = 0; b < call->batch; ++b) {
    int64_t next = call->next_in == NULL ? 0 : call->next_in[b];
    for (int64_t t = b * call->tokens; t < (b + 1) * call->tokens; ++t) {
      const bool real = call->real == NULL || call->real[t] != 0;
      call->position[t] = call->positions != NULL ? call->positions[t] : next;
      next += real;
    }
  }
}

/* Behind the last real token; where there is none, what it was. */
void kda_write_next_positions(const kda_call* call) {
  if (call->next_out == NULL) return;
  for (int64_t b = 0; b < call->batch; ++b) {
    int64_t next = -1;
    for (int64_t t = b * call->tokens; t < (b + 1) * call->tokens; ++t) {
      const bool real = call->real == NULL || call->real[t] != 0;
      if (real && call->position[t] + 1 > next) next = call->position[t] + 1;
    }
    if (next < 0) next = call->next_in == NULL ? 0 : call->next_in[b];
    call->next_out[b] = next;
  }
}
