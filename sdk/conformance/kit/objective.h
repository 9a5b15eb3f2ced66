// An objective under test, with the signals a host gives it. Every run checks what holds of any
// run: outputs start as NaN, no byte around one or around the workspace was written, no signal
// changed.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kit/context.h"
#include "kit/random.h"
#include "kit/tensor.h"

namespace graft::conformance {

// How many tokens, and how wide: the vocabulary of logits, the model of hidden states. Objectives
// on logits see the tokens in one row, [batch * tokens].
struct BatchSize {
  std::int64_t batch = 2, tokens = 3, width = 7;
  std::int64_t all() const { return batch * tokens; }
};

struct ObjectiveInputs {
  std::vector<Tensor> signals;  // in needs order; not there: NULL
  double grad_scale = 1;
  enum class Grads { all, none, null_entries } grads = Grads::all;

  ObjectiveInputs copy() const;
};

struct ObjectiveOutputs {
  double loss = 0;
  std::vector<Tensor> grads;  // not there: not wanted
  std::map<std::string, double> metrics;
};

class Objective {
 public:
  // With the settings' options, and `more` over them. Skips where it requires a signal that the kit
  // does not know.
  explicit Objective(Context& context, const Options& more = {});
  ~Objective();
  Objective(const Objective&) = delete;
  Objective& operator=(const Objective&) = delete;

  std::span<const graft_signal_need> needs() const;
  std::string name(std::size_t signal) const { return needs()[signal].name; }
  // Where in `needs` a signal is; -1 where it is not.
  int find(std::string_view signal) const;
  bool takes(std::string_view signal) const { return find(signal) >= 0; }
  // It is about rows of logits, and not about blocks.
  bool on_logits() const;

  // Random signals; of the optional ones those in `with`.
  ObjectiveInputs random_inputs(const BatchSize& size, DLDataType dtype, Random& random,
                                std::initializer_list<std::string_view> with = {}) const;
  // A signal that the kit knows how to make.
  Tensor random_signal(std::size_t signal, const BatchSize& size, DLDataType dtype,
                       Random& random) const;
  // The tokens in `which`, in this order, as one row.
  ObjectiveInputs tokens_of(const ObjectiveInputs& in, const BatchSize& size,
                            const std::vector<std::int64_t>& which) const;

  // Fails where the plugin does. try_ gives the answer.
  ObjectiveOutputs run(const ObjectiveInputs& in);
  Outcome try_run(const ObjectiveInputs& in, ObjectiveOutputs* out);

  // For tests of wrong calls: the arguments of a right one, to be broken, then called.
  struct Call {
    std::vector<const DLTensor*> signals;
    std::vector<Tensor> grads;
    std::vector<DLTensor*> grad_pointers;
    Tensor loss, workspace;
    std::map<std::string, double> metrics;
    std::string metric_problem;
    graft_exec exec{};
    graft_objective_args args{};
  };
  void fill(Call& call, const ObjectiveInputs& in) const;
  // Asks how much workspace it wants and gives `less` bytes fewer.
  Outcome try_call(Call& call, std::uint64_t less = 0);

 private:
  // [N,...], not [B,T,...].
  bool flat(std::size_t signal) const;
  // [B,T], or [N].
  Tensor per_token(std::size_t signal, const BatchSize& size, DLDataType dtype) const;

  Context& context_;
  graft_objective* handle_ = nullptr;
};

}  // namespace graft::conformance
