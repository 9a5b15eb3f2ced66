#include "gdn_features.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

namespace graft::gdn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::ScalarType compute_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

template <class Body>
void with_type(at::ScalarType type, const Body& body) {
  if (type == at::kDouble) {
    body(double{});
  } else {
    body(float{});
  }
}

template <class T>
const T* pointer(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr<T>() : nullptr;
}

at::Tensor prepared(const std::optional<at::Tensor>& x, at::ScalarType type) {
  return x.has_value() && x->defined() ? x->to(type).contiguous() : at::Tensor();
}

std::optional<at::Tensor> optional(const at::Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

// Rows in pieces of fixed size, so that sums over rows do not depend on the number of threads.
// body(piece, begin, end, scratch).
constexpr int64_t kPiece = 512;

int64_t pieces(int64_t rows) { return (rows + kPiece - 1) / kPiece; }

template <class T, class Body>
void for_each_piece(int64_t rows, int64_t dim, const Body& body) {
  at::parallel_for(0, pieces(rows), 1, [&](int64_t begin, int64_t end) {
    const at::Tensor scratch = at::empty({4 * (dim + 64)}, at::CppTypeToScalarType<T>::value);
    for (int64_t piece = begin; piece < end; ++piece) {
      body(piece, piece * kPiece, std::min(rows, (piece + 1) * kPiece), scratch.data_ptr<T>());
    }
  });
}

// ------------------------------------------------------------------ features

// Everything of a call but x, in the type of the computation.
struct FeatureCall {
  int64_t heads, dim;
  FeatureOptions options;
  at::Tensor weight, cos, sin;

  template <class T>
  FeatureRows<T> rows() const {
    FeatureRows<T> op;
    op.dim = dim;
    op.heads = heads;
    op.silu = options.silu;
    op.norm_weight = pointer<T>(weight);
    op.norm_eps = static_cast<T>(options.norm_eps);
    op.cos = pointer<T>(cos);
    op.sin = pointer<T>(sin);
    op.frequencies = cos.defined() ? cos.size(-1) : 0;
    op.l2norm = options.l2norm;
    op.l2_eps = static_cast<T>(kL2Eps);
    return op;
  }
};

at::Tensor features_forward(const at::Tensor& x, const FeatureCall& call) {
  at::Tensor out = at::empty({x.size(0), x.size(1), call.heads, call.dim}, x.options());
  with_type(x.scalar_type(), [&]<class T>(T) {
    const FeatureRows<T> op = call.rows<T>();
    for_each_piece<T>(out.numel() / call.dim, call.dim,
                      [&](int64_t, int64_t begin, int64_t end, T* scratch) {
                        kernels::rowwise().of<T>().features(op, begin, end, x.const_data_ptr<T>(),
                                                            out.data_ptr<T>(), scratch);
                      });
  });
  return out;
}

struct FeatureGradients {
  at::Tensor x, weight;
};

FeatureGradients features_backward(const at::Tensor& x, const at::Tensor& d_out,
                                   const FeatureCall& call) {
  FeatureGradients d{at::empty_like(x), {}};
  const int64_t rows = x.numel() / call.dim;
  const at::Tensor partial =
      call.weight.defined() ? at::zeros({pieces(rows), call.dim}, x.options()) : at::Tensor();
  with_type(x.scalar_type(), [&]<class T>(T) {
    const FeatureRows<T> op = call.rows<T>();
    for_each_piece<T>(rows, call.dim, [&](int64_t piece, int64_t begin, int64_t end, T* scratch) {
      T* d_weight = partial.defined() ? partial.data_ptr<T>() + piece * call.dim : nullptr;
      kernels::rowwise().of<T>().features_backward(op, begin, end, x.const_data_ptr<T>(),
                                                   d_out.const_data_ptr<T>(), d.x.data_ptr<T>(),
                                                   d_weight, scratch);
    });
  });
  if (partial.defined()) d.weight = partial.sum(0);
  return d;
}

class HeadFeatures : public torch::autograd::Function<HeadFeatures> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& cos,
                            const std::optional<at::Tensor>& sin, int64_t heads,
                            FeatureOptions options) {
    const auto type = compute_type(x);
    ctx->save_for_backward(
        {x, weight.value_or(at::Tensor()), cos.value_or(at::Tensor()), sin.value_or(at::Tensor())});
    ctx->saved_data["heads"] = heads;
    ctx->saved_data["silu"] = options.silu;
    ctx->saved_data["l2norm"] = options.l2norm;
    ctx->saved_data["norm_eps"] = options.norm_eps;
    return features_forward(x.to(type).contiguous(),
                            {heads, x.size(-1) / heads, options, prepared(weight, type),
                             prepared(cos, type), prepared(sin, type)});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(), "head_features: second derivatives are not offered");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const auto type = compute_type(x);
    const int64_t heads = ctx->saved_data["heads"].toInt();
    const FeatureOptions options{ctx->saved_data["silu"].toBool(),
                                 ctx->saved_data["l2norm"].toBool(),
                                 ctx->saved_data["norm_eps"].toDouble()};
    const FeatureCall call{heads,
                           x.size(-1) / heads,
                           options,
                           prepared(weight, type),
                           prepared(saved[2], type),
                           prepared(saved[3], type)};
    const FeatureGradients d =
        features_backward(x.to(type).contiguous(), grads[0].to(type).contiguous(), call);
    return {d.x.to(x.scalar_type()),
            d.weight.defined() ? d.weight.to(weight.scalar_type()) : at::Tensor(),
            {},
            {},
            {},
            {},
            {}};
  }
};

// ------------------------------------------------------------------ gated norm

template <class T>
GatedNormRows<T> gated_norm_rows(int64_t dim, const at::Tensor& weight, double eps,
                                 const at::Tensor& gate) {
  GatedNormRows<T> op;
  op.dim = dim;
  op.norm_weight = pointer<T>(weight);
  op.norm_eps = static_cast<T>(eps);
  op.gate = pointer<T>(gate);
  return op;
}

class GatedNorm : public torch::autograd::Function<GatedNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& o,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& gate, double eps) {
    const auto type = compute_type(o);
    const at::Tensor in = o.to(type).contiguous(), w = prepared(weight, type),
                     g = prepared(gate, type);
    ctx->save_for_backward({o, weight.value_or(at::Tensor()), gate.value_or(at::Tensor())});
    ctx->saved_data["eps"] = eps;
    const int64_t dim = o.size(3);
    at::Tensor out = at::empty({o.size(0), o.size(1), o.size(2) * dim}, in.options());
    with_type(type, [&]<class T>(T) {
      const GatedNormRows<T> op = gated_norm_rows<T>(dim, w, eps, g);
      for_each_piece<T>(in.numel() / dim, dim,
                        [&](int64_t, int64_t begin, int64_t end, T* scratch) {
                          kernels::rowwise().of<T>().gated_norm(
                              op, begin, end, in.const_data_ptr<T>(), out.data_ptr<T>(), scratch);
                        });
    });
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(), "gated_norm: second derivatives are not offered");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &o = saved[0], &weight = saved[1], &gate = saved[2];
    const auto type = compute_type(o);
    const at::Tensor in = o.to(type).contiguous(), w = prepared(weight, type),
                     g = prepared(gate, type);
    const at::Tensor d_out = grads[0].to(type).contiguous();
    const double eps = ctx->saved_data["eps"].toDouble();
    const int64_t dim = o.size(3), rows = in.numel() / dim;
    const at::Tensor d_in = at::empty_like(in),
                     d_gate = g.defined() ? at::empty_like(g) : at::Tensor();
    const at::Tensor partial =
        w.defined() ? at::zeros({pieces(rows), dim}, in.options()) : at::Tensor();
    with_type(type, [&]<class T>(T) {
      const GatedNormRows<T> op = gated_norm_rows<T>(dim, w, eps, g);
      for_each_piece<T>(rows, dim, [&](int64_t piece, int64_t begin, int64_t end, T* scratch) {
        kernels::rowwise().of<T>().gated_norm_backward(
            op, begin, end, in.const_data_ptr<T>(), d_out.const_data_ptr<T>(), d_in.data_ptr<T>(),
            d_gate.defined() ? d_gate.data_ptr<T>() : nullptr,
            partial.defined() ? partial.data_ptr<T>() + piece * dim : nullptr, scratch);
      });
    });
    const auto as = [](const at::Tensor& d, const at::Tensor& x) {
      return d.defined() ? d.to(x.scalar_type()) : d;
    };
    return {as(d_in, o),
            w.defined() ? as(partial.sum(0), weight) : at::Tensor(),
            as(d_gate, gate),
            {},
            {}};
  }
};

}  // namespace

at::Tensor head_features(const at::Tensor& x, int64_t heads, const FeatureOptions& options,
                         const at::Tensor& norm_weight, const Rotation& rotation) {
  TORCH_CHECK(x.dim() == 3 && heads > 0 && x.size(2) % heads == 0, "head_features: x has shape ",
              x.sizes(), ", expected [batch, tokens, ", heads, " * dim]");
  const int64_t dim = x.size(2) / heads;
  TORCH_CHECK(!norm_weight.defined() || norm_weight.sizes() == at::IntArrayRef{dim},
              "head_features: norm_weight has shape ", norm_weight.sizes(), ", expected [", dim,
              "]");
  TORCH_CHECK(!rotation.cos.defined() ||
                  (rotation.cos.size(0) == x.size(0) && rotation.cos.size(1) == x.size(1) &&
                   2 * rotation.cos.size(2) <= dim && rotation.sin.sizes() == rotation.cos.sizes()),
              "head_features: the rotation has shape ", rotation.cos.sizes(), ", expected [",
              x.size(0), ", ", x.size(1), ", at most ", dim / 2, "]");
  if (!options.silu && !options.l2norm && !norm_weight.defined() && !rotation.cos.defined()) {
    return x.to(compute_type(x)).reshape({x.size(0), x.size(1), heads, dim});
  }
  return HeadFeatures::apply(x, optional(norm_weight), optional(rotation.cos),
                             optional(rotation.sin), heads, options);
}

at::Tensor gated_norm(const at::Tensor& o, const at::Tensor& norm_weight, double norm_eps,
                      const at::Tensor& gate) {
  TORCH_CHECK(o.dim() == 4, "gated_norm: o has shape ", o.sizes(),
              ", expected [batch, tokens, heads, dim]");
  const int64_t width = o.size(2) * o.size(3);
  TORCH_CHECK(!norm_weight.defined() || norm_weight.sizes() == at::IntArrayRef{o.size(3)},
              "gated_norm: norm_weight has shape ", norm_weight.sizes(), ", expected [", o.size(3),
              "]");
  TORCH_CHECK(!gate.defined() || gate.sizes() == at::IntArrayRef({o.size(0), o.size(1), width}),
              "gated_norm: gate has shape ", gate.sizes(), ", expected [", o.size(0), ", ",
              o.size(1), ", ", width, "]");
  if (!norm_weight.defined() && !gate.defined()) return o.reshape({o.size(0), o.size(1), width});
  return GatedNorm::apply(o, optional(norm_weight), optional(gate), norm_eps);
}

}  // namespace graft::gdn
