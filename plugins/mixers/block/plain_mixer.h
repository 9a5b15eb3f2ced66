// A mixer on plain pointers: what every such mixer checks before it computes, so that a wrong
// tensor is an error that names it.
#pragma once

#include <vector>

#include "graft/plugin.hpp"

namespace graft::mixers {

class PlainMixer : public sdk::Mixer {
 public:
  void plan(const graft_plan_in& in, sdk::Plan& out) final;

 protected:
  // The tensors and workspaces of calls of these sizes on the CPU; saved tensors where in.flags has
  // TRAINING.
  virtual void sizes(const graft_plan_in& in, sdk::Plan& plan) = 0;

  // Throw sdk::Status. Every tensor fits the last plan and `model_dim`, and the workspace has
  // `workspace` bytes.
  void check_forward(const graft_exec& exec, const graft_mixer_forward& call, int64_t model_dim,
                     uint64_t workspace) const;
  void check_backward(const graft_exec& exec, const graft_mixer_backward& call,
                      int64_t model_dim) const;

  const graft_plan_in& planned_for() const { return planned_for_; }
  const sdk::Plan& planned() const { return planned_; }
  // Whether a backward may follow this forward, which then fills the saved tensors.
  bool keeps(const graft_exec& exec, const graft_mixer_forward& call) const;

 private:
  void check_inputs(const graft_exec& exec, const graft_mixer_forward& call,
                    int64_t model_dim) const;
  void check_gradients(const graft_mixer_backward& call) const;

  graft_plan_in planned_for_{};
  sdk::Plan planned_;
  std::vector<const graft_tensor_spec*> state_specs_, tap_specs_,
      saved_specs_;  // point into planned_
};

// Entry i of a list that may be missing.
template <class Tensor>
Tensor* entry(Tensor* const* tensors, std::size_t i) {
  return tensors == nullptr ? nullptr : tensors[i];
}

// The numbers of a tensor that was checked; nullptr for none.
template <class T>
T* numbers(const DLTensor* tensor) {
  return tensor == nullptr ? nullptr : static_cast<T*>(sdk::data_address(*tensor));
}

}  // namespace graft::mixers
