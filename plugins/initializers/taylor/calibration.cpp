#include "plugins/initializers/taylor/calibration.h"

#include <ATen/Functions.h>
#include <graft/torch_mixer.hpp>

namespace graft::taylor {

at::Tensor borrow(const DLTensor& tensor, std::string_view name) {
  sdk::check_dtype(tensor, name, sdk::float32);
  return sdk::torch_view(tensor, name);
}

at::Tensor BatchView::cut(const DLTensor& tap, std::string_view name) const {
  const at::Tensor tensor = borrow(tap, name);
  if (tensor.dim() == 0 || tensor.size(0) < sequences_) {
    throw sdk::Status(GRAFT_INVALID_ARGUMENT, sdk::cat("signal:", name),
                      sdk::cat("expected at least ", sequences_, " sequences, got shape ",
                               sdk::shape_string(tap)));
  }
  return tensor.narrow(0, 0, sequences_);
}

at::Tensor BatchView::signal(std::string_view name) const {
  return cut(batch_.at(name).tensor(), name);
}

void add_attention(const BatchView& batch, int64_t heads, AttentionStatistics& statistics) {
  const at::Tensor probs = batch.signal(GRAFT_SIGNAL_ATTENTION_PROBS).contiguous();
  if (probs.dim() != 4 || probs.size(1) != heads || probs.size(2) != probs.size(3)) {
    const std::string where = sdk::cat("signal:", GRAFT_SIGNAL_ATTENTION_PROBS);
    throw sdk::Status(GRAFT_INVALID_ARGUMENT, where,
                      sdk::cat("expected shape [sequences, ", heads, ", T, T], got ",
                               sdk::shape_string({probs.sizes().data(), probs.sizes().size()})));
  }
  statistics.add({probs.const_data_ptr<float>(), static_cast<std::size_t>(probs.numel())},
                 probs.size(0), probs.size(2));
}

at::Tensor by_head(const at::Tensor& tensor) {
  return tensor.permute({2, 0, 1, 3}).reshape({tensor.size(2), -1, tensor.size(3)});
}

}  // namespace graft::taylor
