#include "core/teacher/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/base/testing.h"

namespace graft {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const std::filesystem::path kModels = std::filesystem::path(GRAFT_TEST_DATA) / "models";

json llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"vocab_size", 320},
          {"hidden_size", 64},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"intermediate_size", 128},
          {"max_position_embeddings", 256},
          {"rms_norm_eps", 1e-5},
          {"hidden_act", "silu"}};
}

json neox() {
  return {{"architectures", {"GPTNeoXForCausalLM"}},
          {"model_type", "gpt_neox"},
          {"vocab_size", 50304},
          {"hidden_size", 512},
          {"num_hidden_layers", 6},
          {"num_attention_heads", 8},
          {"intermediate_size", 2048},
          {"max_position_embeddings", 2048},
          {"layer_norm_eps", 1e-5},
          {"rotary_emb_base", 10000},
          {"rotary_pct", 0.25},
          {"hidden_act", "gelu"}};
}

json qwen(const char* type) {
  json config = llama();
  config["model_type"] = type;
  config["architectures"] = {std::string(type) == "qwen2" ? "Qwen2ForCausalLM"
                                                          : "Qwen3ForCausalLM"};
  return config;
}

json with(json config, const json& changes) {
  config.merge_patch(changes);  // null removes a key
  return config;
}

ModelConfig parse(const json& config) { return parse_model_config(config, "config.json"); }

void write(const TempFolder& folder, const std::string& name, const std::string& text) {
  std::ofstream(folder / name) << text;
}
void write(const TempFolder& folder, const std::string& name, const json& content) {
  write(folder, name, content.dump());
}

// ------------------------------------------------------------------------------- golden models

TEST(ModelConfig, ReadsTheGoldenLlama) {
  const ModelConfig c = load_model_config(kModels / "llama");
  EXPECT_EQ(c.family, "llama");
  EXPECT_EQ(c.vocab_size, 320);
  EXPECT_EQ(c.model_dim, 64);
  EXPECT_EQ(c.n_layers, 2);
  EXPECT_EQ(c.n_heads, 4);
  EXPECT_EQ(c.n_kv_heads, 2);
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_EQ(c.mlp_dim, 128);
  EXPECT_EQ(c.max_positions, 256);
  EXPECT_EQ(c.norm, NormKind::rms);
  EXPECT_DOUBLE_EQ(c.norm_eps, 1e-6);
  EXPECT_EQ(c.activation, Activation::silu);
  EXPECT_FALSE(c.qkv_bias || c.o_bias || c.mlp_bias || c.qk_norm || c.parallel_residual || c.tied);
  EXPECT_EQ(c.rope.rotary_dim, 16);
  EXPECT_EQ(c.rope.scaling, "");
  EXPECT_EQ(c.rope.inv_freq.size(), 8u);
  EXPECT_EQ(c.bos_id, 1);
  EXPECT_THAT(c.stop_ids, ElementsAre(2));
  EXPECT_THAT(c.notes, IsEmpty());
  EXPECT_EQ(c.raw["model_type"], "llama");
}

TEST(ModelConfig, ReadsTheGoldenQwens) {
  const ModelConfig two = load_model_config(kModels / "qwen2");
  EXPECT_EQ(two.family, "qwen2");
  EXPECT_TRUE(two.qkv_bias);
  EXPECT_FALSE(two.o_bias || two.qk_norm);
  EXPECT_TRUE(two.tied);
  EXPECT_EQ(two.bos_id, std::nullopt);
  EXPECT_THAT(two.stop_ids, IsEmpty());

  const ModelConfig three = load_model_config(kModels / "qwen3");
  EXPECT_EQ(three.family, "qwen3");
  EXPECT_FALSE(three.qkv_bias || three.o_bias || three.tied);
  EXPECT_TRUE(three.qk_norm);
  EXPECT_EQ(three.head_dim, 32);  // not 64 / 4
  EXPECT_EQ(three.query_dim(), 128);
  EXPECT_EQ(three.key_dim(), 64);
}

TEST(ModelConfig, ReadsTheGoldenNeox) {
  const ModelConfig c = load_model_config(kModels / "gpt_neox");
  EXPECT_EQ(c.family, "gpt-neox");
  EXPECT_EQ(c.norm, NormKind::layer);
  EXPECT_DOUBLE_EQ(c.norm_eps, 1e-5);
  EXPECT_EQ(c.activation, Activation::gelu);
  EXPECT_TRUE(c.qkv_bias && c.o_bias && c.mlp_bias && c.parallel_residual);
  EXPECT_EQ(c.n_kv_heads, 4);
  EXPECT_EQ(c.rope.rotary_dim, 4);
  EXPECT_EQ(c.bos_id, 0);
}

// -------------------------------------------------------------------------------------- RoPE

TEST(Rope, PartOfTheHeadIsSpacedByTheRotatedPart) {
  const ModelConfig c = parse(neox());  // head of 64, a quarter rotated
  ASSERT_EQ(c.rope.rotary_dim, 16);
  ASSERT_EQ(c.rope.inv_freq.size(), 8u);
  for (int i = 0; i < 8; ++i) {
    const double expected = std::pow(10000.0, -2.0 * i / 16.0);  // 1, .3162, .1, ...
    EXPECT_NEAR(c.rope.inv_freq[static_cast<std::size_t>(i)], expected, 1e-6 * expected);
  }
  EXPECT_NEAR(c.rope.inv_freq[1], 0.3162, 1e-4);
  EXPECT_NEAR(c.rope.inv_freq[2], 0.1, 1e-6);
}

json llama_3_2_1b() {
  return with(llama(), {{"hidden_size", 2048},
                        {"num_attention_heads", 32},
                        {"num_key_value_heads", 8},
                        {"head_dim", 64},
                        {"max_position_embeddings", 131072},
                        {"rope_theta", 500000.0}});
}

const json kLlama3Scaling = {{"factor", 32.0},
                             {"low_freq_factor", 1.0},
                             {"high_freq_factor", 4.0},
                             {"original_max_position_embeddings", 8192}};

// The same settings as old and new files spell them.
json llama3_spelling(const std::string& spelling) {
  json scaling = kLlama3Scaling;
  if (spelling == "rope_scaling.type" || spelling == "rope_scaling.rope_type") {
    scaling[spelling.substr(13)] = "llama3";
    return with(llama_3_2_1b(), {{"rope_scaling", scaling}});
  }
  scaling["rope_type"] = "llama3";
  scaling["rope_theta"] = 500000.0;
  return with(llama_3_2_1b(), {{"rope_theta", nullptr}, {"rope_parameters", scaling}});
}

class Llama3Rope : public testing::TestWithParam<const char*> {};

TEST_P(Llama3Rope, LongWavelengthsAreStretched) {
  const std::vector<double> scaled = parse(llama3_spelling(GetParam())).rope.inv_freq;
  const std::vector<double> plain = parse(llama_3_2_1b()).rope.inv_freq;
  ASSERT_EQ(scaled.size(), 32u);
  for (std::size_t i = 0; i < 15; ++i) EXPECT_EQ(scaled[i], plain[i]) << i;
  for (std::size_t i = 15; i < 18; ++i) {
    EXPECT_LT(scaled[i], plain[i]) << i;
    EXPECT_GT(scaled[i], plain[i] / 32) << i;
  }
  for (std::size_t i = 18; i < 32; ++i) EXPECT_NEAR(scaled[i], plain[i] / 32, 1e-7 * plain[i]) << i;
  EXPECT_NEAR(plain[15], 2.1311e-3, 5e-8);
  EXPECT_NEAR(scaled[15], 1.2905e-3, 5e-8);
  EXPECT_NEAR(scaled[16], 4.2956e-4, 5e-9);
  EXPECT_NEAR(scaled[17], 9.7083e-5, 5e-10);
  EXPECT_NEAR(scaled[18], 1.9462e-5, 5e-10);
}

INSTANTIATE_TEST_SUITE_P(Spellings, Llama3Rope,
                         testing::Values("rope_scaling.type", "rope_scaling.rope_type",
                                         "rope_parameters"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

TEST(Rope, Llama3FallsBackToTheModelsOwnLength) {
  json scaling = kLlama3Scaling;
  scaling.erase("original_max_position_embeddings");
  scaling["rope_type"] = "llama3";
  const json config =
      with(llama_3_2_1b(), {{"rope_scaling", scaling}, {"max_position_embeddings", 8192}});
  EXPECT_NEAR(parse(config).rope.inv_freq[15], 1.2905e-3, 5e-8);
}

TEST(Rope, LinearDividesEveryFrequency) {
  for (const char* key : {"type", "rope_type"}) {
    const json config = with(llama(), {{"rope_scaling", {{key, "linear"}, {"factor", 4.0}}}});
    const ModelConfig scaled = parse(config), plain = parse(llama());
    EXPECT_EQ(scaled.rope.scaling, "linear");
    ASSERT_EQ(scaled.rope.inv_freq.size(), plain.rope.inv_freq.size());
    for (std::size_t i = 0; i < plain.rope.inv_freq.size(); ++i) {
      EXPECT_EQ(scaled.rope.inv_freq[i], plain.rope.inv_freq[i] / 4);
    }
  }
}

TEST(Rope, ThetaIsFoundWhereverItStands) {
  EXPECT_EQ(parse(llama()).rope.theta, 10000.0);
  EXPECT_EQ(parse(with(llama(), {{"rope_theta", 100000}})).rope.theta, 100000.0);
  EXPECT_EQ(parse(with(llama(), {{"rope_parameters", {{"rope_theta", 5e5}}}})).rope.theta, 5e5);
  EXPECT_EQ(parse(with(neox(), {{"rotary_emb_base", 20000}})).rope.theta, 20000.0);
  const json both = with(
      llama(),
      {{"rope_theta", 5e5}, {"rope_parameters", {{"rope_theta", 5e5}, {"rope_type", "default"}}}});
  EXPECT_EQ(parse(both).rope.theta, 5e5);
}

TEST(Rope, RotatedPartOfNeoxHasSeveralSpellings) {
  const json bare = with(neox(), {{"rotary_pct", nullptr}});
  EXPECT_EQ(parse(bare).rope.rotary_dim, 16);  // transformers' default, a quarter
  EXPECT_EQ(parse(with(bare, {{"rotary_pct", 1.0}})).rope.rotary_dim, 64);
  EXPECT_EQ(parse(with(bare, {{"partial_rotary_factor", 0.5}})).rope.rotary_dim, 32);
  EXPECT_EQ(
      parse(with(bare, {{"rope_parameters", {{"partial_rotary_factor", 0.5}}}})).rope.rotary_dim,
      32);
}

// ----------------------------------------------------------------------------------- variants

TEST(ModelConfig, MissingOptionalKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig c =
      parse(with(llama(), {{"num_key_value_heads", nullptr}, {"hidden_act", nullptr}}));
  EXPECT_EQ(c.n_kv_heads, 4);
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_EQ(c.activation, Activation::silu);
  EXPECT_FALSE(c.tied);
  EXPECT_EQ(parse(qwen("qwen3")).head_dim, 128);
  EXPECT_TRUE(parse(neox()).parallel_residual);
}

TEST(ModelConfig, BiasesAreAsTheConfigSays) {
  const ModelConfig c = parse(with(llama(), {{"attention_bias", true}, {"mlp_bias", true}}));
  EXPECT_TRUE(c.qkv_bias && c.o_bias && c.mlp_bias);
  EXPECT_TRUE(parse(with(qwen("qwen3"), {{"attention_bias", true}})).o_bias);
  const ModelConfig without = parse(with(neox(), {{"attention_bias", false}}));
  EXPECT_FALSE(without.qkv_bias || without.o_bias);
  EXPECT_TRUE(without.mlp_bias);
}

TEST(ModelConfig, WindowsThatSlideNowhereAreAccepted) {
  EXPECT_NO_THROW(
      parse(with(qwen("qwen2"), {{"use_sliding_window", false}, {"sliding_window", 4096}})));
  EXPECT_NO_THROW(parse(
      with(qwen("qwen2"),
           {{"use_sliding_window", true}, {"sliding_window", 4096}, {"max_window_layers", 2}})));
  EXPECT_NO_THROW(
      parse(with(qwen("qwen2"), {{"use_sliding_window", true},
                                 {"sliding_window", 4096},
                                 {"layer_types", {"full_attention", "full_attention"}}})));
}

// ------------------------------------------------------------------------- what is refused, and
// how

struct Malformed {
  const char* name;
  json config;
  const char* message;
};
void PrintTo(const Malformed& value, std::ostream* out) { *out << value.name; }

class MalformedConfig : public testing::TestWithParam<Malformed> {};

TEST_P(MalformedConfig, IsRefusedByName) {
  const Malformed& given = GetParam();
  EXPECT_GRAFT_ERROR(parse(given.config), ErrorKind::input, HasSubstr(given.message));
}

json scaled(const json& scaling) { return with(llama(), {{"rope_scaling", scaling}}); }

INSTANTIATE_TEST_SUITE_P(
    All, MalformedConfig,
    testing::Values(
        Malformed{"not_an_object", json::array({1}), "config.json: the file is [1], not an object"},
        Malformed{
            "unknown_family", with(llama(), {{"model_type", "mamba"}}),
            "model_type 'mamba' ('LlamaForCausalLM') is not a family that can be read; known: "
            "gpt_neox, llama, qwen2, qwen3"},
        Malformed{
            "no_family", with(llama(), {{"model_type", nullptr}}),
            "config.json: model_type; it is missing, so the family is not known; known: gpt_neox"},
        Malformed{"classifier",
                  with(llama(), {{"architectures", {"LlamaForSequenceClassification"}}}),
                  "architectures is [\"LlamaForSequenceClassification\"]; a causal language model"},
        Malformed{"architectures_text", with(llama(), {{"architectures", "LlamaForCausalLM"}}),
                  "architectures is \"LlamaForCausalLM\"; a list of class names is needed"},
        Malformed{"no_hidden", with(llama(), {{"hidden_size", nullptr}}),
                  "config.json: the key 'hidden_size' is missing"},
        Malformed{"no_layers", with(llama(), {{"num_hidden_layers", nullptr}}),
                  "config.json: the key 'num_hidden_layers' is missing"},
        Malformed{"no_eps", with(llama(), {{"rms_norm_eps", nullptr}}),
                  "the key 'rms_norm_eps' is missing"},
        Malformed{"no_neox_eps", with(neox(), {{"layer_norm_eps", nullptr}}),
                  "the key 'layer_norm_eps' is missing"},
        Malformed{"no_qwen_kv", with(qwen("qwen2"), {{"num_key_value_heads", nullptr}}),
                  "the key 'num_key_value_heads' is missing"},
        Malformed{"text_for_integer", with(llama(), {{"vocab_size", "320"}}),
                  "vocab_size is \"320\"; an integer is needed"},
        Malformed{"fraction_for_integer", with(llama(), {{"vocab_size", 320.5}}),
                  "vocab_size is 320.5; an integer is needed"},
        Malformed{"zero", with(llama(), {{"num_attention_heads", 0}}),
                  "num_attention_heads is 0; it must lie between 1 and 65536"},
        Malformed{"negative", with(llama(), {{"hidden_size", -64}}),
                  "hidden_size is -64; it must lie between 1 and 16777216"},
        Malformed{"huge", with(llama(), {{"vocab_size", 18446744073709551615u}}),
                  "vocab_size is 18446744073709551615; it must lie between 1 and 16777216"},
        Malformed{"negative_eps", with(llama(), {{"rms_norm_eps", -1e-5}}),
                  "rms_norm_eps is -1e-05; it must be positive and finite"},
        Malformed{"text_for_number", with(llama(), {{"rms_norm_eps", "1e-5"}}),
                  "rms_norm_eps is \"1e-5\"; a number is needed"},
        Malformed{"number_for_boolean", with(llama(), {{"tie_word_embeddings", 1}}),
                  "tie_word_embeddings is 1; true or false is needed"},
        Malformed{"activation", with(llama(), {{"hidden_act", "gelu_new"}}),
                  "hidden_act is \"gelu_new\"; known are silu and gelu (the exact one)"},
        Malformed{"groups", with(llama(), {{"num_key_value_heads", 3}}),
                  "num_key_value_heads is 3; it must divide num_attention_heads 4"},
        Malformed{"indivisible",
                  with(llama(), {{"num_attention_heads", 3}, {"num_key_value_heads", 3}}),
                  "hidden_size is 64; it is not divisible by num_attention_heads 3, and there is "
                  "no head_dim"},
        Malformed{"neox_head_dim", with(neox(), {{"head_dim", 128}}),
                  "head_dim is 128; GPT-NeoX has hidden_size / num_attention_heads = 64"},
        Malformed{"sliding",
                  with(qwen("qwen2"), {{"use_sliding_window", true},
                                       {"sliding_window", 4096},
                                       {"max_window_layers", 1}}),
                  "use_sliding_window is true; sliding-window attention"},
        Malformed{"layer_types",
                  with(qwen("qwen3"), {{"layer_types", {"full_attention", "sliding_attention"}}}),
                  "layer_types[1] is \"sliding_attention\"; only full_attention is implemented"},
        Malformed{"layer_types_length", with(qwen("qwen3"), {{"layer_types", {"full_attention"}}}),
                  "a list of num_hidden_layers = 2 names is needed"},
        Malformed{"quantised", with(llama(), {{"quantization_config", {{"quant_method", "gptq"}}}}),
                  "quantised weights cannot be read"},
        Malformed{
            "yarn", scaled({{"rope_type", "yarn"}, {"factor", 4.0}}),
            "rope_scaling.rope_type is \"yarn\"; this kind of RoPE is not implemented; known: "
            "default, linear, llama3"},
        Malformed{"dynamic", scaled({{"type", "dynamic"}, {"factor", 2.0}}),
                  "rope_scaling.type is \"dynamic\""},
        Malformed{"longrope", with(llama(), {{"rope_parameters", {{"rope_type", "longrope"}}}}),
                  "rope_parameters.rope_type is \"longrope\""},
        Malformed{"rope_type_number", scaled({{"type", 3}}),
                  "rope_scaling.type is 3; a string is needed"},
        Malformed{"rope_is_text", scaled("linear"), "rope_scaling is \"linear\", not an object"},
        Malformed{"linear_without_factor", scaled({{"type", "linear"}}),
                  "the key 'rope_scaling.factor' is missing"},
        Malformed{"zero_factor", scaled({{"type", "linear"}, {"factor", 0}}),
                  "rope_scaling.factor is 0; it must be positive and finite"},
        Malformed{"llama3_incomplete", scaled({{"rope_type", "llama3"}, {"factor", 8.0}}),
                  "the key 'rope_scaling.low_freq_factor' is missing"},
        Malformed{"llama3_crossed",
                  scaled({{"rope_type", "llama3"},
                          {"factor", 8.0},
                          {"low_freq_factor", 4.0},
                          {"high_freq_factor", 4.0}}),
                  "rope_scaling.high_freq_factor is 4.0; it must be above low_freq_factor"},
        Malformed{"factor_without_type", scaled({{"factor", 8.0}}),
                  "rope_scaling.factor is 8.0; there is no rope_scaling.rope_type that says how it "
                  "is used; known: default, linear, llama3"},
        Malformed{"factor_with_null_type", scaled({{"type", nullptr}, {"factor", 8.0}}),
                  "rope_scaling.factor is 8.0; there is no rope_scaling.rope_type"},
        Malformed{"two_types",
                  scaled({{"type", "linear"}, {"rope_type", "llama3"}, {"factor", 8.0}}),
                  "rope_scaling.rope_type is \"llama3\"; rope_scaling.type is 'linear'; both say"},
        Malformed{"two_sections",
                  with(llama(), {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
                                 {"rope_parameters", {{"rope_type", "default"}}}}),
                  "rope_parameters is {\"rope_type\":\"default\"}; rope_scaling is "
                  "{\"factor\":2.0,\"type\":\"linear\"}; both are names of the same settings"},
        Malformed{
            "two_thetas",
            with(llama(), {{"rope_theta", 10000}, {"rope_parameters", {{"rope_theta", 5e5}}}}),
            "rope_theta is 10000; rope_parameters.rope_theta is 500000.0; both mean the same"},
        Malformed{"zero_theta_at_the_top",
                  with(llama(), {{"rope_theta", 0}, {"rope_parameters", {{"rope_theta", 5e5}}}}),
                  "rope_theta is 0; it must be positive and finite"},
        Malformed{
            "text_theta_at_the_top",
            with(llama(), {{"rope_theta", "1e4"}, {"rope_parameters", {{"rope_theta", 5e5}}}}),
            "rope_theta is \"1e4\"; a number is needed"},
        Malformed{
            "rope_by_layer_type",
            with(llama(), {{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}}),
            "rope_parameters.full_attention is {\"rope_type\":\"default\"}; RoPE settings that "
            "differ"},
        Malformed{"partial_llama", with(llama(), {{"partial_rotary_factor", 0.5}}),
                  "partial_rotary_factor is 0.500000; the llama family rotates whole heads"},
        Malformed{"rotary_above_one", with(neox(), {{"rotary_pct", 1.5}}),
                  "rotary_pct is 1.500000; it must be above 0 and at most 1"},
        Malformed{"rotary_odd", with(neox(), {{"rotary_pct", 0.02}}),
                  "1 of the head's 64 dims are rotated (head_dim, rotary_pct); an even number"},
        Malformed{"odd_head", with(llama(), {{"head_dim", 15}}),
                  "15 of the head's 15 dims are rotated"},
        Malformed{"eos_text", with(llama(), {{"eos_token_id", "</s>"}}),
                  "eos_token_id is \"</s>\"; an integer or a list of integers is needed"}),
    [](const auto& info) { return std::string(info.param.name); });

// ------------------------------------------------------------------------------------- folders

TEST(StopIds, AreTheUnionOfAllThreeFiles) {
  const TempFolder folder;
  write(folder, "config.json",
        with(llama(), {{"eos_token_id", {128, 300}}, {"bos_token_id", nullptr}}));
  write(folder, "generation_config.json", json{{"eos_token_id", 17}, {"bos_token_id", 5}});
  write(
      folder, "tokenizer_config.json",
      json{{"eos_token", "<|end|>"}, {"added_tokens_decoder", {{"9", {{"content", "<|end|>"}}}}}});
  const ModelConfig c = load_model_config(folder.path());
  EXPECT_THAT(c.stop_ids, ElementsAre(9, 17, 128, 300));
  EXPECT_EQ(c.bos_id, 5);
  EXPECT_THAT(c.notes, IsEmpty());
}

TEST(StopIds, TheTokenizersEosIsLookedUpInItsFile) {
  for (const json& tokenizer :
       {json{{"added_tokens", {{{"content", "<|end|>"}, {"id", 33}}}}},
        json{{"added_tokens", json::array()}, {"model", {{"vocab", {{"<|end|>", 33}}}}}}}) {
    const TempFolder folder;
    write(folder, "config.json", llama());
    write(folder, "generation_config.json", json{{"eos_token_id", {1, 2}}});
    write(folder, "tokenizer_config.json", json{{"eos_token", {{"content", "<|end|>"}}}});
    write(folder, "tokenizer.json", tokenizer);
    EXPECT_THAT(load_model_config(folder.path()).stop_ids, ElementsAre(1, 2, 33));
  }
}

TEST(StopIds, WhatCannotStopIsNoted) {
  const TempFolder folder;
  write(folder, "config.json", with(llama(), {{"eos_token_id", {2, 5000, -1}}}));
  write(folder, "tokenizer_config.json", json{{"eos_token", "<|gone|>"}});
  const ModelConfig c = load_model_config(folder.path());
  EXPECT_THAT(c.stop_ids, ElementsAre(2));
  ASSERT_EQ(c.notes.size(), 3u);
  EXPECT_THAT(c.notes[0], HasSubstr("eos_token_id 5000 is outside the vocabulary of 320"));
  EXPECT_THAT(c.notes[1], HasSubstr("eos_token_id -1 is outside"));
  EXPECT_THAT(c.notes[2], HasSubstr("eos_token '<|gone|>' has no id"));
}

TEST(Rope, TwoSectionsThatAreEqualAreOne) {
  const json linear = {{"type", "linear"}, {"rope_type", "linear"}, {"factor", 2.0}};
  EXPECT_EQ(
      parse(with(llama(), {{"rope_scaling", linear}, {"rope_parameters", linear}})).rope.scaling,
      "linear");
  EXPECT_EQ(parse(with(llama(), {{"rope_scaling", json::object()}, {"rope_parameters", linear}}))
                .rope.scaling,
            "linear");
}

TEST(LoadModelConfig, FilesThatCannotBeReadAreNamed) {
  for (const char* name :
       {"config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"}) {
    const TempFolder folder;
    write(folder, "config.json", llama());
    write(folder, "tokenizer_config.json", json{{"eos_token", "<|end|>"}});
    std::filesystem::remove(folder / name);
    std::filesystem::create_symlink(name, folder / name);  // to itself
    EXPECT_GRAFT_ERROR(load_model_config(folder.path()), ErrorKind::input,
                       HasSubstr("cannot read '" + (folder / name).string() + "': "));
  }
}

TEST(LoadModelConfig, SaysWhatIsWrongWithTheFolder) {
  EXPECT_GRAFT_ERROR(load_model_config("/nonexistent/model"), ErrorKind::input,
                     HasSubstr("/nonexistent/model"));
  const TempFolder folder;
  EXPECT_GRAFT_ERROR(load_model_config(folder.path()), ErrorKind::input, HasSubstr("config.json"));
  write(folder, "config.json", std::string("{\"model_type\": \"llama\","));
  EXPECT_GRAFT_ERROR(load_model_config(folder.path()), ErrorKind::input, HasSubstr("config.json"));
  write(folder, "config.json", llama());
  write(folder, "generation_config.json", std::string("[1]"));
  EXPECT_GRAFT_ERROR(load_model_config(folder.path()), ErrorKind::input,
                     HasSubstr("generation_config.json: the file is [1], not an object"));
}

}  // namespace
}  // namespace graft
