#include "linear_scan.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace graft::mixers {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& x, const at::Tensor& g,
           const at::Tensor& state) {
  TORCH_CHECK(q.dim() == 3, "linear_scan: q has shape ", q.sizes(), ", expected [n, T, F]");
  const int64_t n = q.size(0), tokens = q.size(1), features = q.size(2);
  TORCH_CHECK(k.sizes() == q.sizes(), "linear_scan: k has shape ", k.sizes(),
              ", expected that of q, ", q.sizes());
  TORCH_CHECK(x.dim() == 3 && x.size(0) == n && x.size(1) == tokens, "linear_scan: x has shape ",
              x.sizes(), ", expected [", n, ", ", tokens, ", V]");
  TORCH_CHECK(!g.defined() || g.sizes() == at::IntArrayRef({n, tokens}),
              "linear_scan: g has shape ", g.sizes(), ", expected [", n, ", ", tokens, "]");
  TORCH_CHECK(!state.defined() || state.sizes() == at::IntArrayRef({n, features, x.size(2)}),
              "linear_scan: state has shape ", state.sizes(), ", expected [", n, ", ", features,
              ", ", x.size(2), "]");
  const auto type = q.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kDouble, "linear_scan: q is ", type,
              ", expected float32 or float64");
  const auto same_type = [&](const at::Tensor& tensor, const char* name) {
    TORCH_CHECK(!tensor.defined() || tensor.scalar_type() == type, "linear_scan: ", name, " is ",
                tensor.scalar_type(), ", expected that of q, ", type);
  };
  same_type(k, "k");
  same_type(x, "x");
  same_type(g, "g");
  same_type(state, "state");
}

// Tokens [first, first + count) of every row as chunks: [n,T,...] -> [n * chunks, C, ...], with
// zeros behind the last token.
struct Grid {
  int64_t n, first, count, size, chunks;

  at::Tensor cut(const at::Tensor& tensor) const {
    at::Tensor part = tensor.narrow(1, first, count);
    const int64_t missing = chunks * size - count;
    if (missing > 0) {
      part = part.dim() == 3 ? at::constant_pad_nd(part, {0, 0, 0, missing})
                             : at::constant_pad_nd(part, {0, missing});
    }
    std::vector<int64_t> shape = part.sizes().vec();
    shape[0] = n * chunks;
    shape[1] = size;
    return part.reshape(shape);
  }
  // The way back, without the zeros.
  void paste(const at::Tensor& chunked, const at::Tensor& into) const {
    std::vector<int64_t> shape = into.sizes().vec();
    shape[1] = chunks * size;
    into.narrow(1, first, count).copy_(chunked.reshape(shape).narrow(1, 0, count));
  }
};

std::vector<Grid> grids(int64_t n, int64_t tokens, int64_t chunk) {
  std::vector<Grid> out;
  for (int64_t first = 0; first < tokens; first += kChunksAtOnce * chunk) {
    const int64_t count = std::min(tokens - first, kChunksAtOnce * chunk),
                  size = std::min(count, chunk);
    out.push_back({n, first, count, size, (count + size - 1) / size});
  }
  return out;
}

// The decays between the tokens of a chunk; all undefined without g. m = n * chunks.
struct Decay {
  at::Tensor between;     // [m,C,C] exp(g_{j+1} + ... + g_i) for j <= i, 0 above the diagonal
  at::Tensor from_start;  // [m,C,1] exp(g_1 + ... + g_i)
  at::Tensor to_end;      // [m,C,1] exp(g_{j+1} + ... + g_C)
  at::Tensor whole;       // [n,chunks,1,1]

  Decay(const Grid& grid, const at::Tensor& g) {
    if (!g.defined()) return;
    const int64_t size = grid.size;
    const at::Tensor in_chunks = grid.cut(g).unsqueeze(-1);  // [m,C,1]
    // Row i of column j holds g_i where i > j: its running sum is over j + 1 to i.
    between = in_chunks.expand({-1, size, size}).tril(-1).cumsum(1).exp_().tril_();
    from_start = in_chunks.cumsum(1).exp_();
    to_end = between.select(1, size - 1).unsqueeze(-1);
    whole = from_start.select(1, size - 1).reshape({grid.n, grid.chunks, 1, 1});
  }

  bool defined() const { return between.defined(); }
  at::Tensor decayed_from_start(const at::Tensor& q) const {
    return defined() ? q * from_start : q;
  }
  at::Tensor decayed_to_end(const at::Tensor& k) const { return defined() ? k * to_end : k; }
  void mask(at::Tensor& scores) const {
    if (defined()) {
      scores.mul_(between);
    } else {
      scores.tril_();
    }
  }
};

at::Tensor transposed(const at::Tensor& matrices) { return matrices.transpose(1, 2); }

// One group of chunks with everything that forward and backward both need of it.
struct Group {
  Grid grid;
  at::Tensor q, k, x;  // [m,C,F], [m,C,F], [m,C,V]
  Decay decay;
  at::Tensor scores;         // [m,C,C]
  at::Tensor before, after;  // [n,chunks,F,V]: the state around each chunk

  Group(const Grid& grid_in, const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& x_in,
        const at::Tensor& g_in, const at::Tensor& state)
      : grid(grid_in),
        q(grid.cut(q_in)),
        k(grid.cut(k_in)),
        x(grid.cut(x_in)),
        decay(grid, g_in),
        scores(at::bmm(q, transposed(k))) {
    decay.mask(scores);
    const int64_t features = q.size(2), values = x.size(2);
    after = at::bmm(transposed(decay.decayed_to_end(k)), x)
                .view({grid.n, grid.chunks, features, values});
    before = at::empty_like(after);
    before.select(1, 0).copy_(state);
    for (int64_t c = 0; c < grid.chunks; ++c) {
      if (c > 0) before.select(1, c).copy_(after.select(1, c - 1));
      at::Tensor left = after.select(1, c);
      if (decay.defined()) {
        left.addcmul_(before.select(1, c), decay.whole.select(1, c));
      } else {
        left.add_(before.select(1, c));
      }
    }
  }

  at::Tensor state() const { return after.select(1, grid.chunks - 1); }
  at::Tensor flat(const at::Tensor& states) const {
    return states.view({grid.n * grid.chunks, states.size(2), states.size(3)});
  }
  at::Tensor outputs() const {
    return at::bmm(scores, x).baddbmm_(decay.decayed_from_start(q), flat(before));
  }
};

struct Gradients {
  at::Tensor q, k, x, g;
};

// Of one group, from dy (all tokens) and the gradient of the state behind it, which becomes that of
// the state before it.
void group_backward(const Group& group, const at::Tensor& dy_all, at::Tensor& d_state,
                    const Gradients& d) {
  const Grid& grid = group.grid;
  const Decay& decay = group.decay;
  const at::Tensor dy = grid.cut(dy_all);
  const at::Tensor from_outputs =
      at::bmm(transposed(decay.decayed_from_start(group.q)), dy).view(group.after.sizes());
  at::Tensor d_after = at::empty_like(group.after);
  for (int64_t c = grid.chunks; c-- > 0;) {
    d_after.select(1, c).copy_(d_state);
    d_state = decay.defined()
                  ? at::addcmul(from_outputs.select(1, c), d_state, decay.whole.select(1, c))
                  : d_state + from_outputs.select(1, c);
  }
  const at::Tensor d_states = group.flat(d_after);
  at::Tensor d_scores = at::bmm(dy, transposed(group.x));
  decay.mask(d_scores);
  at::Tensor dq = at::bmm(dy, transposed(group.flat(group.before)));
  at::Tensor dk = at::bmm(group.x, transposed(d_states));
  if (decay.defined()) {
    dq.mul_(decay.from_start);
    dk.mul_(decay.to_end);
  }
  dq.baddbmm_(d_scores, group.k);
  dk.baddbmm_(transposed(d_scores), group.q);
  at::Tensor dx =
      at::bmm(transposed(group.scores), dy).baddbmm_(decay.decayed_to_end(group.k), d_states);
  grid.paste(dq, d.q);
  grid.paste(dk, d.k);
  grid.paste(dx, d.x);
  if (!decay.defined()) return;
  // With G the running sum of g in the chunk, y and the state depend on q exp(G), k exp(-G) and, as
  // a whole, on exp(G at the end).
  at::Tensor d_sum = (group.q * dq).sum(-1) - (group.k * dk).sum(-1);
  d_sum.select(1, grid.size - 1).add_((d_states * group.flat(group.after)).sum({1, 2}));
  grid.paste(d_sum.flip({1}).cumsum(1).flip({1}), d.g);
}

class LinearScan : public torch::autograd::Function<LinearScan> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& x, const std::optional<at::Tensor>& g_in,
                               const std::optional<at::Tensor>& state_in, int64_t chunk) {
    const at::Tensor g = g_in.value_or(at::Tensor());
    const int64_t n = q.size(0), tokens = q.size(1);
    const at::Tensor start =
        state_in.has_value() ? *state_in : at::zeros({n, q.size(2), x.size(2)}, q.options());
    at::Tensor state = start;
    const at::Tensor y = at::empty({n, tokens, x.size(2)}, x.options());
    variable_list saved{q, k, x, g};
    for (const Grid& grid : grids(n, tokens, chunk)) {
      saved.push_back(state);
      const Group group(grid, q, k, x, g, state);
      grid.paste(group.outputs(), y);
      state = group.state().contiguous();
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["chunk"] = chunk;
    ctx->saved_data["has_state"] = state_in.has_value();
    // An input may not be an output.
    return {y, tokens == 0 ? start.clone() : state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(), "linear_scan: second derivatives are not offered");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &x = saved[2], &g = saved[3];
    const int64_t n = q.size(0), tokens = q.size(1);
    const Gradients d{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
                      at::empty(x.sizes(), x.options()),
                      g.defined() ? at::empty(g.sizes(), g.options()) : at::Tensor()};
    at::Tensor d_state = grads[1];
    const std::vector<Grid> all = grids(n, tokens, ctx->saved_data["chunk"].toInt());
    for (std::size_t i = all.size(); i-- > 0;) {
      group_backward(Group(all[i], q, k, x, g, saved[4 + i]), grads[0], d_state, d);
    }
    const bool has_state = ctx->saved_data["has_state"].toBool();
    return {d.q, d.k, d.x, d.g, has_state ? d_state : at::Tensor(), {}};
  }
};

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

LinearScanResult linear_scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& x,
                             const at::Tensor& g, const at::Tensor& state, int64_t chunk) {
  check(q, k, x, g, state);
  TORCH_CHECK(chunk > 0, "linear_scan: chunk is ", chunk, ", expected at least 1");
  const variable_list out = LinearScan::apply(q, k, x, optional(g), optional(state), chunk);
  return {out[0], out[1]};
}

LinearScanResult linear_scan_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& x,
                                  const at::Tensor& g, const at::Tensor& state) {
  check(q, k, x, g, state);
  TORCH_CHECK(q.size(1) == 1, "linear_scan_step: q has shape ", q.sizes(), ", expected one token");
  const at::NoGradGuard no_grad;
  at::Tensor next;
  if (!state.defined()) {
    next = at::bmm(transposed(k), x);
  } else if (g.defined()) {
    next = (state * g.exp().unsqueeze(-1)).baddbmm_(transposed(k), x);
  } else {
    next = at::baddbmm(state, transposed(k), x);
  }
  return {at::bmm(q, next), next};
}

LinearAttentionResult linear_attention(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& write,
                                       const at::Tensor& g, const at::Tensor& state, double eps,
                                       const Scan& scan) {
  const int64_t dim = v.size(2);
  at::Tensor x = at::cat({v, at::ones({v.size(0), v.size(1), 1}, v.options())}, -1);
  if (write.defined()) x = x * write.unsqueeze(-1);
  const LinearScanResult r = scan(q, k, x, g, state);
  return {r.y.narrow(-1, 0, dim) / (r.y.narrow(-1, dim, 1) + eps), r.state};
}

}  // namespace graft::mixers
