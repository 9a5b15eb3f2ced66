#include "core/train/objective_function.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "core/student/torch_abi.h"

namespace graft {
namespace {

// ctx: a double, or NULL.
void take_weight(void* ctx, const char* name, const DLTensor* scalar) {
  if (ctx != nullptr && std::string_view(name) == GRAFT_METRIC_WEIGHT)
    *static_cast<double*>(ctx) = view_of(*scalar).item<double>();
}

// Runs the objective once: it gives the loss and, for the signals that want one, the gradient,
// which backward() only has to scale.
class ObjectiveNode : public torch::autograd::Function<ObjectiveNode> {
 public:
  // `signals`: those that are there; place[i]: which of the objective's needs signal i meets.
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::TensorList signals,
                            const std::vector<std::size_t>& place, const Objective* objective,
                            double grad_scale, double* weight) {
    const auto needs = objective->needs();
    std::vector<at::Tensor> inputs(needs.size()), gradients(needs.size()), kept;
    for (std::size_t i = 0; i < signals.size(); ++i) {
      at::Tensor& gradient = gradients[place[i]];
      inputs[place[i]] = aligned(signals[i].detach().contiguous());
      if ((needs[place[i]].flags & GRAFT_NEED_GRAD) != 0 && signals[i].requires_grad())
        gradient = at::empty_like(inputs[place[i]]);
      kept.push_back(gradient);
    }
    at::Tensor loss = at::zeros({}, at::kFloat);
    BorrowedTensors in(inputs), out(gradients);
    BorrowedTensor loss_out(loss);
    graft_objective_args args{};
    args.struct_size = sizeof args;
    args.n_signals = in.size();
    args.signals = in.const_data();
    args.grads = out.data();
    args.loss = loss_out.get();
    args.grad_scale = grad_scale;
    args.metric = &take_weight;
    args.metric_ctx = weight;
    run_objective(*objective, args);
    ctx->save_for_backward(kept);
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    torch::autograd::variable_list result;
    for (const at::Tensor& gradient : ctx->get_saved_variables())
      result.push_back(gradient.defined() ? gradient * grads[0].to(gradient.scalar_type())
                                          : at::Tensor());
    result.resize(result.size() + 4);  // place, objective, grad_scale, weight
    return result;
  }
};

}  // namespace

void run_objective(const Objective& objective, const graft_objective_args& args) {
  thread_local Workspace workspace;
  graft_exec exec{};
  exec.struct_size = sizeof exec;
  exec.device_type = kDLCPU;
  exec.flags = GRAFT_X_TRAINING | GRAFT_X_DETERMINISTIC;
  exec.workspace_bytes = objective.workspace(args);
  exec.workspace = workspace.reserve(exec.workspace_bytes);
  objective.run(exec, args);
}

at::Tensor ObjectiveFunction::loss(const std::map<std::string, at::Tensor>& signals,
                                   double grad_scale, double* weight) const {
  std::vector<at::Tensor> there_are;
  std::vector<std::size_t> place;
  const auto needs = objective_.needs();
  for (std::size_t i = 0; i < needs.size(); ++i) {
    const graft_signal_need& need = needs[i];
    const auto found = signals.find(need.name);
    const bool there = found != signals.end() && found->second.defined();
    if (!there && (need.flags & GRAFT_NEED_REQUIRED) != 0) {
      std::string have;
      for (const auto& [name, tensor] : signals)
        if (tensor.defined()) have += (have.empty() ? "" : ", ") + name;
      fail(ErrorKind::plugin, "objective '" + objective_.label() + "' needs signal " + need.name +
                                  "; this stage has: " + have);
    }
    if (!there) continue;
    there_are.push_back(found->second);
    place.push_back(i);
  }
  return ObjectiveNode::apply(at::TensorList(there_are), place, &objective_, grad_scale, weight);
}

}  // namespace graft
