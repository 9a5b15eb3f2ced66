#include "core/train/recompute.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <utility>

namespace graft {
namespace {

using Work = std::function<at::Tensor(const at::Tensor&)>;

struct Holder : torch::CustomClassHolder {
  explicit Holder(Work work) : fn(std::move(work)) {}
  Work fn;
};

class Function : public torch::autograd::Function<Function> {
 public:
  // `anchor` requires a gradient, so that backward() comes by even where x needs none.
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& /*anchor*/, c10::intrusive_ptr<Holder> holder) {
    ctx->save_for_backward({x});
    at::Tensor y = holder->fn(x);  // no graph: autograd is off in here
    ctx->saved_data["fn"] = at::IValue::make_capsule(std::move(holder));
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto capsule = ctx->saved_data["fn"].toCapsule();
    const auto& fn = static_cast<const Holder&>(*capsule).fn;
    at::AutoGradMode on(true);
    at::Tensor x = ctx->get_saved_variables()[0].detach();
    const bool wanted = ctx->needs_input_grad(0);
    x.set_requires_grad(wanted);
    const at::Tensor y = fn(x);
    if (y.requires_grad()) torch::autograd::backward({y}, {grads[0]});
    return {wanted ? x.grad() : at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor recompute(Work fn, const at::Tensor& x) {
  const at::Tensor anchor = at::zeros({}).set_requires_grad(true);
  return Function::apply(x, anchor, c10::make_intrusive<Holder>(std::move(fn)));
}

}  // namespace graft
