#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "core/teacher/backbone.h"
#include "core/teacher/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// A golden model, changed and written to a folder of its own.
class Loading : public testing::Test {
 protected:
  void start(const std::string& model) { files = ModelFiles::golden(model); }
  Backbone load(const BackboneOptions& options = {}) {
    files.write(folder.path());
    return Backbone::load(folder.path(), options);
  }
  void rename(const std::string& from, const std::string& to) {
    files.tensors[to] = files.tensors.at(from);
    files.tensors.erase(from);
  }

  ModelFiles files;
  TempFolder folder;
};

// --------------------------------------------------------------------------- every tensor counts

TEST_F(Loading, AMissingTensorIsNamedWithTheNearest) {
  start("llama");
  rename("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.q_porj.weight");
  EXPECT_GRAFT_ERROR(
      load(), ErrorKind::input,
      AllOf(HasSubstr("the tensor 'model.layers.1.self_attn.q_proj.weight' of a llama model "
                      "of 2 layers is missing"),
            HasSubstr("did you mean 'model.layers.1.self_attn.q_porj.weight'?")));
}

TEST_F(Loading, SeveralMissingTensorsAreCounted) {
  start("qwen2");
  files.config["num_hidden_layers"] = 3;
  files.config["layer_types"] = {"full_attention", "full_attention", "full_attention"};
  EXPECT_GRAFT_ERROR(
      load(), ErrorKind::input,
      AllOf(HasSubstr("'model.layers.2.input_layernorm.weight'"), HasSubstr("and 11 more")));
}

TEST_F(Loading, AMissingBiasIsNamed) {
  start("gpt_neox");
  files.tensors.erase("gpt_neox.layers.0.attention.dense.bias");
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input,
                     HasSubstr("'gpt_neox.layers.0.attention.dense.bias'"));
}

TEST_F(Loading, ATensorNobodyReadsIsNamed) {
  start("llama");
  files.tensors["model.layers.0.self_attn.q_proj.bias"] = at::zeros({64});
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input,
                     AllOf(HasSubstr("model.safetensors: a llama model of 2 layers has no tensor "
                                     "'model.layers.0.self_attn.q_proj.bias'"),
                           HasSubstr("it has 'model.layers.0.self_attn.q_proj.weight'"),
                           HasSubstr("would be lost silently")));
}

TEST_F(Loading, LayersBeyondTheConfigAreNamed) {
  start("llama");
  files.config["num_hidden_layers"] = 1;
  EXPECT_GRAFT_ERROR(
      load(), ErrorKind::input,
      AllOf(HasSubstr("'model.layers.1.input_layernorm.weight'"), HasSubstr("and 4 more")));
}

TEST_F(Loading, BuffersOfOldCheckpointsAreDropped) {
  start("gpt_neox");
  for (const std::string layer : {"0", "1"}) {
    const std::string prefix = "gpt_neox.layers." + layer + ".attention.";
    files.tensors[prefix + "bias"] = at::ones({1, 1, 16, 16});
    files.tensors[prefix + "masked_bias"] = at::full({}, -1e9);
    files.tensors[prefix + "rotary_emb.inv_freq"] = at::ones({2});
  }
  const Backbone model = load();
  EXPECT_FALSE(model.parameters().contains("gpt_neox.layers.0.attention.bias"));
  EXPECT_THAT(model.left_over(), IsEmpty());
  const TensorMap expected = read_tensors(kModels / "gpt_neox" / "expected.safetensors");
  EXPECT_LT(
      max_difference(model.logits(model.hidden(expected.at("input_ids"))), expected.at("logits")),
      1e-4);
}

TEST_F(Loading, AWrongShapeIsNamedWithBoth) {
  start("qwen3");
  files.tensors["model.layers.0.self_attn.k_proj.weight"] = at::zeros({32, 64});
  EXPECT_GRAFT_ERROR(
      load(), ErrorKind::input,
      AllOf(HasSubstr("model.safetensors: tensor 'model.layers.0.self_attn.k_proj.weight' has "
                      "shape [32, 64]"),
            HasSubstr("config.json ask for [64, 64]")));
}

TEST_F(Loading, TransposedWeightsAreAWrongShape) {
  start("llama");
  at::Tensor& up = files.tensors.at("model.layers.0.mlp.up_proj.weight");
  up = up.t().contiguous();
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input, HasSubstr("has shape [64, 128]"));
}

TEST_F(Loading, WeightsOfAnotherTypeAreRefused) {
  start("llama");
  for (const auto& [type, name] : {std::pair{at::kDouble, "F64"}, std::pair{at::kLong, "I64"}}) {
    files.tensors["model.norm.weight"] = at::ones({64}, type);
    EXPECT_GRAFT_ERROR(load(), ErrorKind::input,
                       HasSubstr("'model.norm.weight' is stored as " + std::string(name) +
                                 "; F32, F16 and BF16 weights can be read"));
  }
}

struct BadValue {
  float value;
  at::ScalarType type;
  const char* text;
};

TEST_F(Loading, NonFiniteWeightsAreNamedWithTheirPlace) {
  for (const BadValue& bad :
       {BadValue{kNan, at::kFloat, "nan"}, BadValue{kInf, at::kBFloat16, "inf"},
        BadValue{-kInf, at::kHalf, "-inf"}}) {
    start("llama");
    at::Tensor& weight = files.tensors.at("model.layers.1.mlp.down_proj.weight");
    weight = weight.to(bad.type);
    weight.index_put_({at::tensor(63), at::tensor(5)}, at::full({}, bad.value, bad.type));
    EXPECT_GRAFT_ERROR(load(), ErrorKind::input,
                       HasSubstr("tensor 'model.layers.1.mlp.down_proj.weight' holds " +
                                 std::string(bad.text) + " at [63, 5]"));
  }
}

// ---------------------------------------------------------------------------- tied embeddings

struct Tying {
  bool tied, stored, same;
  const char* message;  // of the error; null when it loads
};

class TiedEmbeddings : public testing::TestWithParam<Tying> {};

TEST_P(TiedEmbeddings, AreUsedVerifiedOrRefused) {
  const Tying& given = GetParam();
  ModelFiles files = ModelFiles::golden("llama");
  const at::Tensor embedding = files.tensors.at("model.embed_tokens.weight");
  files.config["tie_word_embeddings"] = given.tied;
  if (!given.stored) files.tensors.erase("lm_head.weight");
  if (given.stored && given.same) files.tensors["lm_head.weight"] = embedding.clone();
  const TempFolder folder;
  files.write(folder.path());
  if (given.message) {
    EXPECT_GRAFT_ERROR(Backbone::load(folder.path()), ErrorKind::input, HasSubstr(given.message));
    return;
  }
  const Backbone model = Backbone::load(folder.path());
  EXPECT_EQ(model.parameters().contains("lm_head.weight"), !given.tied);  // a tied one is kept once
  const at::Tensor row = at::randn({1, 64});
  const at::Tensor& output = given.tied ? embedding : files.tensors.at("lm_head.weight");
  EXPECT_LT(max_difference(model.logits(row), at::matmul(row, output.t())), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, TiedEmbeddings,
    testing::Values(
        Tying{true, false, false, nullptr}, Tying{true, true, true, nullptr},
        Tying{true, true, false,
              "'lm_head.weight' differs from 'model.embed_tokens.weight', but "
              "config.json says tie_word_embeddings is true"},
        Tying{false, true, false, nullptr}, Tying{false, true, true, nullptr},
        Tying{false, false, false,
              "the tensor 'lm_head.weight' of a llama model of 2 layers is missing; config.json "
              "says tie_word_embeddings is false"}));

TEST(TiedEmbeddings, StaySharedThroughAStep) {
  Backbone model = Backbone::load(kModels / "qwen2");  // tied
  at::Tensor& embedding = model.parameters().at("model.embed_tokens.weight").value;
  embedding.requires_grad_();
  model.logits(model.hidden(at::tensor({1, 2, 3}, at::kLong).unsqueeze(0))).sum().backward();
  {
    const at::NoGradGuard no_grad;
    embedding.sub_(embedding.grad(), 1e-3);
  }
  const at::Tensor row = at::randn({1, 64});
  EXPECT_TRUE(at::allclose(model.logits(row), at::matmul(row, embedding.t()), 1e-5, 1e-5));
  EXPECT_TRUE(at::equal(model.embed(at::tensor({7}, at::kLong).unsqueeze(0))[0][0], embedding[7]));
}

// ------------------------------------------------------------------------- students' folders

TEST_F(Loading, ReplacedLayersNeedNoAttentionAndTheirTensorsAreLeftOver) {
  for (const std::string model : {"llama", "qwen3", "gpt_neox"}) {
    start(model);
    const ModelConfig config = load_model_config(kModels / model);
    const std::string prefix = attention_prefix(config, 1);
    std::erase_if(files.tensors,
                  [&](const auto& entry) { return entry.first.starts_with(prefix); });
    files.tensors[prefix + "A_log"] = at::zeros({4});
    BackboneOptions options;
    options.replaced_layers = {1};
    const Backbone student = load(options);
    EXPECT_THAT(student.left_over(), ElementsAre(prefix + "A_log"));
    EXPECT_TRUE(student.is_replaced(1));
    EXPECT_FALSE(student.is_replaced(0));
    EXPECT_GRAFT_ERROR(student.attention(1, at::zeros({1, 1, 64})), ErrorKind::internal,
                       HasSubstr("the attention block of layer 1 was replaced and not loaded"));
    EXPECT_GRAFT_ERROR(student.layer_roles(1), ErrorKind::internal, HasSubstr("was replaced"));
    EXPECT_EQ(student.layer_info(1).c_info().layer, 1);
    // The other layers and everything around are the teacher's.
    const Backbone teacher = Backbone::load(kModels / model);
    const at::Tensor ids = at::randint(320, {1, 9}, at::kLong);
    const auto block = [&](const Backbone& own) {
      return [&](int64_t layer, const at::Tensor& x) {
        return layer == 1 ? at::sin(x) : own.attention(layer, x).y;
      };
    };
    EXPECT_TRUE(at::equal(student.hidden(ids, {}, block(student)),
                          teacher.hidden(ids, {}, block(teacher))));
    // Without being told, the same folder is refused.
    EXPECT_GRAFT_ERROR(Backbone::load(folder.path()), ErrorKind::input, HasSubstr("is missing"));
  }
}

TEST_F(Loading, ForeignNamesAreLeftToTheCaller) {
  start("llama");
  files.tensors["mixer.0.A_log"] = at::zeros({4});
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input, HasSubstr("has no tensor 'mixer.0.A_log'"));
  BackboneOptions options;
  options.is_foreign = [](const std::string& name) { return name.starts_with("mixer."); };
  EXPECT_THAT(load(options).left_over(), ElementsAre("mixer.0.A_log"));
}

TEST_F(Loading, AReplacedLayerMustExist) {
  start("llama");
  BackboneOptions options;
  options.replaced_layers = {2};
  EXPECT_GRAFT_ERROR(load(options), ErrorKind::internal,
                     HasSubstr("layer 2 cannot be replaced in a llama model of 2 layers"));
}

// --------------------------------------------------------------------- files, types, writing back

class StoredType : public testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {};

TEST_P(StoredType, IsReadInFloat32AndWrittenBackUnchanged) {
  const auto [model, type] = GetParam();
  ModelFiles files = ModelFiles::golden(model);
  for (auto& [name, tensor] : files.tensors) tensor = tensor.to(type);
  const TempFolder folder;
  files.write(folder.path());
  const Backbone loaded = Backbone::load(folder.path());
  ModelFiles again{loaded.config().raw, {}};
  for (const auto& [name, parameter] : loaded.parameters()) {
    EXPECT_EQ(parameter.value.scalar_type(), at::kFloat);
    EXPECT_EQ(scalar_type_of(parameter.file_dtype), type);
    EXPECT_TRUE(at::equal(parameter.value, files.tensors.at(name).to(at::kFloat))) << name;
    again.tensors[name] = as_stored(parameter);
  }
  again.write(folder / "again");
  const TensorMap back = read_tensors(Checkpoint::open(folder / "again"));
  ASSERT_EQ(back.size(), files.tensors.size());
  for (const auto& [name, tensor] : files.tensors) {
    EXPECT_EQ(back.at(name).scalar_type(), type);
    EXPECT_TRUE(at::equal(back.at(name), tensor)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, StoredType,
                         testing::Combine(testing::Values("llama", "qwen2", "qwen3", "gpt_neox"),
                                          testing::Values(at::kFloat, at::kHalf, at::kBFloat16)));

TEST(Backbone, CountsItsParameters) {
  // 2 * 320*64 embeddings, 2 layers of 64*64*2 + 32*64*2 + 3*64*128 + 2*64, one norm.
  EXPECT_EQ(Backbone::load(kModels / "llama").parameter_count(),
            2 * 320 * 64 + 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 2 * 64) + 64);
}

TEST(Backbone, CanBeMoved) {
  Backbone first = Backbone::load(kModels / "llama");
  const at::Tensor ids = at::tensor({1, 2, 3}, at::kLong).unsqueeze(0);
  const at::Tensor before = first.hidden(ids);
  Backbone second = std::move(first);
  EXPECT_TRUE(at::equal(second.hidden(ids), before));
}

TEST(Backbone, LoadedUnderInferenceModeCanStillTrain) {
  const auto load = [] {
    const c10::InferenceMode inference;
    return Backbone::load(kModels / "llama");
  };
  Backbone model = load();
  at::Tensor& weight = model.parameters().at("model.layers.0.self_attn.v_proj.weight").value;
  weight.requires_grad_();
  model.hidden(at::tensor({1, 2, 3}, at::kLong).unsqueeze(0)).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(BackboneFolder, IsCheckedBeforeAnythingElse) {
  EXPECT_GRAFT_ERROR(Backbone::load("/nonexistent/model"), ErrorKind::input,
                     HasSubstr("/nonexistent/model"));
  const TempFolder folder;
  EXPECT_GRAFT_ERROR(Backbone::load(folder.path()), ErrorKind::input,
                     HasSubstr(folder.path().string()));
  std::filesystem::copy_file(kModels / "llama" / "config.json", folder / "config.json");
  EXPECT_GRAFT_ERROR(Backbone::load(folder.path()), ErrorKind::input,
                     HasSubstr("model.safetensors"));
}

TEST(BackboneFolder, TruncatedAndMissingShardsAreNamed) {
  const TempFolder folder;
  std::filesystem::copy(kModels / "llama_sharded", folder / "m");
  const std::filesystem::path shard = folder / "m" / "model-00003-of-00005.safetensors";
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 100);
  EXPECT_GRAFT_ERROR(Backbone::load(folder / "m"), ErrorKind::input,
                     HasSubstr("model-00003-of-00005.safetensors"));
  std::filesystem::remove(shard);
  EXPECT_GRAFT_ERROR(Backbone::load(folder / "m"), ErrorKind::input,
                     HasSubstr("model-00003-of-00005.safetensors"));
}

}  // namespace
}  // namespace graft
