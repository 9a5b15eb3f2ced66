#include "gdn_chunk.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

namespace graft::gdn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::ScalarType state_type(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_shape(const char* name, const at::Tensor& x, at::IntArrayRef shape) {
  TORCH_CHECK(x.defined(), "gated_delta_rule: ", name, " is undefined");
  TORCH_CHECK(x.device().is_cpu(), "gated_delta_rule: ", name, " is on ", x.device(),
              ", expected the CPU");
  TORCH_CHECK(x.sizes() == shape, "gated_delta_rule: ", name, " has shape ", x.sizes(),
              ", expected ", shape);
  TORCH_CHECK(at::isFloatingType(x.scalar_type()), "gated_delta_rule: ", name, " is ",
              x.scalar_type(), ", expected a floating-point type");
}

void check_arguments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& g, const at::Tensor& beta, const at::Tensor& state) {
  TORCH_CHECK(q.defined() && q.dim() == 4,
              "gated_delta_rule: q must be [batch, tokens, heads, key_dim]");
  TORCH_CHECK(v.defined() && v.dim() == 4,
              "gated_delta_rule: v must be [batch, tokens, heads, value_dim]");
  const int64_t b = q.size(0), t = q.size(1), h = q.size(2), dk = q.size(3), dv = v.size(3);
  TORCH_CHECK(dk > 0 && dv > 0, "gated_delta_rule: key_dim and value_dim must be positive, got ",
              dk, " and ", dv);
  check_shape("q", q, {b, t, h, dk});
  check_shape("k", k, {b, t, h, dk});
  check_shape("v", v, {b, t, h, dv});
  check_shape("g", g, {b, t, h});
  check_shape("beta", beta, {b, t, h});
  if (!state.defined()) return;
  check_shape("state", state, {b, h, dk, dv});
  TORCH_CHECK(state.scalar_type() == state_type(q), "gated_delta_rule: state is ",
              state.scalar_type(), ", expected ", state_type(q));
}

// In the state's type, contiguous along the last axis.
at::Tensor rows_of(const at::Tensor& x, at::ScalarType type) {
  at::Tensor y = x.to(type);
  return y.stride(-1) == 1 || y.size(-1) == 1 ? y : y.contiguous();
}

// Head h of sequence b in a [B,T,H] or [B,T,H,D] tensor; absent when there is nothing in it.
template <class T>
Rows<T> head_rows(const at::Tensor& x, int64_t b, int64_t h) {
  if (!x.defined() || x.numel() == 0) return {};
  return {x.data_ptr<std::remove_const_t<T>>() + b * x.stride(0) + h * x.stride(2), x.stride(1)};
}

// Head h of sequence b in a contiguous [B,H,...] tensor; nullptr when there is nothing in it.
template <class T>
T* head_block(const at::Tensor& x, int64_t b, int64_t h) {
  if (!x.defined() || x.numel() == 0) return nullptr;
  return x.data_ptr<T>() + b * x.stride(0) + h * x.stride(1);
}

HeadShape head_shape(const at::Tensor& q, const at::Tensor& v, int64_t chunk) {
  return {q.size(1), q.size(3), v.size(3), std::max<int64_t>(1, std::min(chunk, q.size(1)))};
}

// Runs `group(b, h, n, scratch)` for heads [h, h + n) of every sequence, on LibTorch's threads
// where that is worth their waking.
template <class T, class Group>
void for_each_group(const at::Tensor& q, const HeadShape& shape, int64_t at_once,
                    const HeadKernels<T>& kernels, const Group& group) {
  constexpr int64_t kWorthAThread = 100'000;  // multiply-adds, some 10 microseconds
  const int64_t work = 3 * shape.tokens * shape.key_dim * shape.value_dim * at_once;
  const int64_t grain = std::max<int64_t>(1, kWorthAThread / std::max<int64_t>(1, work));
  const int64_t heads = q.size(2), groups = (heads + at_once - 1) / at_once;
  at::parallel_for(0, q.size(0) * groups, grain, [&](int64_t begin, int64_t end) {
    const at::Tensor scratch =
        at::empty({kernels.scratch_size(shape, at_once)}, at::CppTypeToScalarType<T>::value);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % groups * at_once;
      group(i / groups, first, std::min(at_once, heads - first), scratch.template data_ptr<T>());
    }
  });
}

int64_t heads_at_once(const at::Tensor& q, const HeadShape& shape) {
  return heads_at_once(shape, q.size(2), q.size(0), at::get_num_threads());
}

struct Operands {
  at::Tensor q, k, v, g, beta, state;  // rows_of(); state contiguous or undefined

  Operands(const at::Tensor& q_, const at::Tensor& k_, const at::Tensor& v_, const at::Tensor& g_,
           const at::Tensor& beta_, const at::Tensor& state_)
      : q(rows_of(q_, state_type(q_))),
        k(rows_of(k_, q.scalar_type())),
        v(rows_of(v_, q.scalar_type())),
        g(g_.to(q.scalar_type())),
        beta(beta_.to(q.scalar_type())),
        state(state_.defined() ? state_.contiguous() : state_) {}

  double scale() const { return 1.0 / std::sqrt(static_cast<double>(q.size(3))); }

  template <class T>
  HeadForward<T> head(int64_t b, int64_t h) const {
    HeadForward<T> io;
    io.q = head_rows<const T>(q, b, h);
    io.k = head_rows<const T>(k, b, h);
    io.v = head_rows<const T>(v, b, h);
    io.g = head_rows<const T>(g, b, h);
    io.beta = head_rows<const T>(beta, b, h);
    io.scale = static_cast<T>(scale());
    io.state_in = head_block<T>(state, b, h);
    return io;
  }
};

struct ForwardResult {
  at::Tensor o, state, borders, err;  // o in the state's type
};

template <class T>
void run_forward(const Operands& in, const HeadShape& shape, const HeadKernels<T>& kernels,
                 const ForwardResult& out) {
  const int64_t at_once = heads_at_once(in.q, shape);
  for_each_group<T>(in.q, shape, at_once, kernels,
                    [&](int64_t b, int64_t first, int64_t n, T* scratch) {
                      std::vector<HeadForward<T>> heads;
                      for (int64_t h = first; h < first + n; ++h) {
                        HeadForward<T>& io = heads.emplace_back(in.head<T>(b, h));
                        io.o = head_rows<T>(out.o, b, h);
                        io.state_out = head_block<T>(out.state, b, h);
                        io.borders = head_block<T>(out.borders, b, h);
                        io.err = head_rows<T>(out.err, b, h);
                      }
                      kernels.forward(shape, heads.data(), n, scratch);
                    });
}

ForwardResult forward(const Operands& in, int64_t chunk, bool keep, const Kernels& kernels) {
  const HeadShape shape = head_shape(in.q, in.v, chunk);
  const int64_t b = in.q.size(0), h = in.q.size(2);
  const auto options = in.q.options().requires_grad(false);
  ForwardResult out;
  out.o = at::empty({b, shape.tokens, h, shape.value_dim}, options);
  out.state = at::empty({b, h, shape.key_dim, shape.value_dim}, options);
  if (keep) {
    out.borders = at::empty({b, h, shape.chunks(), shape.key_dim, shape.value_dim}, options);
    out.err = at::empty_like(out.o);
  }
  if (in.q.scalar_type() == at::kDouble) {
    run_forward<double>(in, shape, kernels.f64, out);
  } else {
    run_forward<float>(in, shape, kernels.f32, out);
  }
  return out;
}

struct Gradients {
  at::Tensor q, k, v, g, beta, state;  // state undefined: not wanted
};

template <class T>
void run_backward(const Operands& in, const ForwardResult& kept, const at::Tensor& d_o,
                  const at::Tensor& d_state, const HeadShape& shape, const HeadKernels<T>& kernels,
                  const Gradients& out) {
  const auto head = [&](int64_t b, int64_t h) {
    const HeadForward<T> forward = in.head<T>(b, h);
    HeadBackward<T> io;
    io.q = forward.q;
    io.k = forward.k;
    io.g = forward.g;
    io.beta = forward.beta;
    io.scale = forward.scale;
    io.zero_state_in = forward.state_in == nullptr;
    io.borders = head_block<T>(kept.borders, b, h);
    io.err = head_rows<const T>(kept.err, b, h);
    io.d_o = head_rows<const T>(d_o, b, h);
    io.d_state_out = head_block<T>(d_state, b, h);
    io.dq = head_rows<T>(out.q, b, h);
    io.dk = head_rows<T>(out.k, b, h);
    io.dv = head_rows<T>(out.v, b, h);
    io.dg = head_rows<T>(out.g, b, h);
    io.dbeta = head_rows<T>(out.beta, b, h);
    io.d_state_in = head_block<T>(out.state, b, h);
    return io;
  };
  const int64_t at_once = heads_at_once(in.q, shape);
  for_each_group<T>(in.q, shape, at_once, kernels,
                    [&](int64_t b, int64_t first, int64_t n, T* scratch) {
                      std::vector<HeadBackward<T>> heads;
                      for (int64_t h = first; h < first + n; ++h) heads.push_back(head(b, h));
                      kernels.backward(shape, heads.data(), n, scratch);
                    });
}

Gradients backward(const Operands& in, const ForwardResult& kept, at::Tensor d_o,
                   at::Tensor d_state, int64_t chunk, const Kernels& kernels) {
  const HeadShape shape = head_shape(in.q, in.v, chunk);
  const auto type = in.q.scalar_type();
  if (d_o.defined()) d_o = rows_of(d_o, type);
  if (d_state.defined()) d_state = d_state.to(type).contiguous();
  const auto like = [](const at::Tensor& x) {
    return at::empty(x.sizes(), x.options().requires_grad(false));
  };
  Gradients out{like(in.q), like(in.k), like(in.v), like(in.g), like(in.beta), {}};
  if (in.state.defined()) out.state = like(in.state);
  if (type == at::kDouble) {
    run_backward<double>(in, kept, d_o, d_state, shape, kernels.f64, out);
  } else {
    run_backward<float>(in, kept, d_o, d_state, shape, kernels.f32, out);
  }
  return out;
}

class DeltaRule : public torch::autograd::Function<DeltaRule> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
                               const std::optional<at::Tensor>& given_state, int64_t chunk,
                               int64_t kernels) {
    const at::Tensor state = given_state.value_or(at::Tensor());
    const Operands in(q, k, v, g, beta, state);
    const Kernels& set = *reinterpret_cast<const Kernels*>(kernels);
    ForwardResult out = gdn::forward(in, chunk, true, set);
    ctx->save_for_backward({q, k, v, g, beta, state, out.borders, out.err});
    ctx->saved_data["chunk"] = chunk;
    ctx->saved_data["kernels"] = kernels;
    ctx->set_materialize_grads(false);
    return {out.o.to(v.scalar_type()), out.state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "gated_delta_rule: second derivatives are not offered");
    const variable_list saved = ctx->get_saved_variables();
    const auto kernels = ctx->saved_data["kernels"].toInt();
    const Operands in(saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]);
    const Gradients d =
        gdn::backward(in, {{}, {}, saved[6], saved[7]}, grads[0], grads[1],
                      ctx->saved_data["chunk"].toInt(), *reinterpret_cast<const Kernels*>(kernels));
    const auto as = [](const at::Tensor& x, const at::Tensor& input) {
      return x.to(input.scalar_type());
    };
    return {as(d.q, saved[0]),
            as(d.k, saved[1]),
            as(d.v, saved[2]),
            as(d.g, saved[3]),
            as(d.beta, saved[4]),
            d.state,
            {},
            {}};
  }
};

}  // namespace

DeltaRuleResult gated_delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& g, const at::Tensor& beta,
                                 const at::Tensor& state, int64_t chunk, const Kernels& kernels) {
  check_arguments(q, k, v, g, beta, state);
  TORCH_CHECK(chunk >= 1, "gated_delta_rule: chunk must be at least 1, got ", chunk);
  const bool differentiable = q.requires_grad() || k.requires_grad() || v.requires_grad() ||
                              g.requires_grad() || beta.requires_grad() ||
                              (state.defined() && state.requires_grad());
  if (!at::GradMode::is_enabled() || !differentiable) {
    ForwardResult out = forward(Operands(q, k, v, g, beta, state), chunk, false, kernels);
    return {out.o.to(v.scalar_type()), out.state};
  }
  const std::optional<at::Tensor> given_state =
      state.defined() ? std::optional(state) : std::nullopt;
  const variable_list out =
      DeltaRule::apply(q, k, v, g, beta, given_state, chunk, reinterpret_cast<int64_t>(&kernels));
  return {out[0], out[1]};
}

DeltaRuleResult gated_delta_rule_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& g, const at::Tensor& beta,
                                      const at::Tensor& state, bool in_place,
                                      const Kernels& kernels) {
  check_arguments(q, k, v, g, beta, state);
  TORCH_CHECK(!in_place || (state.defined() && state.is_contiguous()),
              "gated_delta_rule_step: in place needs a contiguous state");
  const at::NoGradGuard no_grad;
  const Operands in(q, k, v, g, beta, state);
  HeadShape shape = head_shape(in.q, in.v, 1);
  ForwardResult out;
  out.o = at::empty(in.v.sizes(), in.v.options());
  out.state = in_place ? state
                       : at::empty({in.q.size(0), in.q.size(2), shape.key_dim, shape.value_dim},
                                   in.q.options());
  const auto run = [&]<class T>(const HeadKernels<T>& set) {
    for_each_group<T>(in.q, shape, 1, set, [&](int64_t b, int64_t h, int64_t, T* scratch) {
      HeadForward<T> io = in.head<T>(b, h);
      io.o = head_rows<T>(out.o, b, h);
      io.state_out = head_block<T>(out.state, b, h);
      set.step(shape, io, scratch);
    });
  };
  if (in.q.scalar_type() == at::kDouble) {
    run(kernels.f64);
  } else {
    run(kernels.f32);
  }
  return {out.o.to(v.scalar_type()), out.state};
}

}  // namespace graft::gdn
