#include "kit/teacher.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string_view>

namespace graft::conformance {
namespace {

using Vector = std::vector<double>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// A row of key-value heads, each `repeats` times.
Tensor repeat_heads(const Tensor& from, std::int64_t heads, std::int64_t repeats) {
  std::vector<std::int64_t> shape = from.shape();
  shape[0] *= repeats;
  Tensor out(from.dtype(), shape);
  const std::int64_t head = from.size() / heads;
  for (std::int64_t i = 0; i < out.size(); ++i)
    out.set(i, from.at(i / head / repeats * head + i % head));
  return out;
}

void append(Vector& all, const std::vector<Vector>& rows) {
  for (const Vector& row : rows) all.insert(all.end(), row.begin(), row.end());
}

// x over the root of its mean square.
Vector unit_rms(const Vector& x, double eps) {
  double squares = 0;
  for (const double u : x) squares += u * u;
  Vector out = x;
  for (double& u : out) u /= std::sqrt(squares / static_cast<double>(x.size()) + eps);
  return out;
}

// Causal softmax attention of one head of `q` over the rows before it, into probs[0..t].
void attend(std::span<const double> q, const std::vector<Vector>& keys, std::size_t first,
            std::size_t t, std::span<double> probs) {
  double most = -std::numeric_limits<double>::infinity();
  for (std::size_t s = 0; s <= t; ++s) {
    double dot = 0;
    for (std::size_t i = 0; i < q.size(); ++i) dot += q[i] * keys[s][first + i];
    probs[s] = dot / std::sqrt(static_cast<double>(q.size()));
    most = std::max(most, probs[s]);
  }
  double sum = 0;
  for (std::size_t s = 0; s <= t; ++s) sum += probs[s] = std::exp(probs[s] - most);
  for (std::size_t s = 0; s <= t; ++s) probs[s] /= sum;
}

}  // namespace

Teacher::Teacher(const Layer& layer, Random& random) : layer_(layer) {
  const graft_layer_info& info = layer.info;
  const std::int64_t d = info.head_dim, model = info.model_dim;
  const std::int64_t rows = info.n_heads * d, kv_rows = info.n_kv_heads * d;
  const auto add = [&](const char* name, const char* role, const char* axes,
                       std::vector<std::int64_t> shape, std::int32_t heads, double mean,
                       double size) {
    Tensor value(sdk::float32, std::move(shape));
    for (std::int64_t i = 0; i < value.size(); ++i) value.set(i, mean + size * random.normal());
    parameters_.push_back({name, role, axes, "", heads,
                           axes == std::string_view("model") ? 0 : info.head_dim,
                           std::move(value)});
  };
  const double spread = 1 / std::sqrt(static_cast<double>(model));
  // Queries larger, so that the attention is not flat.
  add("q_proj.weight", GRAFT_ROLE_QUERY, "heads*key,model", {rows, model}, info.n_heads, 0,
      2 * spread);
  add("k_proj.weight", GRAFT_ROLE_KEY, "heads*key,model", {kv_rows, model}, info.n_kv_heads, 0,
      spread);
  add("v_proj.weight", GRAFT_ROLE_VALUE, "heads*value,model", {kv_rows, model}, info.n_kv_heads, 0,
      spread);
  add("o_proj.weight", GRAFT_ROLE_OUTPUT, "model,heads*value", {model, rows}, info.n_heads, 0,
      spread);
  if ((info.flags & GRAFT_LAYER_QKV_BIAS) != 0) {
    add("q_proj.bias", GRAFT_ROLE_QUERY_BIAS, "heads*key", {rows}, info.n_heads, 0, 0.3);
    add("k_proj.bias", GRAFT_ROLE_KEY_BIAS, "heads*key", {kv_rows}, info.n_kv_heads, 0, 0.3);
    add("v_proj.bias", GRAFT_ROLE_VALUE_BIAS, "heads*value", {kv_rows}, info.n_kv_heads, 0, 0.3);
  }
  if ((info.flags & GRAFT_LAYER_O_BIAS) != 0)
    add("o_proj.bias", GRAFT_ROLE_OUTPUT_BIAS, "model", {model}, 0, 0, 0.3);
  if ((info.flags & GRAFT_LAYER_QK_NORM) != 0) {
    add("q_norm.weight", GRAFT_ROLE_QUERY_NORM, "key", {d}, 0, 1, 0.2);
    add("k_norm.weight", GRAFT_ROLE_KEY_NORM, "key", {d}, 0, 1, 0.2);
  }
}

Teacher Teacher::ungrouped(const Layer& wide) const {
  Teacher out(wide);
  const std::int32_t heads = layer_.info.n_heads, kv_heads = layer_.info.n_kv_heads;
  for (const NamedParameter& p : parameters_) {
    const bool grouped = p.role == GRAFT_ROLE_KEY || p.role == GRAFT_ROLE_VALUE ||
                         p.role == GRAFT_ROLE_KEY_BIAS || p.role == GRAFT_ROLE_VALUE_BIAS;
    out.parameters_.push_back(
        {p.name, p.role, p.axes, p.domain, grouped ? heads : p.heads, p.head_dim,
         grouped ? repeat_heads(p.value, kv_heads, heads / kv_heads) : p.value.copy()});
  }
  return out;
}

const Tensor* Teacher::find(const char* role) const {
  for (const NamedParameter& p : parameters_) {
    if (p.role == role) return &p.value;
  }
  return nullptr;
}

Vector Teacher::project(const Vector& x, const char* role, const char* bias) const {
  const Tensor& weight = *find(role);
  const Tensor* const plus = find(bias);
  Vector out(index(weight.shape()[0]));
  for (std::size_t i = 0; i < out.size(); ++i) {
    double sum = plus == nullptr ? 0 : plus->at(static_cast<std::int64_t>(i));
    for (std::size_t j = 0; j < x.size(); ++j)
      sum += weight.at(static_cast<std::int64_t>(i * x.size() + j)) * x[j];
    out[i] = sum;
  }
  return out;
}

void Teacher::normalise(Vector& heads, const char* role) const {
  const Tensor* const weight = find(role);
  if (weight == nullptr) return;
  const std::size_t d = index(layer_.info.head_dim);
  for (std::size_t first = 0; first < heads.size(); first += d) {
    double squares = 0;
    for (std::size_t i = 0; i < d; ++i) squares += heads[first + i] * heads[first + i];
    const double unit = 1 / std::sqrt(squares / static_cast<double>(d) + layer_.info.norm_eps);
    for (std::size_t i = 0; i < d; ++i)
      heads[first + i] *= unit * weight->at(static_cast<std::int64_t>(i));
  }
}

void Teacher::rotate(Vector& heads, std::int64_t position) const {
  const std::size_t pairs = layer_.inv_freq.size(), d = index(layer_.info.head_dim);
  const double factor = layer_.info.rope_attention_factor;
  for (std::size_t first = 0; first < heads.size(); first += d) {
    for (std::size_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(position) * layer_.inv_freq[i];
      const double c = factor * std::cos(angle), s = factor * std::sin(angle);
      double &a = heads[first + i], &b = heads[first + i + pairs];
      const double rotated = c * a - s * b;
      b = s * a + c * b;
      a = rotated;
    }
  }
}

Teacher::Sequence Teacher::one_sequence(std::int64_t tokens, Random& random) const {
  Sequence out;
  std::vector<Vector> q, k, v;
  for (std::int64_t t = 0; t < tokens; ++t) {
    out.residual.push_back(random.normals(layer_.info.model_dim, 1.5));
    const Vector x = unit_rms(out.residual.back(), layer_.info.norm_eps);
    q.push_back(project(x, GRAFT_ROLE_QUERY, GRAFT_ROLE_QUERY_BIAS));
    k.push_back(project(x, GRAFT_ROLE_KEY, GRAFT_ROLE_KEY_BIAS));
    v.push_back(project(x, GRAFT_ROLE_VALUE, GRAFT_ROLE_VALUE_BIAS));
    normalise(q.back(), GRAFT_ROLE_QUERY_NORM);
    normalise(k.back(), GRAFT_ROLE_KEY_NORM);
    rotate(q.back(), t);
    rotate(k.back(), t);
    out.x.push_back(x);
  }
  mix(q, k, v, out);
  for (std::size_t t = 0; t < out.context.size(); ++t) {
    out.y.push_back(project(out.context[t], GRAFT_ROLE_OUTPUT, GRAFT_ROLE_OUTPUT_BIAS));
    for (std::size_t i = 0; i < out.y[t].size(); ++i) out.residual[t][i] += out.y[t][i];
  }
  return out;
}

void Teacher::mix(const std::vector<Vector>& q, const std::vector<Vector>& k,
                  const std::vector<Vector>& v, Sequence& out) const {
  const std::size_t T = q.size(), H = index(layer_.info.n_heads), d = index(layer_.info.head_dim);
  const std::size_t group = H / index(layer_.info.n_kv_heads);
  out.probs.assign(H * T * T, 0);
  for (std::size_t t = 0; t < T; ++t) {
    Vector& context = out.context.emplace_back(H * d);
    for (std::size_t h = 0; h < H; ++h) {
      const std::span<double> row = std::span(out.probs).subspan((h * T + t) * T, T);
      const std::size_t kv = h / group * d;
      attend(std::span(q[t]).subspan(h * d, d), k, kv, t, row);
      for (std::size_t s = 0; s <= t; ++s) {
        for (std::size_t i = 0; i < d; ++i) context[h * d + i] += row[s] * v[s][kv + i];
      }
    }
  }
}

std::vector<Signal> Teacher::read(std::int64_t sequences, std::int64_t tokens,
                                  Random& random) const {
  Vector x, y, context, probs, residual;
  for (std::int64_t b = 0; b < sequences; ++b) {
    const Sequence one = one_sequence(tokens, random);
    append(x, one.x);
    append(y, one.y);
    append(context, one.context);
    append(residual, one.residual);
    probs.insert(probs.end(), one.probs.begin(), one.probs.end());
  }
  const std::int64_t B = sequences, H = layer_.info.n_heads;
  const std::vector<std::int64_t> rows{B, tokens, layer_.info.model_dim};
  std::vector<Signal> out;
  const auto add = [&](const char* name, const char* axes, std::vector<std::int64_t> shape,
                       const Vector& values) {
    out.push_back({name, axes, Tensor(sdk::float32, std::move(shape), values)});
  };
  add(GRAFT_SIGNAL_BLOCK_INPUT, "batch,tokens,model", rows, x);
  add(GRAFT_SIGNAL_BLOCK_OUTPUT, "batch,tokens,model", rows, y);
  add(GRAFT_SIGNAL_RESIDUAL, "batch,tokens,model", rows, residual);
  add(GRAFT_SIGNAL_HEAD_CONTEXT, "batch,tokens,heads,value", {B, tokens, H, layer_.info.head_dim},
      context);
  add(GRAFT_SIGNAL_ATTENTION_PROBS, "batch,heads,query,key", {B, H, tokens, tokens}, probs);
  return out;
}

}  // namespace graft::conformance
