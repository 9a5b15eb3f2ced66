#include "core/eval/layer_selection.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "core/config/layer_set.h"
#include "core/eval/perplexity.h"
#include "core/student/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// The golden Llama with its two layers twice, the copies changed a little.
Backbone four_layers(const std::filesystem::path& folder) {
  ModelFiles files = ModelFiles::golden("llama");
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(5);
  files.config["num_hidden_layers"] = 4;
  const TensorMap tensors = files.tensors;
  for (const auto& [name, tensor] : tensors) {
    for (int layer : {0, 1}) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      if (!name.starts_with(prefix)) continue;
      files
          .tensors["model.layers." + std::to_string(layer + 2) + "." + name.substr(prefix.size())] =
          tensor + 0.05 * at::randn(tensor.sizes(), generator);
    }
  }
  files.write(folder);
  return Backbone::load(folder);
}

class SelectLayersTest : public testing::Test {
 protected:
  SelectLayersTest()
      : teacher_(four_layers(folder_ / "teacher")),
        ids_(at::randint(0, 320, {3, 24}, at::make_generator<at::CPUGeneratorImpl>(3), at::kLong)) {
    for (std::int64_t layer = 0; layer < 4; ++layer)
      mixers_[layer] = std::make_shared<TokenMixer>(
          plugins_.registry().create_mixer("gdn", teacher_.layer_info(layer).c_info()),
          static_cast<std::uint64_t>(layer) + 1);
  }

  // By the plainest way: the whole model with a block replaced, all logits at once.
  at::Tensor log_probs(const std::function<at::Tensor(std::int64_t, const at::Tensor&)>& block) {
    at::NoGradGuard no_grad;
    return teacher_.logits(teacher_.hidden(ids_, {}, block)).to(at::kDouble).log_softmax(-1);
  }
  at::Tensor attention(std::int64_t layer, const at::Tensor& x) {
    return teacher_.attention(layer, x).y;
  }
  at::Tensor mixer(std::int64_t layer, const at::Tensor& x) {
    return mixers_.at(layer)->forward(x).y;
  }
  double perplexity_of(const at::Tensor& log_q) {
    const at::Tensor label = ids_.narrow(1, 1, 23).unsqueeze(-1);
    return std::exp(-log_q.narrow(1, 0, 23).gather(-1, label).mean().item<double>());
  }
  double student_perplexity(const std::set<std::int64_t>& kept) {
    return perplexity_of(log_probs([&](std::int64_t layer, const at::Tensor& x) {
      return kept.contains(layer) ? attention(layer, x) : mixer(layer, x);
    }));
  }

  TempFolder folder_;
  BuiltPlugins plugins_;
  Backbone teacher_;
  at::Tensor ids_;
  Model::Mixers mixers_;
};

TEST_F(SelectLayersTest, ArMeasuresTheTeacherWithoutOneAttention) {
  const LayerSelection got = select_layers(teacher_, {}, ids_, {"ar", 2});
  ASSERT_EQ(got.scores.size(), 4u);
  std::vector<std::pair<double, int>> order;
  for (int l = 0; l < 4; ++l) {
    const double expected = perplexity_of(log_probs([&](std::int64_t layer, const at::Tensor& x) {
      return layer == l ? at::zeros_like(x) : attention(layer, x);
    }));
    const LayerScore& score = got.scores[static_cast<std::size_t>(l)];
    EXPECT_EQ(score.layer, l);
    EXPECT_NEAR(score.score / expected, 1, 1e-4);
    order.emplace_back(-expected, l);
  }
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < 4; ++i) {
    const LayerScore& score = got.scores[static_cast<std::size_t>(order[i].second)];
    EXPECT_EQ(score.rank, static_cast<int>(i) + 1);
    EXPECT_EQ(score.kept, i < 2);
  }
  std::vector<int> kept = {order[0].second, order[1].second};
  std::sort(kept.begin(), kept.end());
  EXPECT_EQ(got.layers, kept);
  EXPECT_NEAR(got.teacher_perplexity / student_perplexity({0, 1, 2, 3}), 1, 1e-4);
}

TEST_F(SelectLayersTest, SwapKlMeasuresTheDivergenceOfOneSwappedLayer) {
  const LayerSelection got = select_layers(teacher_, mixers_, ids_, {"swap-kl", 1});
  const at::Tensor log_p =
      log_probs([&](std::int64_t layer, const at::Tensor& x) { return attention(layer, x); });
  double most = 0;
  for (int l = 0; l < 4; ++l) {
    const at::Tensor log_q = log_probs([&](std::int64_t layer, const at::Tensor& x) {
      return layer == l ? mixer(layer, x) : attention(layer, x);
    });
    const double expected =
        (log_p.exp() * (log_p - log_q)).sum(-1).narrow(1, 0, 23).mean().item<double>();
    EXPECT_NEAR(got.scores[static_cast<std::size_t>(l)].score, expected, 1e-4 * expected + 1e-6);
    most = std::max(most, expected);
  }
  ASSERT_EQ(got.layers.size(), 1u);
  EXPECT_NEAR(got.scores[static_cast<std::size_t>(got.layers[0])].score, most, 1e-4 * most);
}

TEST_F(SelectLayersTest, GaS2AddsTheLayerThatHelpsMostEachTime) {
  const LayerSelection got = select_layers(teacher_, mixers_, ids_, {"ga-s2", 2});
  std::set<std::int64_t> kept;
  for (int round = 1; round <= 2; ++round) {
    std::int64_t best = -1;
    double least = INFINITY;
    for (std::int64_t layer = 0; layer < 4; ++layer) {
      if (kept.contains(layer)) continue;
      std::set<std::int64_t> more = kept;
      more.insert(layer);
      const double value = student_perplexity(more);
      if (value < least) least = value, best = layer;
    }
    const LayerScore& score = got.scores[static_cast<std::size_t>(best)];
    EXPECT_TRUE(score.kept);
    EXPECT_EQ(score.rank, round);
    EXPECT_NEAR(score.score / least, 1, 1e-4);
    kept.insert(best);
  }
  EXPECT_EQ(std::set<std::int64_t>(got.layers.begin(), got.layers.end()), kept);
}

TEST_F(SelectLayersTest, TellsHowFarItIsAndStops) {
  std::int64_t units = 0, done = 0;
  SelectHooks hooks;
  hooks.begin = [&](std::int64_t n) { units = n; };
  hooks.evaluated = [&](const std::string& note) {
    EXPECT_THAT(note, HasSubstr("layer "));
    ++done;
  };
  select_layers(teacher_, mixers_, ids_, {"ga-s2", 2}, hooks);
  EXPECT_EQ(units, 4 + 3);
  EXPECT_EQ(done, units);
  hooks.should_stop = [&] { return true; };
  EXPECT_GRAFT_ERROR(select_layers(teacher_, mixers_, ids_, {"swap-kl", 2}, hooks),
                     ErrorKind::interrupted, HasSubstr("layers were selected"));
}

TEST_F(SelectLayersTest, MixersThatAreMissingAreRefused) {
  mixers_.erase(2);
  EXPECT_GRAFT_ERROR(select_layers(teacher_, mixers_, ids_, {"swap-kl", 2}), ErrorKind::internal,
                     HasSubstr("only 3 were converted"));
}

TEST(UniformSelection, SpreadsOverTheDepth) {
  EXPECT_THAT(uniform_selection({"uniform", 8}, 30).layers,
              ElementsAre(0, 3, 7, 11, 15, 18, 22, 26));
  EXPECT_THAT(uniform_selection({"uniform", 1}, 30).layers, ElementsAre(0));
  EXPECT_THAT(uniform_selection({"uniform:4", 0}, 10).layers, ElementsAre(0, 4, 8));
  EXPECT_EQ(uniform_selection({"uniform", 29}, 30).layers.size(), 29u);
}

TEST(SelectOptions, MistakesAreNamed) {
  const auto check = [](const SelectOptions& options, std::int64_t layers) {
    policy_needs_mixers(options, layers);
  };
  EXPECT_GRAFT_ERROR(check({"swapkl", 2}, 30), ErrorKind::usage,
                     AllOf(HasSubstr("unknown policy 'swapkl'"), HasSubstr("'swap-kl'")));
  EXPECT_GRAFT_ERROR(check({"ar", 0}, 30), ErrorKind::usage, HasSubstr("--keep is 0"));
  EXPECT_GRAFT_ERROR(check({"ar", 30}, 30), ErrorKind::usage, HasSubstr("1 to 29"));
  EXPECT_GRAFT_ERROR(check({"uniform:x", 0}, 30), ErrorKind::usage, HasSubstr("'uniform:x'"));
  EXPECT_GRAFT_ERROR(check({"uniform:1", 0}, 30), ErrorKind::usage, HasSubstr("every layer"));
  EXPECT_GRAFT_ERROR(check({"uniform:4", 3}, 30), ErrorKind::usage, HasSubstr("write \"uniform\""));
  EXPECT_TRUE(policy_needs_mixers({"ga-s2", 1}, 2));
  EXPECT_FALSE(policy_needs_mixers({"ar", 1}, 2));
}

TEST(SelectionFile, IsTakenByKeepAttention) {
  LayerSelection selection;
  selection.policy = "ar";
  selection.layers = {1, 3};
  selection.scores = {
      {0, 1.5, false, 3}, {1, 9, true, 2}, {2, 1, false, 4}, {3, INFINITY, true, 1}};
  TempFolder folder;
  const std::string file = (folder / "layers.json").string();
  write_file_atomically(file, to_json(selection, 4, {{"teacher", "tiny"}}));
  EXPECT_THAT(attention_layers(file, 4), ElementsAre(1, 3));
  const auto json = nlohmann::json::parse(read_text(file));
  EXPECT_EQ(json.at("provenance").at("teacher"), "tiny");
  EXPECT_TRUE(json.at("scores").at(3).at("score").is_null()) << "JSON has no infinity";
  EXPECT_EQ(json.at("scores").at(1).at("score"), 9);
}

}  // namespace
}  // namespace graft
