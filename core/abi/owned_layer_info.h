#pragma once

#include <string>
#include <vector>

#include "core/abi/full_copy.h"

namespace graft {

// A layer's description with everything it points to.
class OwnedLayerInfo {
 public:
  explicit OwnedLayerInfo(const graft_layer_info& info)
      : info_(full_copy(&info)),
        scaling_(text_or_empty(info_.rope_scaling)),
        family_(text_or_empty(info_.family)) {
    if (info_.rope_inv_freq != nullptr)
      inv_freq_.assign(info_.rope_inv_freq, info_.rope_inv_freq + info_.n_rope_freq);
  }

  // Points into this object: valid while it lives and does not move.
  graft_layer_info c_info() const {
    graft_layer_info info = info_;
    info.rope_scaling = scaling_.c_str();
    info.family = family_.c_str();
    info.rope_inv_freq = inv_freq_.data();
    return info;
  }

 private:
  graft_layer_info info_;
  std::string scaling_, family_;
  std::vector<double> inv_freq_;
};

}  // namespace graft
