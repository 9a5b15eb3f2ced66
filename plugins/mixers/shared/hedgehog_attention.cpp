#include "hedgehog_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace graft::mixers {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor dense_rows(const at::Tensor& x) {
  return !x.defined() || x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
}
at::Tensor dense(const at::Tensor& x) { return x.defined() ? x.contiguous() : x; }

struct Operands {
  HedgehogAttention in;
  linear::HeadShape shape;
  int64_t batch, heads, group;  // group: query heads of one key head

  explicit Operands(const HedgehogAttention& given) : in(given) {
    for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = dense_rows(*x);
    for (at::Tensor* x : {&in.weight_q, &in.bias_q, &in.weight_k, &in.bias_k, &in.state})
      *x = dense(*x);
    batch = in.q.size(0);
    heads = in.q.size(2);
    group = heads / in.k.size(2);
    shape.tokens = in.q.size(1);
    shape.head_dim = in.q.size(3);
    shape.features = 2 * in.weight_q.size(1);
    shape.value_dim = in.v.size(3);
    shape.chunk = std::max<int64_t>(1, std::min(in.chunk, shape.tokens));
  }

  // Head h of sequence b in a [B,T,heads,width] or [B,T,heads] tensor.
  template <class T>
  static kernels::Rows<T> rows(const at::Tensor& x, int64_t b, int64_t h) {
    if (!x.defined() || x.numel() == 0) return {};
    return {x.data_ptr<std::remove_const_t<T>>() + b * x.stride(0) + h * x.stride(2), x.stride(1)};
  }
  // The part of head h (of sequence b) in a contiguous [H,...] or [B,H,...] tensor.
  template <class T>
  static T* part(const at::Tensor& x, int64_t h) {
    return x.defined() ? x.data_ptr<T>() + h * (x.numel() / x.size(0)) : nullptr;
  }
  template <class T>
  static T* part(const at::Tensor& x, int64_t b, int64_t h) {
    return x.defined() && x.numel() > 0
               ? x.data_ptr<T>() + (b * x.size(1) + h) * (x.numel() / (x.size(0) * x.size(1)))
               : nullptr;
  }

  // What forward and backward both read.
  template <class T, class Head>
  void set(Head& head, int64_t b, int64_t h) const {
    head.q = rows<const T>(in.q, b, h);
    head.k = rows<const T>(in.k, b, h / group);
    head.v = rows<const T>(in.v, b, h / group);
    head.g = rows<const T>(in.g, b, h);
    head.dt = rows<const T>(in.write, b, h);
    head.map_q = {part<T>(in.weight_q, h), part<T>(in.bias_q, h)};
    head.map_k = {part<T>(in.weight_k, h), part<T>(in.bias_k, h)};
    head.floor = static_cast<T>(in.floor);
  }
};

// Runs `body(b, first, n, scratch)` for heads [first, first + n) of every sequence on LibTorch's
// threads.
template <class T, class Body>
void for_each_group(const Operands& x, int64_t at_once, const linear::HeadKernels<T>& kernels,
                    const Body& body) {
  const int64_t groups = (x.heads + at_once - 1) / at_once;
  at::parallel_for(0, x.batch * groups, 1, [&](int64_t begin, int64_t end) {
    const at::Tensor scratch =
        at::empty({kernels.scratch_size(x.shape, at_once) + 16}, at::CppTypeToScalarType<T>::value);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % groups * at_once;
      body(i / groups, first, std::min(at_once, x.heads - first), scratch.template data_ptr<T>());
    }
  });
}

int64_t heads_at_once(const Operands& x) {
  return linear::heads_at_once(x.shape, x.heads, x.batch, at::get_num_threads());
}

struct AttentionForward {
  at::Tensor o, state, borders, norm;  // the last two where a backward is to come
};

template <class T>
void run_forward(const Operands& x, const linear::HeadKernels<T>& kernels,
                 const AttentionForward& out) {
  const bool step = x.shape.tokens == 1 && !out.borders.defined();
  for_each_group<T>(x, heads_at_once(x), kernels,
                    [&](int64_t b, int64_t first, int64_t n, T* scratch) {
                      std::vector<linear::HeadForward<T>> heads(static_cast<std::size_t>(n));
                      for (int64_t i = 0; i < n; ++i) {
                        linear::HeadForward<T>& head = heads[static_cast<std::size_t>(i)];
                        const int64_t h = first + i;
                        x.set<T>(head, b, h);
                        head.eps = static_cast<T>(x.in.eps);
                        head.state_in = Operands::part<T>(x.in.state, b, h);
                        head.o = Operands::rows<T>(out.o, b, h);
                        head.state_out = Operands::part<T>(out.state, b, h);
                        head.borders = Operands::part<T>(out.borders, b, h);
                        head.norm = Operands::rows<T>(out.norm, b, h);
                        if (step) kernels.step(x.shape, head, scratch);
                      }
                      if (!step) kernels.forward(x.shape, heads.data(), n, scratch);
                    });
}

AttentionForward attend(const Operands& x, bool keep, const linear::Kernels& kernels) {
  const auto options = x.in.q.options().requires_grad(false);
  AttentionForward out;
  out.o = at::empty({x.batch, x.shape.tokens, x.heads, x.shape.value_dim}, options);
  out.state = at::empty({x.batch, x.heads, x.shape.features, x.shape.state_row()}, options);
  if (keep) {
    out.borders = at::empty({x.batch, x.heads, x.shape.chunks(), x.shape.state_size()}, options);
    out.norm = at::empty({x.batch, x.shape.tokens, x.heads}, options);
  }
  if (x.in.q.scalar_type() == at::kDouble) {
    run_forward<double>(x, kernels.f64, out);
  } else {
    run_forward<float>(x, kernels.f32, out);
  }
  return out;
}

// In the order of HedgehogAttention; those of keys and values for each query head, those of the
// maps for each sequence.
struct AttentionGradients {
  at::Tensor q, k, v, weight_q, bias_q, weight_k, bias_k, g, write, state;
};

template <class T>
void run_backward(const Operands& x, const linear::HeadKernels<T>& kernels,
                  const AttentionForward& kept, const at::Tensor& d_o, const at::Tensor& d_state,
                  const AttentionGradients& d) {
  for_each_group<T>(x, heads_at_once(x), kernels,
                    [&](int64_t b, int64_t first, int64_t n, T* scratch) {
                      std::vector<linear::HeadBackward<T>> heads(static_cast<std::size_t>(n));
                      for (int64_t i = 0; i < n; ++i) {
                        linear::HeadBackward<T>& head = heads[static_cast<std::size_t>(i)];
                        const int64_t h = first + i;
                        x.set<T>(head, b, h);
                        head.zero_state_in = !x.in.state.defined();
                        head.borders = Operands::part<T>(kept.borders, b, h);
                        head.norm = Operands::rows<const T>(kept.norm, b, h);
                        head.o = Operands::rows<const T>(kept.o, b, h);
                        head.d_o = Operands::rows<const T>(d_o, b, h);
                        head.d_state_out = Operands::part<T>(d_state, b, h);
                        head.dq = Operands::rows<T>(d.q, b, h);
                        head.dk = Operands::rows<T>(d.k, b, h);
                        head.dv = Operands::rows<T>(d.v, b, h);
                        head.dg = Operands::rows<T>(d.g, b, h);
                        head.ddt = Operands::rows<T>(d.write, b, h);
                        head.d_weight_q = Operands::part<T>(d.weight_q, b, h);
                        head.d_bias_q = Operands::part<T>(d.bias_q, b, h);
                        head.d_weight_k = Operands::part<T>(d.weight_k, b, h);
                        head.d_bias_k = Operands::part<T>(d.bias_k, b, h);
                        head.d_state_in = Operands::part<T>(d.state, b, h);
                      }
                      kernels.backward(x.shape, heads.data(), n, scratch);
                    });
}

class HedgehogFunction : public torch::autograd::Function<HedgehogFunction> {
 public:
  using Optional = std::optional<at::Tensor>;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& weight_q,
                               const at::Tensor& bias_q, const at::Tensor& weight_k,
                               const at::Tensor& bias_k, const Optional& g, const Optional& write,
                               const Optional& state, double floor, double eps, int64_t chunk,
                               int64_t kernels) {
    const Operands x({q, k, v, weight_q, bias_q, weight_k, bias_k, g.value_or(at::Tensor()),
                      write.value_or(at::Tensor()), state.value_or(at::Tensor()), floor, eps,
                      chunk});
    const AttentionForward out =
        attend(x, true, *reinterpret_cast<const linear::Kernels*>(kernels));
    const HedgehogAttention& in = x.in;
    ctx->save_for_backward({in.q, in.k, in.v, in.weight_q, in.bias_q, in.weight_k, in.bias_k, in.g,
                            in.write, in.state, out.o, out.borders, out.norm});
    ctx->saved_data["floor"] = floor;
    ctx->saved_data["chunk"] = chunk;
    ctx->saved_data["kernels"] = kernels;
    ctx->set_materialize_grads(false);
    return {out.o, out.state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "hedgehog_attention: second derivatives are not offered");
    const variable_list s = ctx->get_saved_variables();
    const Operands x({s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9],
                      ctx->saved_data["floor"].toDouble(), 0, ctx->saved_data["chunk"].toInt()});
    const auto& kernels =
        *reinterpret_cast<const linear::Kernels*>(ctx->saved_data["kernels"].toInt());
    const auto options = x.in.q.options().requires_grad(false);
    const int64_t b = x.batch, t = x.shape.tokens, h = x.heads, e = x.shape.features / 2,
                  width = x.shape.head_dim;
    const auto like = [&](const at::Tensor& given) {
      return given.defined() ? at::empty(given.sizes(), options) : at::Tensor();
    };
    AttentionGradients d{at::empty({b, t, h, width}, options),
                         at::empty({b, t, h, width}, options),
                         at::empty({b, t, h, x.shape.value_dim}, options),
                         at::zeros({b, h, e, width}, options),
                         at::zeros({b, h, e}, options),
                         at::zeros({b, h, e, width}, options),
                         at::zeros({b, h, e}, options),
                         like(x.in.g),
                         like(x.in.write),
                         like(x.in.state)};
    const at::Tensor d_o = dense_rows(grads[0]), d_state = dense(grads[1]);
    const AttentionForward kept{s[10], {}, s[11], s[12]};
    if (x.in.q.scalar_type() == at::kDouble) {
      run_backward<double>(x, kernels.f64, kept, d_o, d_state, d);
    } else {
      run_backward<float>(x, kernels.f32, kept, d_o, d_state, d);
    }
    const auto of_key_heads = [&](const at::Tensor& u) {
      return x.group == 1 ? u : u.unflatten(2, {h / x.group, x.group}).sum(3);
    };
    return {d.q,
            of_key_heads(d.k),
            of_key_heads(d.v),
            d.weight_q.sum(0),
            d.bias_q.sum(0),
            d.weight_k.sum(0),
            d.bias_k.sum(0),
            d.g,
            d.write,
            d.state,
            {},
            {},
            {},
            {}};
  }
};

void check(const HedgehogAttention& in) {
  const auto expect = [](const char* name, const at::Tensor& x, at::IntArrayRef shape) {
    TORCH_CHECK(x.sizes() == shape, "hedgehog_attention: ", name, " has shape ", x.sizes(),
                ", expected ", shape);
  };
  TORCH_CHECK(in.q.dim() == 4, "hedgehog_attention: q has shape ", in.q.sizes(),
              ", expected [B, T, H, d]");
  TORCH_CHECK(in.v.dim() == 4, "hedgehog_attention: v has shape ", in.v.sizes(),
              ", expected [B, T, kv_heads, D]");
  const int64_t b = in.q.size(0), t = in.q.size(1), h = in.q.size(2), d = in.q.size(3),
                kv = in.v.size(2);
  TORCH_CHECK(kv > 0 && h % kv == 0, "hedgehog_attention: ", h, " query heads do not divide among ",
              kv, " of v");
  expect("k", in.k, {b, t, kv, d});
  expect("v", in.v, {b, t, kv, in.v.size(3)});
  TORCH_CHECK(in.weight_q.dim() == 3, "hedgehog_attention: weight_q has shape ",
              in.weight_q.sizes(), ", expected [H, e, d]");
  const int64_t e = in.weight_q.size(1);
  expect("weight_q", in.weight_q, {h, e, d});
  expect("bias_q", in.bias_q, {h, e});
  expect("weight_k", in.weight_k, {h, e, d});
  expect("bias_k", in.bias_k, {h, e});
  if (in.g.defined()) expect("g", in.g, {b, t, h});
  if (in.write.defined()) expect("write", in.write, {b, t, h});
  if (in.state.defined()) expect("state", in.state, {b, h, 2 * e, in.v.size(3) + 1});
  const auto type = in.q.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kDouble, "hedgehog_attention: q is ", type,
              ", expected float or double");
  for (const auto& [name, x] : {std::pair<const char*, const at::Tensor&>{"k", in.k},
                                {"v", in.v},
                                {"weight_q", in.weight_q},
                                {"bias_q", in.bias_q},
                                {"weight_k", in.weight_k},
                                {"bias_k", in.bias_k},
                                {"g", in.g},
                                {"write", in.write},
                                {"state", in.state}}) {
    TORCH_CHECK(!x.defined() || x.scalar_type() == type, "hedgehog_attention: ", name, " is ",
                x.scalar_type(), ", q is ", type);
  }
}

}  // namespace

HedgehogAttentionResult hedgehog_attention(const HedgehogAttention& in,
                                           const linear::Kernels& kernels) {
  check(in);
  const at::Tensor* const all[] = {&in.q,        &in.k,      &in.v, &in.weight_q, &in.bias_q,
                                   &in.weight_k, &in.bias_k, &in.g, &in.write,    &in.state};
  const bool differentiable = std::any_of(std::begin(all), std::end(all), [](const at::Tensor* x) {
    return x->defined() && x->requires_grad();
  });
  if (!at::GradMode::is_enabled() || !differentiable) {
    const AttentionForward out = attend(Operands(in), false, kernels);
    return {out.o, out.state};
  }
  const auto optional = [](const at::Tensor& x) {
    return x.defined() ? std::optional(x) : std::nullopt;
  };
  const variable_list out =
      HedgehogFunction::apply(in.q, in.k, in.v, in.weight_q, in.bias_q, in.weight_k, in.bias_k,
                              optional(in.g), optional(in.write), optional(in.state), in.floor,
                              in.eps, in.chunk, reinterpret_cast<int64_t>(&kernels));
  return {out[0], out[1]};
}

}  // namespace graft::mixers
