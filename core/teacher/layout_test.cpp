#include "core/teacher/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "core/base/testing.h"
#include "core/checkpoint/checkpoint.h"

namespace graft {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::filesystem::path kModels = std::filesystem::path(GRAFT_TEST_DATA) / "models";

class GoldenLayout : public testing::TestWithParam<const char*> {};

TEST_P(GoldenLayout, IsExactlyWhatTheCheckpointHolds) {
  const ModelConfig config = load_model_config(kModels / GetParam());
  const Checkpoint checkpoint = Checkpoint::open(kModels / GetParam());
  std::vector<std::string> names;
  for (const TensorLayout& tensor : checkpoint_layout(config)) {
    names.push_back(tensor.name);
    EXPECT_EQ(checkpoint.at(tensor.name).shape, tensor.shape) << tensor.name;
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, checkpoint.names());
}

INSTANTIATE_TEST_SUITE_P(All, GoldenLayout,
                         testing::Values("llama", "llama_bf16", "llama_sharded", "qwen2", "qwen3",
                                         "gpt_neox"));

TEST(Layout, LeavesOutTheAttentionOfReplacedLayers) {
  for (const char* model : {"qwen2", "qwen3", "gpt_neox"}) {
    const ModelConfig config = load_model_config(kModels / model);
    const auto all = checkpoint_layout(config), some = checkpoint_layout(config, {1});
    std::size_t removed = 0;
    for (const TensorLayout& tensor : all)
      removed += tensor.name.starts_with(attention_prefix(config, 1));
    EXPECT_GT(removed, 0u);
    EXPECT_EQ(some.size() + removed, all.size());
    for (const TensorLayout& tensor : some) {
      EXPECT_FALSE(tensor.name.starts_with(attention_prefix(config, 1))) << tensor.name;
    }
  }
}

TEST(Layout, KnowsTheBuffersThatNobodyReads) {
  for (const char* name :
       {"gpt_neox.layers.3.attention.bias", "gpt_neox.layers.3.attention.masked_bias",
        "gpt_neox.layers.3.attention.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq"}) {
    EXPECT_TRUE(is_unused_buffer(name)) << name;
  }
  for (const char* name : {"gpt_neox.layers.3.attention.dense.bias", "model.norm.weight",
                           "gpt_neox.layers.3.attention.query_key_value.bias", "attention.bias"}) {
    EXPECT_FALSE(is_unused_buffer(name)) << name;
  }
}

std::vector<std::string> role_names(const char* model) {
  std::vector<std::string> names;
  for (const RoleLayout& role : attention_roles(load_model_config(kModels / model))) {
    names.push_back(role.role.substr(std::string("graft.role.").size()));
  }
  return names;
}

TEST(Roles, AreThoseTheModelHas) {
  EXPECT_THAT(role_names("llama"), ElementsAre("query", "key", "value", "output"));
  EXPECT_THAT(role_names("qwen2"), ElementsAre("query", "key", "value", "output", "query-bias",
                                               "key-bias", "value-bias"));
  EXPECT_THAT(role_names("qwen3"),
              ElementsAre("query", "key", "value", "output", "query-norm", "key-norm"));
  EXPECT_THAT(role_names("gpt_neox"), ElementsAre("query", "key", "value", "output", "query-bias",
                                                  "key-bias", "value-bias", "output-bias"));
}

TEST(Roles, SayTheirShapes) {
  const auto roles = attention_roles(load_model_config(kModels / "qwen3"));
  EXPECT_THAT(roles[0].shape, ElementsAre(128, 64));
  EXPECT_EQ(roles[0].heads, 4);
  EXPECT_EQ(roles[0].head_dim, 32);
  EXPECT_EQ(roles[0].axes, "heads*key,model");
  EXPECT_THAT(roles[1].shape, ElementsAre(64, 64));
  EXPECT_EQ(roles[1].heads, 2);
  EXPECT_EQ(roles[3].axes, "model,heads*value");
  EXPECT_THAT(roles[3].shape, ElementsAre(64, 128));
  EXPECT_THAT(roles[4].shape, ElementsAre(32));
}

TEST(LayerInfo, TellsAPluginWhatItReplaces) {
  const ModelConfig config = load_model_config(kModels / "gpt_neox");
  const LayerInfo owner(config, 1);
  const graft_layer_info info = owner.c_info();
  EXPECT_EQ(info.struct_size, sizeof(graft_layer_info));
  EXPECT_EQ(info.layer, 1);
  EXPECT_EQ(info.n_layers, 2);
  EXPECT_EQ(info.n_heads, 4);
  EXPECT_EQ(info.n_kv_heads, 4);
  EXPECT_EQ(info.head_dim, 16);
  EXPECT_EQ(info.model_dim, 64);
  EXPECT_EQ(info.max_positions, 256);
  EXPECT_EQ(info.rope_theta, 10000.0);
  EXPECT_EQ(info.rope_fraction, 0.25);
  EXPECT_STREQ(info.rope_scaling, "");
  EXPECT_STREQ(info.family, "gpt-neox");
  EXPECT_EQ(info.flags, GRAFT_LAYER_QKV_BIAS | GRAFT_LAYER_O_BIAS | GRAFT_LAYER_PARALLEL_RESIDUAL);
  EXPECT_EQ(info.norm_eps, 1e-5);
  ASSERT_EQ(info.n_rope_freq, 2);
  EXPECT_EQ(info.rope_inv_freq[0], 1.0);
  EXPECT_NEAR(info.rope_inv_freq[1], 0.01, 1e-8);
  EXPECT_EQ(info.rope_attention_factor, 1.0);
  EXPECT_EQ(info.param_dtype.code, kDLFloat);
  EXPECT_EQ(info.param_dtype.bits, 32);
}

TEST(LayerInfo, FlagsFollowTheFamily) {
  const auto flags = [](const char* model) {
    return LayerInfo(load_model_config(kModels / model), 0).c_info().flags;
  };
  EXPECT_EQ(flags("llama"), 0u);
  EXPECT_EQ(flags("qwen2"), GRAFT_LAYER_QKV_BIAS);
  EXPECT_EQ(flags("qwen3"), GRAFT_LAYER_QK_NORM);
}

TEST(LayerInfo, OutlivesTheConfigAndSurvivesCopies) {
  std::vector<LayerInfo> infos;
  {
    const ModelConfig config = load_model_config(kModels / "llama");
    for (int64_t i = 0; i < config.n_layers; ++i) infos.emplace_back(config, i);
  }
  EXPECT_STREQ(infos[0].c_info().family, "llama");
  EXPECT_EQ(infos[1].c_info().rope_inv_freq[0], 1.0);
}

TEST(LayerInfo, RefusesALayerThatIsNotThere) {
  const ModelConfig config = load_model_config(kModels / "llama");
  for (const int64_t layer : {int64_t{-1}, int64_t{2}}) {
    EXPECT_GRAFT_ERROR(LayerInfo(config, layer), ErrorKind::internal,
                       HasSubstr("there is no layer " + std::to_string(layer)));
  }
}

}  // namespace
}  // namespace graft
