#include "core/teacher/backbone.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <sstream>
#include <tuple>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/teacher/shape_of.h"

namespace graft {
namespace {

void expect_shape(const at::Tensor& t, const char* what, at::IntArrayRef expected) {
  if (t.defined() && t.sizes() == expected) return;
  std::ostringstream text;
  text << what << " is " << shape_of(t) << ", expected " << expected;
  fail(ErrorKind::internal, text.str());
}

// ------------------------------------------------------------------------------------ weights

// A linear projection y = x W^T + b over parameters that live in the map.
struct Linear {
  const Parameter* weight = nullptr;
  const Parameter* bias = nullptr;
};

struct Norm {
  const Parameter* weight = nullptr;
  const Parameter* bias = nullptr;  // LayerNorm only
};

struct Layer {
  Norm input_norm, mlp_norm;
  bool replaced = false;
  Linear query, key, value, output;
  Linear fused;  // GPT-NeoX: query, key and value in one, rows [H, 3, head_dim]
  Norm query_norm, key_norm;
  Linear gate, up, down;  // gate is absent in an MLP that is not gated
};

// bfloat16 copies of parameters. A copy is made anew when the parameter was updated or replaced.
class LowPrecision {
 public:
  at::Tensor get(const Parameter& parameter) {
    const at::Tensor& value = parameter.value;
    // Under autograd the cast belongs to the graph, or the parameter would get no gradient.
    if (value.requires_grad() && at::GradMode::is_enabled()) return value.to(at::kBFloat16);
    const std::lock_guard lock(mutex_);
    Copy& copy = copies_[&parameter];
    if (!copy.source.is_same(value) || copy.version != value._version()) {
      // Not an inference tensor, whatever mode the first caller is in: later ones may want
      // gradients.
      const c10::InferenceMode off(false);
      copy = {value, value._version(), value.detach().to(at::kBFloat16)};
    }
    return copy.low;
  }

 private:
  struct Copy {
    at::Tensor source;
    int64_t version = -1;
    at::Tensor low;
  };
  std::mutex mutex_;
  std::map<const Parameter*, Copy> copies_;
};

at::ScalarType torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return at::kFloat;
    case DType::F16:
      return at::kHalf;
    case DType::BF16:
      return at::kBFloat16;
    default:
      fail(ErrorKind::internal, std::string("no parameter is ") + name(dtype));
  }
}

// ------------------------------------------------------------------------------------- RoPE

struct Rotation {
  at::Tensor cos, sin;  // [1 or B, T, 1, rotary_dim / 2] float32
};

// cos and sin of position * inv_freq, kept for positions 0, 1, 2... as far as they were asked for.
class RopeTable {
 public:
  explicit RopeTable(const RopeConfig& rope)
      : factor_(rope.attention_factor),
        inv_freq_(at::tensor(at::ArrayRef<double>(rope.inv_freq), at::kFloat)) {}

  Rotation range(int64_t start, int64_t tokens) {
    const std::lock_guard lock(mutex_);
    if (start + tokens > size_) {
      const c10::InferenceMode off(false);  // the tables are saved for backward by later callers
      size_ = std::max(start + tokens, 2 * size_);
      table_ = compute(at::arange(size_, at::kLong).unsqueeze(0));
    }
    return {table_.cos.narrow(1, start, tokens), table_.sin.narrow(1, start, tokens)};
  }

  Rotation at_positions(const at::Tensor& positions) const { return compute(positions); }

 private:
  // In float32 throughout, as transformers does: the angle of a far position has its rounding.
  Rotation compute(const at::Tensor& positions) const {
    const at::NoGradGuard no_grad;
    const at::Tensor angle = positions.to(at::kFloat).unsqueeze(-1) * inv_freq_;
    at::Tensor cos = angle.cos(), sin = angle.sin();
    if (factor_ != 1.0) cos = cos * factor_, sin = sin * factor_;
    return {cos.unsqueeze(2), sin.unsqueeze(2)};
  }

  double factor_;
  at::Tensor inv_freq_;
  std::mutex mutex_;
  int64_t size_ = 0;
  Rotation table_;
};

// x [B,T,H,d]: rotates pairs (i, i + r/2) of the first r dims; the rest passes.
at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  const int64_t half = rotation.cos.size(-1);
  const at::Tensor a = x.narrow(-1, 0, half);
  const at::Tensor b = x.narrow(-1, half, half);
  std::vector<at::Tensor> parts = {at::addcmul(a * rotation.cos, b, rotation.sin, -1),
                                   at::addcmul(b * rotation.cos, a, rotation.sin)};
  if (x.size(-1) > 2 * half) parts.push_back(x.narrow(-1, 2 * half, x.size(-1) - 2 * half));
  return at::cat(parts, -1);
}

// --------------------------------------------------------------------------------- attention

// What may be seen: [1 or B, 1, T, S], true = yes. Query t stands at key S - T + t and sees keys up
// to itself that are real. A padded query sees itself too, so that its softmax is defined.
at::Tensor visible(const at::Tensor& pad_mask, int64_t tokens, int64_t keys) {
  const int64_t past = keys - tokens;
  const at::Tensor causal = at::ones({tokens, keys}, at::kBool).tril(past);
  if (!pad_mask.defined()) return causal.view({1, 1, tokens, keys});
  const at::Tensor self = causal.triu(past);
  const at::Tensor real = pad_mask.to(at::kBool).unsqueeze(1).unsqueeze(1);
  return causal.logical_and(real.logical_or(self));
}

// Key or value heads [B,H_kv,S,d] repeated for the query heads that share them: [B,H,S,d].
at::Tensor for_query_heads(const at::Tensor& x, int64_t heads) {
  const int64_t kv_heads = x.size(1);
  if (kv_heads == heads) return x;
  return x.unsqueeze(2)
      .expand({x.size(0), kv_heads, heads / kv_heads, x.size(2), x.size(3)})
      .reshape({x.size(0), heads, x.size(2), x.size(3)});
}

// q [B,H,T,d], k and v [B,H_kv,S,d] -> [B,H,T,d], without the [B,H,T,S] in between.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& pad_mask) {
  const int64_t heads = q.size(1), tokens = q.size(2), keys = k.size(2);
  if (tokens == 1) {
    // The heads of a group stand in for queries of one head: nothing is repeated.
    const at::Tensor grouped = q.reshape({q.size(0), k.size(1), heads / k.size(1), q.size(3)});
    std::optional<at::Tensor> mask;
    if (pad_mask.defined()) mask = visible(pad_mask, 1, keys);
    return at::scaled_dot_product_attention(grouped, k, v, mask).reshape(q.sizes());
  }
  const at::Tensor keys_of = for_query_heads(k, heads), values_of = for_query_heads(v, heads);
  if (!pad_mask.defined() && tokens == keys) {
    return at::scaled_dot_product_attention(q, keys_of, values_of, {}, 0.0, /*is_causal=*/true);
  }
  return at::scaled_dot_product_attention(q, keys_of, values_of, visible(pad_mask, tokens, keys));
}

// The same with the probabilities: {context [B,H,T,d], probs [B,H,T,S]}.
std::pair<at::Tensor, at::Tensor> attend_with_probs(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v,
                                                    const at::Tensor& pad_mask) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(-1)));
  const at::Tensor scores = at::matmul(q * scale, for_query_heads(k, q.size(1)).transpose(-1, -2));
  const at::Tensor hidden = visible(pad_mask, q.size(2), k.size(2)).logical_not();
  const at::Tensor probs =
      scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1);
  return {at::matmul(probs, for_query_heads(v, q.size(1))), probs};
}

// -------------------------------------------------------------------------------- checkpoint

// What the names in the files are to this model.
struct Claims {
  std::vector<TensorLayout> wanted;
  std::vector<std::string> left_over;  // the caller's
  bool stores_tied_output = false;     // a second copy of the embedding
};

bool is_foreign(const ModelConfig& config, const BackboneOptions& options,
                const std::string& name) {
  if (options.is_foreign && options.is_foreign(name)) return true;
  return std::any_of(options.replaced_layers.begin(), options.replaced_layers.end(),
                     [&](int64_t i) { return name.starts_with(attention_prefix(config, i)); });
}

std::string model_text(const ModelConfig& config) {
  return "a " + config.family + " model of " + std::to_string(config.n_layers) + " layers";
}

[[noreturn]] void fail_missing(const ModelConfig& config, const Checkpoint& checkpoint,
                               const std::vector<std::string>& missing,
                               const std::vector<std::string>& unknown) {
  std::string text = checkpoint.folder().string() + ": the tensor " + quoted(missing.front()) +
                     " of " + model_text(config) + " is missing";
  if (missing.size() > 1) text += ", and " + std::to_string(missing.size() - 1) + " more";
  if (const auto near = nearest(missing.front(), unknown)) {
    text += " (did you mean " + quoted(*near) + "?)";
  }
  if (missing.front() == output_projection_name(config)) {
    text +=
        "; config.json says tie_word_embeddings is false, so the output projection is not the "
        "embedding and must be stored";
  }
  fail(ErrorKind::input, text);
}

[[noreturn]] void fail_unknown(const ModelConfig& config, const Checkpoint& checkpoint,
                               const std::vector<std::string>& unknown,
                               const std::vector<std::string>& known) {
  constexpr std::size_t shown = 5;
  std::string text =
      checkpoint.file_of(unknown.front()).string() + ": " + model_text(config) + " has no tensor ";
  for (std::size_t i = 0; i < std::min(shown, unknown.size()); ++i) {
    text += (i ? ", " : "") + quoted(unknown[i]);
  }
  if (unknown.size() > shown) text += " and " + std::to_string(unknown.size() - shown) + " more";
  if (const auto near = nearest(unknown.front(), known)) text += "; it has " + quoted(*near);
  fail(ErrorKind::input, text + ". A tensor that nobody reads would be lost silently");
}

// Every tensor of the model must be in the files, and every tensor in the files somebody's.
Claims claim_names(const ModelConfig& config, const Checkpoint& checkpoint,
                   const BackboneOptions& options) {
  Claims claims{checkpoint_layout(config, options.replaced_layers), {}, false};
  std::vector<std::string> wanted, missing, unknown;
  for (const TensorLayout& tensor : claims.wanted) {
    wanted.push_back(tensor.name);
    if (checkpoint.find(tensor.name) == nullptr) missing.push_back(tensor.name);
  }
  const std::set<std::string> wanted_set(wanted.begin(), wanted.end());
  for (const std::string& name : checkpoint.names()) {
    if (wanted_set.contains(name)) continue;
    if (config.tied && name == output_projection_name(config)) {
      claims.stores_tied_output = true;
    } else if (is_foreign(config, options, name)) {
      claims.left_over.push_back(name);
    } else if (!is_unused_buffer(name)) {
      unknown.push_back(name);
    }
  }
  if (!missing.empty()) fail_missing(config, checkpoint, missing, unknown);
  if (!unknown.empty()) fail_unknown(config, checkpoint, unknown, wanted);
  std::sort(claims.left_over.begin(), claims.left_over.end());
  return claims;
}

void check_form(const Checkpoint& checkpoint, const TensorLayout& expected) {
  const TensorView& view = checkpoint.at(expected.name);
  const std::string who = checkpoint.file_of(view.name).string() + ": tensor " + quoted(view.name);
  if (view.shape != expected.shape) {
    fail(ErrorKind::input, who + " has shape " + shape_text(view.shape) +
                               "; the dimensions in config.json ask for " +
                               shape_text(expected.shape));
  }
  if (view.dtype != DType::F32 && view.dtype != DType::F16 && view.dtype != DType::BF16) {
    fail(ErrorKind::input,
         who + " is stored as " + name(view.dtype) + "; F32, F16 and BF16 weights can be read");
  }
}

// The tensor's numbers in float32. Its bytes are copied: they may stand unaligned in a read-only
// mapping, and parameters are trained in place.
at::Tensor read_values(const Checkpoint& checkpoint, const TensorView& view) {
  if (const auto bad = find_non_finite(view)) {
    fail(ErrorKind::input, checkpoint.file_of(view.name).string() + ": tensor " +
                               quoted(view.name) + " holds " + bad->value + " at " +
                               shape_text(bad->index) +
                               "; the file is damaged, or the model diverged in training");
  }
  at::Tensor stored = at::empty(view.shape, torch_dtype(view.dtype));
  if (view.bytes > 0) std::memcpy(stored.mutable_data_ptr(), view.data, view.bytes);
  return stored.to(at::kFloat);
}

void check_tied_output(const ModelConfig& config, const Checkpoint& checkpoint,
                       const at::Tensor& embedding) {
  const std::string output = output_projection_name(config);
  check_form(checkpoint, {output, {config.vocab_size, config.model_dim}});
  if (!at::equal(read_values(checkpoint, checkpoint.at(output)), embedding)) {
    fail(ErrorKind::input,
         checkpoint.file_of(output).string() + ": tensor " + quoted(output) + " differs from " +
             quoted(embedding_name(config)) +
             ", but config.json says tie_word_embeddings is true; set it to false "
             "if the two are meant to differ");
  }
}

}  // namespace

at::Tensor as_stored(const Parameter& parameter) {
  return parameter.value.detach().to(torch_dtype(parameter.file_dtype)).contiguous();
}

// ------------------------------------------------------------------------------------ Impl

struct Backbone::Impl {
  Impl(const ModelConfig& model, Compute how) : config(model), compute(how), rope(model.rope) {}

  const ModelConfig config;
  Compute compute;
  std::map<std::string, Parameter> parameters;
  std::vector<std::string> left_over;
  const Parameter* embedding = nullptr;
  Linear output;
  Norm final_norm;
  std::vector<Layer> layers;
  mutable RopeTable rope;
  mutable LowPrecision low;

  const Parameter* find(const std::string& name) const {
    const auto it = parameters.find(name);
    return it == parameters.end() ? nullptr : &it->second;
  }
  Linear linear(const std::string& name) const {
    return {find(name + ".weight"), find(name + ".bias")};
  }
  Norm norm(const std::string& name) const {
    return {find(name + ".weight"), find(name + ".bias")};
  }

  void connect(const std::set<int64_t>& replaced);
  Layer connect_layer(int64_t index) const;
  const Layer& layer(int64_t index) const;
  const Layer& own_attention(int64_t index) const;

  at::Tensor apply(const Linear& linear, const at::Tensor& x) const;
  at::Tensor apply(const Norm& norm, const at::Tensor& x) const;
  at::Tensor mlp_inner(const Layer& layer, const at::Tensor& h, const at::Tensor& stream) const;
  struct Heads {
    at::Tensor q, k, v;  // [B,T,H or H_kv,d]
  };
  Heads project(const Layer& layer, const at::Tensor& x) const;
  Rotation rotation(const AttentionCall& call, int64_t batch, int64_t past, int64_t tokens) const;
};

void Backbone::Impl::connect(const std::set<int64_t>& replaced) {
  const bool neox = config.family == "gpt-neox";
  embedding = find(embedding_name(config));
  output.weight = config.tied ? embedding : find(output_projection_name(config));
  final_norm = norm(neox ? "gpt_neox.final_layer_norm" : "model.norm");
  for (int64_t i = 0; i < config.n_layers; ++i) {
    layers.push_back(connect_layer(i));
    layers.back().replaced = replaced.contains(i);
  }
}

Layer Backbone::Impl::connect_layer(int64_t index) const {
  const std::string attention = attention_prefix(config, index);
  // "model.layers.3." from "model.layers.3.self_attn."
  const std::string prefix = attention.substr(0, attention.rfind('.', attention.size() - 2) + 1);
  Layer out;
  out.input_norm = norm(prefix + "input_layernorm");
  out.mlp_norm = norm(prefix + "post_attention_layernorm");
  if (config.family == "gpt-neox") {
    out.fused = linear(attention + "query_key_value");
    out.output = linear(attention + "dense");
    out.up = linear(prefix + "mlp.dense_h_to_4h");
    out.down = linear(prefix + "mlp.dense_4h_to_h");
    return out;
  }
  out.query = linear(attention + "q_proj");
  out.key = linear(attention + "k_proj");
  out.value = linear(attention + "v_proj");
  out.output = linear(attention + "o_proj");
  out.query_norm = norm(attention + "q_norm");
  out.key_norm = norm(attention + "k_norm");
  out.gate = linear(prefix + "mlp.gate_proj");
  out.up = linear(prefix + "mlp.up_proj");
  out.down = linear(prefix + "mlp.down_proj");
  return out;
}

const Layer& Backbone::Impl::layer(int64_t index) const {
  if (index < 0 || index >= config.n_layers) {
    fail(ErrorKind::internal,
         "there is no layer " + std::to_string(index) + " in " + model_text(config));
  }
  return layers[static_cast<std::size_t>(index)];
}

const Layer& Backbone::Impl::own_attention(int64_t index) const {
  const Layer& found = layer(index);
  if (found.replaced) {
    fail(ErrorKind::internal,
         "the attention block of layer " + std::to_string(index) + " was replaced and not loaded");
  }
  return found;
}

// In bfloat16 the result stays bfloat16: whoever adds it to the stream or normalises it converts.
at::Tensor Backbone::Impl::apply(const Linear& linear, const at::Tensor& x) const {
  std::optional<at::Tensor> bias;
  if (compute == Compute::bfloat16) {
    if (linear.bias) bias = low.get(*linear.bias);
    return at::linear(x.to(at::kBFloat16), low.get(*linear.weight), bias);
  }
  if (linear.bias) bias = linear.bias->value;
  return at::linear(x, linear.weight->value, bias);
}

at::Tensor Backbone::Impl::apply(const Norm& norm, const at::Tensor& x) const {
  const at::Tensor& weight = norm.weight->value;
  if (norm.bias)
    return at::layer_norm(x, weight.sizes(), weight, norm.bias->value, config.norm_eps);
  const at::Tensor mean_square = x.square().mean(-1, /*keepdim=*/true);
  return x * at::rsqrt(mean_square + config.norm_eps) * weight;
}

// `stream` is h with the attention block's output.
at::Tensor Backbone::Impl::mlp_inner(const Layer& layer, const at::Tensor& h,
                                     const at::Tensor& stream) const {
  const at::Tensor x = apply(layer.mlp_norm, config.parallel_residual ? h : stream);
  const auto activate = [&](const at::Tensor& u) {
    return config.activation == Activation::silu ? at::silu(u) : at::gelu(u);
  };
  return layer.gate.weight ? activate(apply(layer.gate, x)) * apply(layer.up, x)
                           : activate(apply(layer.up, x));
}

Backbone::Impl::Heads Backbone::Impl::project(const Layer& layer, const at::Tensor& x) const {
  const int64_t batch = x.size(0), tokens = x.size(1), dim = config.head_dim;
  if (layer.fused.weight) {
    const at::Tensor qkv =
        apply(layer.fused, x).to(at::kFloat).view({batch, tokens, config.n_heads, 3, dim});
    return {qkv.select(3, 0), qkv.select(3, 1), qkv.select(3, 2)};
  }
  const auto split = [&](const Linear& linear, int64_t heads) {
    return apply(linear, x).to(at::kFloat).view({batch, tokens, heads, dim});
  };
  Heads heads{split(layer.query, config.n_heads), split(layer.key, config.n_kv_heads),
              split(layer.value, config.n_kv_heads)};
  if (layer.query_norm.weight) {
    heads.q = apply(layer.query_norm, heads.q);
    heads.k = apply(layer.key_norm, heads.k);
  }
  return heads;
}

Rotation Backbone::Impl::rotation(const AttentionCall& call, int64_t batch, int64_t past,
                                  int64_t tokens) const {
  if (call.positions.defined()) {
    expect_shape(call.positions, "positions", {batch, tokens});
    return rope.at_positions(call.positions);
  }
  if (!call.pad_mask.defined()) return rope.range(past, tokens);
  const at::Tensor count = call.pad_mask.to(at::kLong).cumsum(1) - 1;
  return rope.at_positions(count.narrow(1, past, tokens).clamp_min(0));
}

// ---------------------------------------------------------------------------------- Backbone

Backbone::Backbone(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Backbone::Backbone(Backbone&&) noexcept = default;
Backbone& Backbone::operator=(Backbone&&) noexcept = default;
Backbone::~Backbone() = default;

Backbone Backbone::load(const std::filesystem::path& folder, const BackboneOptions& options) {
  const ModelConfig config = load_model_config(folder);
  return load(config, Checkpoint::open(folder), options);
}

Backbone Backbone::load(const ModelConfig& config, const Checkpoint& checkpoint,
                        const BackboneOptions& options) {
  for (const int64_t layer : options.replaced_layers) {
    if (layer < 0 || layer >= config.n_layers) {
      fail(ErrorKind::internal,
           "layer " + std::to_string(layer) + " cannot be replaced in " + model_text(config));
    }
  }
  const Claims claims = claim_names(config, checkpoint, options);
  for (const TensorLayout& tensor : claims.wanted) check_form(checkpoint, tensor);

  const c10::InferenceMode off(false);  // parameters must be able to take part in autograd later
  auto impl = std::make_unique<Impl>(config, options.compute);
  impl->left_over = claims.left_over;
  for (const TensorLayout& tensor : claims.wanted) {
    const TensorView& view = checkpoint.at(tensor.name);
    impl->parameters[tensor.name] = {read_values(checkpoint, view), view.dtype};
  }
  impl->connect(options.replaced_layers);
  if (claims.stores_tied_output) check_tied_output(config, checkpoint, impl->embedding->value);
  return Backbone(std::move(impl));
}

Backbone Backbone::with(const std::map<std::string, at::Tensor>& changed) const {
  auto impl = std::make_unique<Impl>(impl_->config, impl_->compute);
  impl->left_over = impl_->left_over;
  impl->parameters = impl_->parameters;
  for (const auto& [name, value] : changed) {
    const auto found = impl->parameters.find(name);
    if (found == impl->parameters.end() || found->second.value.sizes() != value.sizes())
      fail(ErrorKind::internal,
           "there is no tensor " + quoted(name) + " of that shape in " + model_text(config()));
    found->second = {value, DType::F32};
  }
  std::set<int64_t> replaced;
  for (int64_t layer = 0; layer < config().n_layers; ++layer)
    if (is_replaced(layer)) replaced.insert(layer);
  impl->connect(replaced);
  return Backbone(std::move(impl));
}

const ModelConfig& Backbone::config() const { return impl_->config; }
Compute Backbone::compute() const { return impl_->compute; }
void Backbone::set_compute(Compute compute) { impl_->compute = compute; }
bool Backbone::is_replaced(int64_t layer) const { return impl_->layer(layer).replaced; }
std::map<std::string, Parameter>& Backbone::parameters() { return impl_->parameters; }
const std::map<std::string, Parameter>& Backbone::parameters() const { return impl_->parameters; }
const std::vector<std::string>& Backbone::left_over() const { return impl_->left_over; }

int64_t Backbone::parameter_count() const {
  int64_t count = 0;
  for (const auto& [name, parameter] : impl_->parameters) count += parameter.value.numel();
  return count;
}

at::Tensor Backbone::embed(const at::Tensor& ids) const {
  if (!ids.defined() || ids.dim() != 2 || ids.numel() == 0 || ids.scalar_type() != at::kLong) {
    fail(ErrorKind::internal, "token ids are " + shape_of(ids) +
                                  ", expected int64 [B,T] with at least one row and one token");
  }
  const auto [low, high] = at::aminmax(ids);
  const int64_t worst = low.item<int64_t>() < 0 ? low.item<int64_t>() : high.item<int64_t>();
  if (worst < 0 || worst >= impl_->config.vocab_size) {
    fail(ErrorKind::input, "token id " + std::to_string(worst) + " is outside the vocabulary of " +
                               std::to_string(impl_->config.vocab_size));
  }
  return at::embedding(impl_->embedding->value, ids);
}

at::Tensor Backbone::block_input(int64_t layer, const at::Tensor& h) const {
  return impl_->apply(impl_->layer(layer).input_norm, h);
}

AttentionResult Backbone::attention(int64_t index, const at::Tensor& x,
                                    const AttentionCall& call) const {
  const Layer& layer = impl_->own_attention(index);
  if (!x.defined() || x.dim() != 3 || x.size(-1) != impl_->config.model_dim) {
    fail(ErrorKind::internal, "the input of layer " + std::to_string(index) + " is " + shape_of(x) +
                                  ", expected [B,T," + std::to_string(impl_->config.model_dim) +
                                  "]");
  }
  const int64_t batch = x.size(0), tokens = x.size(1);
  const int64_t past = call.cache ? call.cache->length(index) : 0;
  if (call.pad_mask.defined()) expect_shape(call.pad_mask, "pad_mask", {batch, past + tokens});

  Impl::Heads heads = impl_->project(layer, x);
  const Rotation rotation = impl_->rotation(call, batch, past, tokens);
  at::Tensor q = rotate(heads.q, rotation).transpose(1, 2);
  at::Tensor k = rotate(heads.k, rotation).transpose(1, 2);
  at::Tensor v = heads.v.transpose(1, 2);
  const at::ScalarType kept = impl_->compute == Compute::bfloat16 ? at::kBFloat16 : at::kFloat;
  k = k.to(kept), v = v.to(kept);
  if (call.cache) std::tie(k, v) = call.cache->append(index, k, v);
  // Probabilities are asked for as statistics, so they are float32 in any case.
  const at::ScalarType used = call.want_probs ? at::kFloat : kept;
  q = q.to(used), k = k.to(used), v = v.to(used);

  AttentionResult result;
  at::Tensor context;
  if (call.want_probs) {
    std::tie(context, result.probs) = attend_with_probs(q, k, v, call.pad_mask);
  } else {
    context = attend(q, k, v, call.pad_mask);
  }
  context = context.transpose(1, 2);  // [B,T,H,d]
  if (call.want_context) result.context = context.to(at::kFloat);
  result.y = impl_->apply(layer.output, context.reshape({batch, tokens, -1})).to(at::kFloat);
  return result;
}

at::Tensor Backbone::finish_block(int64_t index, const at::Tensor& h, const at::Tensor& y) const {
  const Layer& layer = impl_->layer(index);
  const at::Tensor stream = h + y;
  return stream + impl_->apply(layer.down, impl_->mlp_inner(layer, h, stream)).to(at::kFloat);
}

at::Tensor Backbone::mlp_inner(int64_t index, const at::Tensor& h, const at::Tensor& y) const {
  return impl_->mlp_inner(impl_->layer(index), h, h + y).to(at::kFloat);
}

at::Tensor Backbone::final_norm(const at::Tensor& h) const {
  return impl_->apply(impl_->final_norm, h);
}

at::Tensor Backbone::logits(const at::Tensor& rows) const {
  return impl_->apply(impl_->output, rows).to(at::kFloat);
}

at::Tensor Backbone::hidden(const at::Tensor& ids, const AttentionCall& call,
                            const Block& block) const {
  at::Tensor h = embed(ids);
  for (int64_t i = 0; i < impl_->config.n_layers; ++i) {
    const at::Tensor x = block_input(i, h);
    h = finish_block(i, h, block ? block(i, x) : attention(i, x, call).y);
  }
  return final_norm(h);
}

std::vector<RoleTensor> Backbone::layer_roles(int64_t index) const {
  const Layer& layer = impl_->own_attention(index);
  const ModelConfig& config = impl_->config;
  // Part i of a fused parameter: rows [H, 3, head_dim] -> [H * head_dim].
  const auto part = [&](const Parameter& fused, int64_t i) {
    std::vector<int64_t> shape = {config.n_heads, 3, config.head_dim};
    if (fused.value.dim() == 2) shape.push_back(config.model_dim);
    return fused.value.detach().view(shape).select(1, i).flatten(0, 1).contiguous();
  };
  const auto tensor_of = [&](const std::string& name) {
    const std::string prefix = attention_prefix(config, index);
    if (name.starts_with("o_proj")) {
      const Parameter* found = name.ends_with("bias") ? layer.output.bias : layer.output.weight;
      return found->value.detach();
    }
    if (!layer.fused.weight) return impl_->find(prefix + name)->value.detach();
    const Parameter& fused = name.ends_with("bias") ? *layer.fused.bias : *layer.fused.weight;
    return part(fused, name[0] == 'q' ? 0 : name[0] == 'k' ? 1 : 2);
  };
  std::vector<RoleTensor> out;
  for (RoleLayout& role : attention_roles(config)) {
    at::Tensor tensor = tensor_of(role.name);
    out.push_back({std::move(role), std::move(tensor)});
  }
  return out;
}

KvCache Backbone::make_cache(int64_t batch, int64_t capacity) const {
  return KvCache(impl_->config.n_layers, batch, capacity);
}

}  // namespace graft
