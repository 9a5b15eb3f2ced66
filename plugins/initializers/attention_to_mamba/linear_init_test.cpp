// Initializers on hedgehog and hedgemamba as the host runs them: with real mixers, on teachers of
// every family, and on the demo's teacher where it is there.
#include "core/student/testing.h"
#include "core/train/convert.h"
#include "core/train/init_run.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

using Options = std::map<std::string, OptionValue>;

constexpr std::uint64_t kSeed = 3;

std::filesystem::path smollm2() {
  return std::filesystem::path(GRAFT_SOURCE_DIR) / "data/teacher/SmolLM2-135M-Instruct";
}

bool has_smollm2() { return std::filesystem::exists(smollm2() / "model.safetensors"); }

// [windows, tokens] of the golden windows of a novel.
at::Tensor persuasion(std::int64_t windows, std::int64_t tokens) {
  const auto ids = read_json(std::filesystem::path(GRAFT_TEST_DATA) / "smollm2_persuasion.json")
                       .at("ids")
                       .get<std::vector<std::int64_t>>();
  return at::tensor(ids, at::kLong).view({16, 512}).narrow(0, 0, windows).narrow(1, 0, tokens);
}

at::Tensor& parameter(TokenMixer& mixer, const std::string& name) {
  for (const MixerParameter& p : mixer.parameters()) {
    if (p.name == name) return const_cast<at::Tensor&>(p.tensor);
  }
  throw std::out_of_range(name);
}

class LinearInit : public testing::Test {
 protected:
  std::shared_ptr<TokenMixer> mixer(const Backbone& teacher, std::int64_t layer,
                                    const std::string& name, const Options& options = {}) {
    const LayerInfo info = teacher.layer_info(layer);
    return std::make_shared<TokenMixer>(
        plugins_.registry().create_mixer(name, info.c_info(), options), kSeed);
  }
  InitReport from_teacher(const std::string& name, const Backbone& teacher, std::int64_t layer,
                          TokenMixer& target, const LayerSignals& signals = {},
                          const Options& options = {}) {
    return run_initializer(*plugins_.registry().create_initializer(name, options), teacher, layer,
                           target, signals, kSeed);
  }
  InitReport from_mixer(const std::string& name, const TokenMixer& source, const LayerInfo& info,
                        TokenMixer& target, const Options& options = {}) {
    return run_initializer(*plugins_.registry().create_initializer(name, options), source, info,
                           target, {}, kSeed);
  }
  // A hedgehog with the teacher's projections whose feature maps were moved off the identity.
  std::shared_ptr<TokenMixer> trained_hedgehog(const Backbone& teacher, std::int64_t layer,
                                               const Options& options = {}) {
    const auto hedgehog = mixer(teacher, layer, "hedgehog", options);
    from_teacher("projection_copy", teacher, layer, *hedgehog);
    at::manual_seed(5);
    for (const char* map : {"feature_map_q", "feature_map_k"}) {
      for (const char* part : {".weight", ".bias"}) {
        at::Tensor& tensor = parameter(*hedgehog, std::string(map) + part);
        tensor.add_(at::randn(tensor.sizes()) * 0.2);
      }
    }
    return hedgehog;
  }

  TempFolder folder_;
  BuiltPlugins plugins_;
  at::NoGradGuard no_grad_;
};

// Largest difference over the largest output.
double difference(const at::Tensor& got, const at::Tensor& want) {
  return ((got - want).abs().max() / want.abs().max()).item<double>();
}

// ---------------------------------------------------------------- attention_to_mamba

class EveryFamily : public LinearInit, public testing::WithParamInterface<const char*> {
 protected:
  EveryFamily() : teacher_(Backbone::load(make_tiny_teacher(folder_ / "teacher", GetParam()))) {}
  Backbone teacher_;
};

TEST_P(EveryFamily, HedgeMambaStartsAsItsHedgehog) {
  for (const std::int64_t layer : {0, 1}) {
    const auto hedgehog = trained_hedgehog(teacher_, layer);
    const at::Tensor x = at::randn({2, 70, teacher_.config().model_dim});
    const at::Tensor want = hedgehog->forward(x).y;
    ASSERT_GT(want.abs().max().item<double>(), 1e-3);
    for (const bool decay : {false, true}) {
      for (const bool output_gate : {false, true}) {
        for (const std::int64_t short_conv : {0, 4}) {
          const auto mamba =
              mixer(teacher_, layer, "hedgemamba",
                    {{"decay", decay}, {"output_gate", output_gate}, {"short_conv", short_conv}});
          for (const MixerParameter& p : mamba->parameters()) p.tensor.normal_();
          const InitReport report =
              from_mixer("attention_to_mamba", *hedgehog, teacher_.layer_info(layer), *mamba);
          EXPECT_TRUE(report.left.empty()) << report.left.front();
          EXPECT_LE(difference(mamba->forward(x).y, want), 1e-5)
              << "decay " << decay << " gate " << output_gate << " conv " << short_conv;
          // Prefill and steps as well.
          MixerState state;
          mamba->advance(x.narrow(1, 0, 40), {}, {}, state);
          for (std::int64_t t = 40; t < 44; ++t) {
            EXPECT_LE(
                difference(mamba->advance(x.narrow(1, t, 1), {}, {}, state), want.narrow(1, t, 1)),
                1e-5);
          }
        }
      }
    }
  }
}

TEST_P(EveryFamily, FromAttentionDirectlyTheFeatureMapsAreIdentities) {
  const auto hedgehog = mixer(teacher_, 1, "hedgehog");
  from_teacher("projection_copy", teacher_, 1, *hedgehog);
  const auto mamba = mixer(teacher_, 1, "hedgemamba");
  for (const MixerParameter& p : mamba->parameters()) p.tensor.normal_();
  EXPECT_TRUE(from_teacher("attention_to_mamba", teacher_, 1, *mamba).left.empty());
  const at::Tensor x = at::randn({1, 33, teacher_.config().model_dim});
  EXPECT_LE(difference(mamba->forward(x).y, hedgehog->forward(x).y), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(All, EveryFamily, testing::Values("llama", "qwen2", "qwen3", "gpt_neox"));

TEST_F(LinearInit, OnTheDemosTeacherHedgeMambaStartsAsItsHedgehog) {
  if (!has_smollm2()) GTEST_SKIP() << smollm2() << " is not there; scripts/get_teacher.py makes it";
  const Backbone teacher = Backbone::load(smollm2());
  at::Tensor h = teacher.embed(persuasion(1, 512));
  for (const int layer : {0, 1}) {
    const at::Tensor x = teacher.block_input(layer, h);
    const auto hedgehog = trained_hedgehog(teacher, layer),
               mamba = mixer(teacher, layer, "hedgemamba");
    from_mixer("attention_to_mamba", *hedgehog, teacher.layer_info(layer), *mamba);
    const double worst = difference(mamba->forward(x).y, hedgehog->forward(x).y);
    EXPECT_LE(worst, 1e-5) << "layer " << layer;
    std::printf("layer %d: %.2g of the largest output\n", layer, worst);
    h = teacher.finish_block(layer, h, teacher.attention(layer, x).y);
  }
}

TEST_F(LinearInit, AFiniteHalfLifeIsSetAndStaysClose) {
  const Backbone teacher = Backbone::load(make_tiny_teacher(folder_ / "teacher"));
  const auto hedgehog = trained_hedgehog(teacher, 0), mamba = mixer(teacher, 0, "hedgemamba");
  from_mixer("attention_to_mamba", *hedgehog, teacher.layer_info(0), *mamba,
             {{"half_life", 4096.0}});
  const double decay = parameter(*mamba, "A_log").exp()[0].item<double>();
  EXPECT_NEAR(std::log(2) / decay, 4096, 1);
  const at::Tensor x = at::randn({1, 64, teacher.config().model_dim});
  const double worst = difference(mamba->forward(x).y, hedgehog->forward(x).y);
  EXPECT_GT(worst, 1e-5);
  EXPECT_LE(worst, 1e-2);
}

TEST_F(LinearInit, MixersThatCannotBeEqualAreRefusedByRole) {
  const Backbone teacher = Backbone::load(make_tiny_teacher(folder_ / "teacher"));
  const LayerInfo info = teacher.layer_info(0);
  const auto wide = trained_hedgehog(teacher, 0, {{"feature_dim", std::int64_t{24}}});
  EXPECT_GRAFT_ERROR(
      from_mixer("attention_to_mamba", *wide, info, *mixer(teacher, 0, "hedgemamba")),
      ErrorKind::plugin,
      AllOf(HasSubstr("layer 0"), HasSubstr("graft.role.feature-map-query"),
            HasSubstr("[4, 24, 16]"), HasSubstr("[4, 16, 16]"), HasSubstr("same options")));
  const auto normed = trained_hedgehog(teacher, 0, {{"qk_norm", std::string("on")}});
  EXPECT_GRAFT_ERROR(
      from_mixer("attention_to_mamba", *normed, info, *mixer(teacher, 0, "hedgemamba")),
      ErrorKind::plugin, AllOf(HasSubstr("q_norm.weight"), HasSubstr("no place")));
}

TEST_F(LinearInit, AMixerServesAnyInitializerAsASource) {
  const Backbone teacher = Backbone::load(make_tiny_teacher(folder_ / "teacher"));
  const auto hedgehog = trained_hedgehog(teacher, 0), gdn = mixer(teacher, 0, "gdn");
  const InitReport report = from_mixer("projection_copy", *hedgehog, teacher.layer_info(0), *gdn);
  EXPECT_THAT(report.written, Contains("q_proj.weight"));
  EXPECT_TRUE(at::equal(parameter(*gdn, "q_proj.weight"), parameter(*hedgehog, "q_proj.weight")));
}

// ---------------------------------------------------------------- projection_copy and taylor

LayerSignals signals_of(const Backbone& teacher, std::int64_t layer, const at::Tensor& ids) {
  at::Tensor h = teacher.embed(ids);
  for (std::int64_t i = 0; i < layer; ++i)
    h = teacher.finish_block(i, h, teacher.attention(i, teacher.block_input(i, h)).y);
  LayerSignals signals;
  signals.block_input = teacher.block_input(layer, h);
  AttentionCall call;
  call.want_context = true;
  const AttentionResult result = teacher.attention(layer, signals.block_input, call);
  signals.block_output = result.y;
  signals.head_context = result.context;
  signals.residual = h + result.y;
  const at::Tensor x = signals.block_input;
  signals.attention_probs = [&teacher, layer, x](std::int64_t first, std::int64_t count) {
    AttentionCall probs;
    probs.want_probs = true;
    return teacher.attention(layer, x.narrow(0, first, count), probs).probs;
  };
  return signals;
}

// Squared error of the block's output over that of silence.
double block_error(TokenMixer& mixer, const LayerSignals& signals) {
  return ((mixer.forward(signals.block_input).y - signals.block_output).square().sum() /
          signals.block_output.square().sum())
      .item<double>();
}

TEST_F(LinearInit, ProjectionCopyAndTaylorWorkOnBothMixers) {
  for (const char* family : {"llama", "qwen3", "gpt_neox"}) {
    const Backbone teacher = Backbone::load(make_tiny_teacher(folder_ / family, family));
    const LayerSignals signals = signals_of(
        teacher, 1,
        at::randint(0, 256, {8, 32}, at::make_generator<at::CPUGeneratorImpl>(3), at::kLong));
    for (const char* name : {"hedgehog", "hedgemamba"}) {
      const std::string what = std::string(family) + " " + name;
      const auto copied = mixer(teacher, 1, name), fitted = mixer(teacher, 1, name),
                 by_median = mixer(teacher, 1, name);
      const InitReport copy = from_teacher("projection_copy", teacher, 1, *copied);
      EXPECT_THAT(copy.written, AllOf(Contains("q_proj.weight"), Contains("k_proj.weight"),
                                      Contains("v_proj.weight"), Contains("o_proj.weight")))
          << what;
      EXPECT_THAT(copy.left, Contains("feature_map_q.weight")) << what;
      const InitReport taylor = from_teacher("taylor", teacher, 1, *fitted, signals);
      EXPECT_THAT(taylor.written, Contains("o_proj.weight")) << what;
      if (std::string(name) == "hedgemamba") {
        EXPECT_THAT(taylor.written,
                    AllOf(Contains("A_log"), Contains("g_proj.weight"), Contains("g_proj.bias")))
            << what;
      }
      from_teacher("taylor", teacher, 1, *by_median, signals, {{"decay", std::string("median")}});
      // The attention of these random teachers is nearly even, so a copy is close already.
      EXPECT_LT(block_error(*copied, signals), 0.1) << what;
      EXPECT_LT(block_error(*fitted, signals), 0.1) << what;
      EXPECT_LT(block_error(*by_median, signals), 0.12) << what;
    }
  }
}

TEST_F(LinearInit, OnTheDemosTeacherTaylorIsCloserThanACopy) {
  if (!has_smollm2()) GTEST_SKIP() << smollm2() << " is not there; scripts/get_teacher.py makes it";
  const Backbone teacher = Backbone::load(smollm2());
  const LayerSignals signals = signals_of(teacher, 1, persuasion(16, 192));
  for (const char* name : {"hedgehog", "hedgemamba"}) {
    const auto copied = mixer(teacher, 1, name), fitted = mixer(teacher, 1, name);
    from_teacher("projection_copy", teacher, 1, *copied);
    from_teacher("taylor", teacher, 1, *fitted, signals);
    const double copy = block_error(*copied, signals), taylor = block_error(*fitted, signals);
    EXPECT_LT(taylor, 0.9 * copy) << name;
    std::printf("%s: copy %.3g, taylor %.3g\n", name, copy, taylor);
  }
}

TEST_F(LinearInit, WhatDoesNotFitIsRefusedBeforeAnyWeightIsRead) {
  const ModelConfig config = Backbone::load(make_tiny_teacher(folder_ / "teacher")).config();
  Recipe recipe;
  recipe.calibrate = false;
  for (const char* name : {"hedgehog", "hedgemamba"}) {
    recipe.mixer = {name, {}};
    for (const char* init : {"projection_copy", "taylor", "attention_to_mamba"}) {
      recipe.init = {init, {}};
      check_recipe(plugins_.registry(), recipe, config);  // fits
    }
    recipe.init = {"taylor", {{"variant", std::string("paper")}}};
    EXPECT_GRAFT_ERROR(check_recipe(plugins_.registry(), recipe, config), ErrorKind::plugin,
                       AllOf(HasSubstr("'taylor' needs role graft.role."), HasSubstr(name)));
  }
  recipe.mixer = {"hedgehog", {}};
  recipe.init = {"projection_copy", {{"gates", std::string("zero")}}};
  EXPECT_GRAFT_ERROR(check_recipe(plugins_.registry(), recipe, config), ErrorKind::plugin,
                     HasSubstr("needs role graft.role.output-gate"));
  recipe.mixer = {"gdn", {}};
  recipe.init = {"attention_to_mamba", {}};
  EXPECT_GRAFT_ERROR(check_recipe(plugins_.registry(), recipe, config), ErrorKind::plugin,
                     HasSubstr("needs role graft.role.feature-map-query; mixer 'gdn' has: "));
}

}  // namespace
}  // namespace graft
