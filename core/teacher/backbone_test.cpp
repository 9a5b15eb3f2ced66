#include "core/teacher/backbone.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <limits>

#include "core/teacher/testing.h"

namespace graft {
namespace {

using testing::HasSubstr;

at::Tensor random_ids(int64_t batch, int64_t tokens, int64_t vocab = 320) {
  return at::randint(vocab, {batch, tokens}, at::kLong);
}

// -------------------------------------------------------------- an independent reference, in
// double
//
// The attention block from its roles and graft_layer_info alone, as a plugin author would write it:
// one query at a time, rotation by complex numbers.

at::Tensor reference_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x / (x * x).mean(-1, true).add(eps).sqrt() * weight;
}

// x [T,H,d]
at::Tensor reference_rotation(const at::Tensor& x, const graft_layer_info& info) {
  at::Tensor out = x.clone();
  const int64_t half = info.n_rope_freq;
  for (int64_t t = 0; t < x.size(0); ++t) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(t) * info.rope_inv_freq[i];
      const double c = info.rope_attention_factor * std::cos(angle);
      const double s = info.rope_attention_factor * std::sin(angle);
      const at::Tensor a = x.select(0, t).select(1, i), b = x.select(0, t).select(1, i + half);
      out.select(0, t).select(1, i).copy_(a * c - b * s);
      out.select(0, t).select(1, i + half).copy_(a * s + b * c);
    }
  }
  return out;
}

// x [T,D] double -> [T,D]
at::Tensor reference_attention(const std::vector<RoleTensor>& roles, const graft_layer_info& info,
                               const at::Tensor& x) {
  std::map<std::string, at::Tensor> w;
  for (const RoleTensor& role : roles) w[role.layout.role] = role.tensor.to(at::kDouble);
  const auto heads = [&](const char* role, int64_t count) {
    at::Tensor y = at::matmul(x, w.at(role).t());
    const auto bias = w.find(std::string(role) + "-bias");
    if (bias != w.end()) y = y + bias->second;
    return y.view({x.size(0), count, info.head_dim});
  };
  at::Tensor q = heads(GRAFT_ROLE_QUERY, info.n_heads), k = heads(GRAFT_ROLE_KEY, info.n_kv_heads);
  const at::Tensor v = heads(GRAFT_ROLE_VALUE, info.n_kv_heads);
  if (info.flags & GRAFT_LAYER_QK_NORM) {
    q = reference_norm(q, w.at(GRAFT_ROLE_QUERY_NORM), info.norm_eps);
    k = reference_norm(k, w.at(GRAFT_ROLE_KEY_NORM), info.norm_eps);
  }
  q = reference_rotation(q, info), k = reference_rotation(k, info);
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < x.size(0); ++t) {
    std::vector<at::Tensor> contexts;
    for (int64_t h = 0; h < info.n_heads; ++h) {
      const int64_t kv = h / (info.n_heads / info.n_kv_heads);
      const at::Tensor past_k = k.narrow(0, 0, t + 1).select(1, kv),
                       past_v = v.narrow(0, 0, t + 1).select(1, kv);
      const at::Tensor score =
          at::mv(past_k, q.select(0, t).select(0, h)) / std::sqrt(info.head_dim);
      contexts.push_back(at::mv(past_v.t(), score.softmax(0)));
    }
    rows.push_back(at::cat(contexts));
  }
  at::Tensor y = at::matmul(at::stack(rows), w.at(GRAFT_ROLE_OUTPUT).t());
  if (w.contains(GRAFT_ROLE_OUTPUT_BIAS)) y = y + w.at(GRAFT_ROLE_OUTPUT_BIAS);
  return y;
}

// ------------------------------------------------------------------------------- golden models

class GoldenModel : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { at::manual_seed(7); }
  Backbone model = Backbone::load(kModels / GetParam());
  TensorMap expected = read_tensors(kModels / GetParam() / "expected.safetensors");
  const c10::InferenceMode inference;
};

TEST_P(GoldenModel, EveryStageEqualsTransformers) {
  at::Tensor h = model.embed(expected.at("input_ids"));
  EXPECT_LT(max_difference(h, expected.at("hidden.0")), 1e-6);
  const int64_t layers = model.config().n_layers;
  for (int64_t i = 0; i < layers; ++i) {
    const at::Tensor x = model.block_input(i, h);
    EXPECT_LT(max_difference(x, expected.at("attn_in." + std::to_string(i))), 1e-5);
    const at::Tensor y = model.attention(i, x).y;
    EXPECT_LT(max_difference(y, expected.at("attn_out." + std::to_string(i))), 1e-5);
    h = model.finish_block(i, h, y);
    if (i + 1 < layers) {
      EXPECT_LT(max_difference(h, expected.at("hidden." + std::to_string(i + 1))), 1e-5);
    }
  }
  const at::Tensor last = model.final_norm(h);
  EXPECT_LT(max_difference(last, expected.at("hidden." + std::to_string(layers))), 1e-5);
  EXPECT_LT(max_difference(model.logits(last), expected.at("logits")), 1e-4);
}

TEST_P(GoldenModel, LossEqualsTransformers) {
  const at::Tensor ids = expected.at("input_ids");
  const int64_t tokens = ids.size(1);
  const at::Tensor rows = model.hidden(ids).narrow(1, 0, tokens - 1).flatten(0, 1);
  const at::Tensor loss =
      at::cross_entropy_loss(model.logits(rows), ids.narrow(1, 1, tokens - 1).flatten());
  EXPECT_NEAR(loss.item<double>(), expected.at("loss").item<double>(), 1e-5);
}

TEST_P(GoldenModel, RolesAloneGiveTheBlock) {
  for (int64_t i = 0; i < model.config().n_layers; ++i) {
    const std::vector<RoleTensor> roles = model.layer_roles(i);
    for (const RoleTensor& role : roles) {
      EXPECT_EQ(role.tensor.sizes(), at::IntArrayRef(role.layout.shape)) << role.layout.name;
      EXPECT_EQ(role.tensor.scalar_type(), at::kFloat);
      EXPECT_TRUE(role.tensor.is_contiguous());
    }
    const LayerInfo info = model.layer_info(i);
    const at::Tensor x = expected.at("attn_in." + std::to_string(i)).squeeze(0);
    const at::Tensor y = reference_attention(roles, info.c_info(), x);
    EXPECT_LT(max_difference(y, expected.at("attn_out." + std::to_string(i)).squeeze(0)), 1e-6);
  }
}

TEST_P(GoldenModel, ProbabilitiesAndContextExplainTheOutput) {
  const at::Tensor ids = random_ids(2, 13);
  const at::Tensor x = model.block_input(0, model.embed(ids));
  AttentionCall call;
  call.want_context = true;
  const AttentionResult fast = model.attention(0, x, call);
  call.want_probs = true;
  const AttentionResult full = model.attention(0, x, call);
  const ModelConfig& config = model.config();
  ASSERT_EQ(full.probs.sizes(), (std::vector<int64_t>{2, config.n_heads, 13, 13}));
  ASSERT_EQ(full.context.sizes(), (std::vector<int64_t>{2, 13, config.n_heads, config.head_dim}));
  EXPECT_LT(max_difference(full.probs.sum(-1), at::ones({2, config.n_heads, 13})), 1e-6);
  EXPECT_EQ(full.probs.triu(1).abs().max().item<double>(), 0.0);
  EXPECT_LT(max_difference(fast.context, full.context), 1e-5);
  EXPECT_LT(max_difference(fast.y, full.y), 1e-5);
  at::Tensor output, bias;
  for (const RoleTensor& role : model.layer_roles(0)) {
    if (role.layout.role == GRAFT_ROLE_OUTPUT) output = role.tensor;
    if (role.layout.role == GRAFT_ROLE_OUTPUT_BIAS) bias = role.tensor;
  }
  at::Tensor y = at::matmul(full.context.flatten(2, 3), output.t());
  if (bias.defined()) y = y + bias;
  EXPECT_LT(max_difference(y, full.y), 1e-5);
  EXPECT_FALSE(model.attention(0, x).context.defined() || model.attention(0, x).probs.defined());
}

// Prefill of some length, then the rest in pieces: the same as all at once.
TEST_P(GoldenModel, CachedPiecesEqualTheWhole) {
  constexpr int64_t tokens = 21;
  const at::Tensor ids = random_ids(3, tokens);
  const at::Tensor whole = model.hidden(ids);
  for (const std::vector<int64_t>& pieces :
       {std::vector<int64_t>(21, 1), {2, 19}, {7, 1, 1, 12}, {20, 1}, {21}, {5, 8, 8}}) {
    KvCache cache = model.make_cache(3, 4);  // grows on the way
    AttentionCall call;
    call.cache = &cache;
    std::vector<at::Tensor> parts;
    int64_t start = 0;
    for (const int64_t count : pieces) {
      parts.push_back(model.hidden(ids.narrow(1, start, count), call));
      start += count;
      EXPECT_EQ(cache.length(), start);
    }
    EXPECT_LT(max_difference(at::cat(parts, 1), whole), 2e-5) << pieces.size() << " pieces";
  }
}

TEST_P(GoldenModel, TruncatedCacheContinuesFromThere) {
  const at::Tensor ids = random_ids(1, 12), other = random_ids(1, 5);
  KvCache cache = model.make_cache(1);
  AttentionCall call;
  call.cache = &cache;
  model.hidden(ids, call);
  cache.truncate(7);
  const at::Tensor continued = model.hidden(other, call);
  const at::Tensor direct = model.hidden(at::cat({ids.narrow(1, 0, 7), other}, 1));
  EXPECT_LT(max_difference(continued, direct.narrow(1, 7, 5)), 2e-5);
  cache.reset();
  EXPECT_LT(max_difference(model.hidden(ids, call), model.hidden(ids)), 2e-5);
}

// Rows of several lengths in one batch, on the side `left`.
struct Padded {
  at::Tensor ids, mask;
};
Padded pad(const std::vector<at::Tensor>& rows, bool left) {
  int64_t longest = 0;
  for (const at::Tensor& row : rows) longest = std::max(longest, row.size(0));
  Padded out{at::full({static_cast<int64_t>(rows.size()), longest}, 3, at::kLong),
             at::zeros({static_cast<int64_t>(rows.size()), longest}, at::kByte)};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const int64_t length = rows[i].size(0), start = left ? longest - length : 0;
    out.ids[static_cast<int64_t>(i)].narrow(0, start, length).copy_(rows[i]);
    out.mask[static_cast<int64_t>(i)].narrow(0, start, length).fill_(1);
  }
  return out;
}

TEST_P(GoldenModel, PaddedRowsEqualUnpaddedOnes) {
  std::vector<at::Tensor> rows;
  for (const int64_t length : {21, 13, 1}) rows.push_back(random_ids(1, length).squeeze(0));
  for (const bool left : {true, false}) {
    const Padded batch = pad(rows, left);
    for (const at::ScalarType type : {at::kByte, at::kBool}) {
      AttentionCall call;
      call.pad_mask = batch.mask.to(type);
      const at::Tensor hidden = model.hidden(batch.ids, call);
      EXPECT_TRUE(hidden.isfinite().all().item<bool>());
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const at::Tensor alone = model.hidden(rows[i].unsqueeze(0)).squeeze(0);
        const int64_t length = rows[i].size(0), start = left ? 21 - length : 0;
        const at::Tensor padded = hidden[static_cast<int64_t>(i)].narrow(0, start, length);
        EXPECT_LT(max_difference(padded, alone), 2e-5)
            << "row " << i << (left ? " left" : " right");
      }
    }
  }
}

TEST_P(GoldenModel, DecodingALeftPaddedBatchEqualsEachRow) {
  std::vector<at::Tensor> rows;
  for (const int64_t length : {9, 4}) rows.push_back(random_ids(1, length).squeeze(0));
  const at::Tensor more = random_ids(2, 6);
  Padded batch = pad(rows, true);
  KvCache cache = model.make_cache(2);
  AttentionCall call;
  call.cache = &cache;
  call.pad_mask = batch.mask;
  model.hidden(batch.ids, call);
  std::vector<at::Tensor> steps;
  for (const int64_t count : {1, 1, 3, 1}) {
    call.pad_mask = at::cat({call.pad_mask, at::ones({2, count}, at::kByte)}, 1);
    const int64_t done = call.pad_mask.size(1) - count - 9;
    steps.push_back(model.hidden(more.narrow(1, done, count), call));
  }
  const at::Tensor decoded = at::cat(steps, 1);
  for (int64_t i = 0; i < 2; ++i) {
    const at::Tensor alone =
        model.hidden(at::cat({rows[static_cast<std::size_t>(i)], more[i]}).unsqueeze(0));
    EXPECT_LT(max_difference(decoded[i], alone[0].narrow(0, alone.size(1) - 6, 6)), 2e-5)
        << "row " << i;
  }
}

TEST_P(GoldenModel, PositionsAreWhatTheCallerSays) {
  const at::Tensor ids = random_ids(2, 6);
  AttentionCall call;
  call.positions = at::arange(6).expand({2, 6});
  EXPECT_LT(max_difference(model.hidden(ids, call), model.hidden(ids)), 2e-5);
  call.positions = call.positions + 1000;  // only distances matter to RoPE, up to float32 angles
  EXPECT_LT(max_difference(model.hidden(ids, call), model.hidden(ids)), 2e-3);
  call.positions = at::arange(6).mul(3).expand({2, 6});
  EXPECT_GT(max_difference(model.hidden(ids, call), model.hidden(ids)), 1e-2);
}

TEST_P(GoldenModel, OneTokenIsEnough) {
  const at::Tensor hidden = model.hidden(random_ids(1, 1));
  EXPECT_EQ(hidden.sizes(), (std::vector<int64_t>{1, 1, 64}));
  EXPECT_EQ(model.logits(hidden[0]).sizes(), (std::vector<int64_t>{1, 320}));
}

TEST_P(GoldenModel, ABlockCanStandInForAttention) {
  const at::Tensor ids = random_ids(1, 8);
  std::vector<int64_t> asked;
  const at::Tensor hidden = model.hidden(ids, {}, [&](int64_t layer, const at::Tensor& x) {
    asked.push_back(layer);
    return model.attention(layer, x).y;
  });
  EXPECT_EQ(asked, (std::vector<int64_t>{0, 1}));
  EXPECT_TRUE(at::equal(hidden, model.hidden(ids)));
  const at::Tensor without =
      model.hidden(ids, {}, [](int64_t, const at::Tensor& x) { return at::zeros_like(x); });
  EXPECT_GT(max_difference(without, hidden), 1e-2);
}

TEST_P(GoldenModel, MisuseIsNamed) {
  const auto internal = ErrorKind::internal;
  EXPECT_GRAFT_ERROR(model.embed(at::tensor({5, 320}, at::kLong).unsqueeze(0)), ErrorKind::input,
                     HasSubstr("token id 320 is outside the vocabulary of 320"));
  EXPECT_GRAFT_ERROR(model.embed(at::tensor({5, -1}, at::kLong).unsqueeze(0)), ErrorKind::input,
                     HasSubstr("token id -1 is outside"));
  EXPECT_GRAFT_ERROR(model.embed(at::empty({2, 0}, at::kLong)), internal,
                     HasSubstr("token ids are [2, 0], expected int64 [B,T] with at least one"));
  EXPECT_GRAFT_ERROR(model.embed(at::zeros({2, 3})), internal, HasSubstr("expected int64"));
  EXPECT_GRAFT_ERROR(model.embed(at::Tensor()), internal, HasSubstr("token ids are nothing"));
  EXPECT_GRAFT_ERROR(model.block_input(2, at::zeros({1, 1, 64})), internal,
                     HasSubstr("no layer 2"));
  EXPECT_GRAFT_ERROR(model.attention(0, at::zeros({1, 4, 63})), internal,
                     HasSubstr("the input of layer 0 is [1, 4, 63], expected [B,T,64]"));
  AttentionCall call;
  call.pad_mask = at::ones({1, 3}, at::kByte);
  EXPECT_GRAFT_ERROR(model.attention(0, at::zeros({1, 4, 64}), call), internal,
                     HasSubstr("pad_mask is [1, 3], expected [1, 4]"));
  call = {};
  call.positions = at::arange(4);
  EXPECT_GRAFT_ERROR(model.attention(0, at::zeros({1, 4, 64}), call), internal,
                     HasSubstr("positions is [4], expected [1, 4]"));
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModel,
                         testing::Values("llama", "llama_bf16", "llama_sharded", "qwen2", "qwen3",
                                         "gpt_neox"),
                         [](const auto& info) { return std::string(info.param); });

// --------------------------------------------------------------------------------------- NeoX

at::Tensor reference_layer_norm(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& bias) {
  const at::Tensor centred = x - x.mean(-1, true);
  return centred / (centred * centred).mean(-1, true).add(1e-5).sqrt() * weight + bias;
}

// A whole GPT-NeoX in double from the file's tensors; the attention from roles.
at::Tensor reference_neox(const Backbone& model, const TensorMap& tensors, const at::Tensor& ids,
                          bool parallel) {
  const auto w = [&](const std::string& name) {
    return tensors.at("gpt_neox." + name).to(at::kDouble);
  };
  const auto norm = [&](const std::string& name, const at::Tensor& x) {
    return reference_layer_norm(x, w(name + ".weight"), w(name + ".bias"));
  };
  at::Tensor h = w("embed_in.weight").index_select(0, ids);
  for (int64_t i = 0; i < model.config().n_layers; ++i) {
    const std::string p = "layers." + std::to_string(i) + ".";
    const auto mlp = [&](const at::Tensor& x) {
      const at::Tensor u =
          at::matmul(x, w(p + "mlp.dense_h_to_4h.weight").t()) + w(p + "mlp.dense_h_to_4h.bias");
      const at::Tensor gelu = 0.5 * u * (1 + at::erf(u / std::sqrt(2.0)));
      return at::matmul(gelu, w(p + "mlp.dense_4h_to_h.weight").t()) +
             w(p + "mlp.dense_4h_to_h.bias");
    };
    const LayerInfo info = model.layer_info(i);
    const at::Tensor y =
        reference_attention(model.layer_roles(i), info.c_info(), norm(p + "input_layernorm", h));
    h = parallel ? h + y + mlp(norm(p + "post_attention_layernorm", h))
                 : h + y + mlp(norm(p + "post_attention_layernorm", h + y));
  }
  return norm("final_layer_norm", h);
}

TEST(Neox, BothResidualLayoutsMatchTheirFormula) {
  const c10::InferenceMode inference;
  const TempFolder folder;
  ModelFiles files = ModelFiles::golden("gpt_neox");
  const at::Tensor ids =
      read_tensors(kModels / "gpt_neox" / "expected.safetensors").at("input_ids");
  std::vector<at::Tensor> outputs;
  for (const bool parallel : {true, false}) {
    files.config["use_parallel_residual"] = parallel;
    files.write(folder.path());
    const Backbone model = Backbone::load(folder.path());
    outputs.push_back(model.hidden(ids).squeeze(0));
    EXPECT_LT(
        max_difference(outputs.back(), reference_neox(model, files.tensors, ids[0], parallel)),
        1e-5);
  }
  EXPECT_GT(max_difference(outputs[0], outputs[1]), 0.1);
}

// A model with heads of 64 of which a quarter is rotated, as Pythia has; far positions tell a wrong
// spacing of the frequencies from the right one.
ModelFiles pythia_like() {
  const int64_t vocab = 61, d = 128, mlp = 96, layers = 2;
  ModelFiles files;
  files.config = {{"architectures", {"GPTNeoXForCausalLM"}},
                  {"model_type", "gpt_neox"},
                  {"vocab_size", vocab},
                  {"hidden_size", d},
                  {"num_hidden_layers", layers},
                  {"num_attention_heads", 2},
                  {"intermediate_size", mlp},
                  {"max_position_embeddings", 2048},
                  {"layer_norm_eps", 1e-5},
                  {"rotary_emb_base", 10000},
                  {"rotary_pct", 0.25},
                  {"hidden_act", "gelu"}};
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, double mean = 0) {
    files.tensors[name] = at::randn(shape) * 0.1 + mean;
  };
  const auto linear = [&](const std::string& name, int64_t rows, int64_t columns) {
    add(name + ".weight", {rows, columns});
    add(name + ".bias", {rows});
  };
  const auto norm = [&](const std::string& name) {
    add(name + ".weight", {d}, 1);
    add(name + ".bias", {d});
  };
  add("gpt_neox.embed_in.weight", {vocab, d});
  add("embed_out.weight", {vocab, d});
  for (int64_t i = 0; i < layers; ++i) {
    const std::string p = "gpt_neox.layers." + std::to_string(i) + ".";
    norm(p + "input_layernorm");
    norm(p + "post_attention_layernorm");
    linear(p + "attention.query_key_value", 3 * d, d);
    linear(p + "attention.dense", d, d);
    linear(p + "mlp.dense_h_to_4h", mlp, d);
    linear(p + "mlp.dense_4h_to_h", d, mlp);
  }
  norm("gpt_neox.final_layer_norm");
  return files;
}

TEST(Neox, PartialRotationHoldsAtFarPositions) {
  at::manual_seed(3);
  const c10::InferenceMode inference;
  const TempFolder folder;
  const ModelFiles files = pythia_like();
  files.write(folder.path());
  const Backbone model = Backbone::load(folder.path());
  const at::Tensor ids = random_ids(1, 512, 61);
  const at::Tensor expected = reference_neox(model, files.tensors, ids[0], true);
  EXPECT_LT(max_difference(model.hidden(ids)[0].narrow(0, 490, 22), expected.narrow(0, 490, 22)),
            1e-4);
}

// ------------------------------------------------------------------------- memory, gradients, bf16

int64_t peak_kilobytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST(Backbone, LongSequencesNeverHoldAllProbabilities) {
  const c10::InferenceMode inference;
  const Backbone model = Backbone::load(kModels / "llama");
  const int64_t before = peak_kilobytes();
  constexpr int64_t tokens = 6000;
  const at::Tensor x = model.block_input(0, model.embed(random_ids(1, tokens)));
  model.attention(0, x);
  // One head's probabilities alone would be 137 MiB.
  EXPECT_LT(peak_kilobytes() - before, tokens * tokens * 4 / 1024 / 2);
}

class Gradients : public testing::TestWithParam<std::tuple<const char*, Compute>> {};

// After an inference call (whose cached tables must not be inference tensors), the gradient of
// every parameter predicts how the loss changes along it.
TEST_P(Gradients, AgreeWithFiniteDifferences) {
  at::manual_seed(11);
  const auto [name, compute] = GetParam();
  BackboneOptions options;
  options.compute = compute;
  Backbone model = Backbone::load(kModels / name, options);
  const at::Tensor ids = random_ids(2, 10), target = random_ids(2, 10);
  {
    const c10::InferenceMode inference;
    model.logits(model.hidden(ids));
  }
  const auto loss = [&] {
    return at::cross_entropy_loss(model.logits(model.hidden(ids).flatten(0, 1)), target.flatten());
  };
  for (auto& [key, parameter] : model.parameters()) parameter.value.requires_grad_();
  loss().backward();
  const at::NoGradGuard no_grad;
  // bfloat16 rounds the difference away; there, that a gradient arrives is all that can be asked.
  const bool exact = compute == Compute::float32;
  for (auto& [key, parameter] : model.parameters()) {
    const at::Tensor gradient = parameter.value.grad();
    ASSERT_TRUE(gradient.defined()) << key;
    EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << key;
    const double norm = gradient.norm().item<double>();
    EXPECT_GT(norm, 0.0) << key;
    if (!exact || norm < 1e-3) continue;
    const double step = 2e-3;
    const at::Tensor direction = gradient / norm;
    parameter.value.add_(direction, step);
    const double above = loss().item<double>();
    parameter.value.add_(direction, -2 * step);
    const double below = loss().item<double>();
    parameter.value.add_(direction, step);
    EXPECT_NEAR((above - below) / (2 * step), norm, 0.02 * norm + 5e-4) << key;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Gradients,
                         testing::Combine(testing::Values("llama", "qwen2", "qwen3", "gpt_neox"),
                                          testing::Values(Compute::float32, Compute::bfloat16)));

class Bfloat16 : public testing::TestWithParam<const char*> {};

TEST_P(Bfloat16, IsCloseToFloat32AndKeepsTheParameters) {
  const c10::InferenceMode inference;
  BackboneOptions options;
  options.compute = Compute::bfloat16;
  const Backbone low = Backbone::load(kModels / GetParam(), options),
                 full = Backbone::load(kModels / GetParam());
  const at::Tensor ids = random_ids(2, 21);
  const at::Tensor expected = full.logits(full.hidden(ids)), got = low.logits(low.hidden(ids));
  EXPECT_EQ(got.scalar_type(), at::kFloat);
  EXPECT_EQ(low.hidden(ids).scalar_type(), at::kFloat);
  const double scale = expected.std().item<double>();
  EXPECT_LT(max_difference(got, expected), 0.15 * scale);
  EXPECT_GT(max_difference(got, expected), 0.0);  // bfloat16 was really used
  for (const auto& [name, parameter] : low.parameters()) {
    EXPECT_TRUE(at::equal(parameter.value, full.parameters().at(name).value)) << name;
  }
  // Through a cache and with statistics, too.
  KvCache cache = low.make_cache(2);
  AttentionCall call;
  call.cache = &cache;
  low.hidden(ids.narrow(1, 0, 20), call);
  const at::Tensor step = low.logits(low.hidden(ids.narrow(1, 20, 1), call));
  EXPECT_LT(max_difference(step, expected.narrow(1, 20, 1)), 0.15 * scale);
  cache.truncate(20);
  call.want_probs = call.want_context = true;
  const AttentionResult result =
      low.attention(0, low.block_input(0, low.embed(ids.narrow(1, 20, 1))), call);
  EXPECT_EQ(result.probs.scalar_type(), at::kFloat);
  EXPECT_EQ(result.context.scalar_type(), at::kFloat);
  EXPECT_EQ(result.probs.size(3), 21);
}

TEST_P(Bfloat16, SeesParametersThatChange) {
  BackboneOptions options;
  options.compute = Compute::bfloat16;
  Backbone model = Backbone::load(kModels / GetParam(), options);
  const at::Tensor x = at::randn({1, 5, 64});
  const auto run = [&] {
    const c10::InferenceMode inference;
    return model.attention(1, x).y;
  };
  const at::Tensor before = run();
  const std::string name = model.config().family == "gpt-neox"
                               ? "gpt_neox.layers.1.attention.dense.weight"
                               : "model.layers.1.self_attn.o_proj.weight";
  at::Tensor& value = model.parameters().at(name).value;
  value.mul_(2);
  const at::Tensor doubled = run();
  EXPECT_GT(max_difference(doubled, before), 1e-3);
  value = value / 2;  // another tensor altogether
  EXPECT_TRUE(at::equal(run(), before));
}

INSTANTIATE_TEST_SUITE_P(All, Bfloat16,
                         testing::Values("llama", "llama_bf16", "qwen2", "qwen3", "gpt_neox"));

}  // namespace
}  // namespace graft
