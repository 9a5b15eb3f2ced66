#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/train/sampler.h"

namespace graft {

// Pieces of documents that run through a model at once, one in each row and padded on the right: a
// causal model's output for a real token then is what it gives for the document alone, so packed
// documents cannot leak into each other whatever the mixer.
struct Batch {
  at::Tensor ids;     // [B,T] i64, 0 where padded
  at::Tensor labels;  // [B,T] i64, the next token; kNoLabel where the document ends or is padded
  at::Tensor mask;    // [B,T] u8, 1 = real; undefined when all are
  std::int64_t real = 0;      // tokens
  std::int64_t labelled = 0;  // tokens with a label
};

// All pieces of `rows` as few batches, none with more than a third of its tokens padding nor more
// tokens than `rows` hold. Rows without a border inside become one batch.
std::vector<Batch> make_batches(const std::vector<std::vector<Piece>>& rows);

}  // namespace graft
