#pragma once

#include <ATen/core/Tensor.h>
#include <graft/plugin.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "plugins/initializers/taylor/attention_statistics.h"

namespace graft::taylor {

// The float32 CPU tensor behind a DLTensor, without a copy; lives as long as the DLTensor does.
at::Tensor borrow(const DLTensor& tensor, std::string_view name);

// A batch of which the first `sequences` are to be used.
class BatchView {
 public:
  BatchView(const sdk::Batch& batch, int64_t sequences) : batch_(batch), sequences_(sequences) {}

  int64_t sequences() const { return sequences_; }
  BatchView first(int64_t sequences) const { return {batch_, sequences}; }
  bool has(std::string_view signal) const { return batch_.find(signal) != nullptr; }
  // [sequences, ...]; throws NOT_FOUND naming the signal, or INVALID_ARGUMENT when it has too few.
  at::Tensor signal(std::string_view name) const;
  // A tap of probe(), cut the same way.
  at::Tensor cut(const DLTensor& tap, std::string_view name) const;

 private:
  const sdk::Batch& batch_;
  int64_t sequences_;
};

// One pass over the first `limit` sequences (0 = all), body(const BatchView&). Reads no further
// batch than it needs, and ends early where the host has no more of the signal `limited`, which it
// may give for the first sequences only. Throws NOT_FOUND when the first batch lacks it already.
template <class Body>
void for_sequences(sdk::InitArgs& args, int64_t limit, const char* limited, Body&& body) {
  args.rewind();
  int64_t seen = 0;
  while (limit == 0 || seen < limit) {
    const auto batch = args.next_batch();
    if (!batch || (seen > 0 && batch->find(limited) == nullptr)) break;
    batch->at(limited);
    if (sdk::should_stop()) throw sdk::cancelled();
    const int64_t have = batch->at(GRAFT_SIGNAL_BLOCK_INPUT).shape()[0];
    const int64_t take = limit == 0 ? have : std::min(have, limit - seen);
    body(BatchView(*batch, take));
    seen += take;
  }
}

// Adds the batch's attention probabilities, [sequences, heads, T, T].
void add_attention(const BatchView& batch, int64_t heads, AttentionStatistics& statistics);

// [B, T, heads, dim] -> [heads, B * T, dim], contiguous.
at::Tensor by_head(const at::Tensor& tensor);

}  // namespace graft::taylor
