#include <ATen/Parallel.h>

#include <cmath>

#include "core/eval/agreement.h"
#include "core/eval/generate.h"
#include "core/eval/perplexity.h"
#include "core/student/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// A model that finds every token equally likely: its output projection is zero.
Model uniform_model(const std::filesystem::path& folder) {
  ModelFiles files = ModelFiles::golden("llama");
  files.tensors["lm_head.weight"].zero_();
  files.write(folder);
  return Model(std::make_shared<const Backbone>(Backbone::load(folder)));
}

Model golden_model(const std::filesystem::path& folder) {
  return Model(std::make_shared<const Backbone>(Backbone::load(make_tiny_teacher(folder))));
}

std::vector<std::int32_t> some_tokens(std::size_t count) {
  std::vector<std::int32_t> tokens;
  std::uint64_t state = 7;
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    tokens.push_back(static_cast<std::int32_t>((state >> 33) % 320));
  }
  return tokens;
}

struct PerplexityCase {
  std::int64_t tokens, context, stride, windows, scored;
  bool bos = false;
};

class PerplexityTest : public testing::TestWithParam<PerplexityCase> {};

TEST_P(PerplexityTest, AUniformModelScoresItsVocabularyAndEachTokenOnce) {
  TempFolder folder;
  const auto [count, context, stride, windows, scored, bos] = GetParam();
  const Perplexity result =
      perplexity(uniform_model(folder / "m"), some_tokens(static_cast<std::size_t>(count)),
                 {context, windows, stride, bos}, "text");
  EXPECT_NEAR(result.value(), 320.0, 1e-3);
  EXPECT_EQ(result.scored, scored);
}

// W = 16. Windows that share nothing leave each window's first token unscored; overlapping ones
// score all but the first.
INSTANTIATE_TEST_SUITE_P(
    Lengths, PerplexityTest,
    testing::Values(PerplexityCase{2, 16, 0, 0, 1}, PerplexityCase{15, 16, 0, 0, 14},
                    PerplexityCase{16, 16, 0, 0, 15}, PerplexityCase{17, 16, 0, 0, 15},
                    PerplexityCase{31, 16, 0, 0, 29}, PerplexityCase{64, 16, 0, 0, 60},
                    PerplexityCase{64, 16, 0, 2, 30}, PerplexityCase{16, 16, 15, 0, 15},
                    PerplexityCase{17, 16, 15, 0, 16}, PerplexityCase{31, 16, 8, 0, 30},
                    PerplexityCase{200, 16, 1, 0, 199}, PerplexityCase{1, 16, 0, 0, 1, true},
                    PerplexityCase{31, 16, 0, 0, 31, true}));

TEST(Perplexity, TokensAreWeightedNotWindowsAveraged) {
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  const auto tokens = some_tokens(40);  // windows of 32 and 8
  const Perplexity whole = perplexity(model, tokens, {32, 0, 0, false}, "text");
  const Perplexity first =
      perplexity(model, std::span(tokens).first(32), {32, 0, 0, false}, "text");
  const Perplexity second = perplexity(model, std::span(tokens).last(8), {32, 0, 0, false}, "text");
  EXPECT_EQ(whole.scored, 31 + 7);
  EXPECT_NEAR(whole.nll, first.nll + second.nll, 1e-3);
  EXPECT_NE(whole.value(), (first.value() + second.value()) / 2);
}

TEST(Perplexity, ThreadsShareTheWindows) {
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  const auto tokens = some_tokens(32 * 11 + 5);  // two batches of four windows, three, a short one
  const int before = at::get_num_threads();
  std::vector<Perplexity> results;
  for (const int threads : {1, 2, 2, 3}) {
    at::set_num_threads(threads);
    results.push_back(perplexity(model, tokens, {32, 0, 0, false}, "text"));
  }
  at::set_num_threads(before);
  EXPECT_EQ(results[1].nll, results[2].nll) << "who took which windows must not matter";
  for (const Perplexity& result : results) {
    EXPECT_NEAR(result.nll, results[0].nll, 1e-5 * results[0].nll);
    EXPECT_EQ(result.scored, 11 * 31 + 4);
    EXPECT_EQ(result.read, 32 * 11 + 5);
    EXPECT_EQ(result.windows, 12);
  }
}

TEST(Perplexity, EqualsTheReferenceLoss) {
  const auto expected = read_tensors(kModels / "llama/expected.safetensors");
  TempFolder folder;
  const at::Tensor ids = expected.at("input_ids")[0].to(at::kInt).contiguous();
  const std::span<const std::int32_t> tokens(ids.const_data_ptr<std::int32_t>(),
                                             static_cast<std::size_t>(ids.size(0)));
  const Perplexity result =
      perplexity(golden_model(folder / "m"), tokens, {64, 0, 0, false}, "text");
  EXPECT_NEAR(result.nll / static_cast<double>(result.scored), expected.at("loss").item<double>(),
              1e-5);
}

TEST(Perplexity, WhatCannotBeScoredIsSaid) {
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  EXPECT_GRAFT_ERROR(perplexity(model, {}, {16, 0, 0, false}, "empty.txt"), ErrorKind::input,
                     AllOf(HasSubstr("'empty.txt'"), HasSubstr("0 tokens")));
  EXPECT_GRAFT_ERROR(perplexity(model, some_tokens(1), {16, 0, 0, false}, "one.txt"),
                     ErrorKind::input, HasSubstr("at least 2"));
  EXPECT_GRAFT_ERROR(perplexity(model, some_tokens(9), {1, 0, 0, false}, "t"), ErrorKind::usage,
                     HasSubstr("eval.context is 1"));
  EXPECT_GRAFT_ERROR(perplexity(model, some_tokens(9), {4, 0, 5, false}, "t"), ErrorKind::usage,
                     HasSubstr("eval.stride is 5"));
}

TEST(Perplexity, TheProtocolNamesCountsContextStrideAndBos) {
  Perplexity result;
  result.windows = 16;
  result.scored = 8176;
  EXPECT_EQ(protocol({512, 16, 0, false}, result),
            "16 consecutive windows of 512 tokens, stride 512, no BOS, each from an empty state; "
            "8176 tokens scored, each once");
}

// ---- generation

TEST(Generate, GreedyEqualsRepeatedFullForwards) {
  c10::InferenceMode inference;
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  const auto prompt = some_tokens(6);
  const GenerateReport report = generate(model, prompt, 20, {}, {}, /*ignore_stop=*/true);
  ASSERT_EQ(report.ids.size(), 20u);
  std::vector<std::int64_t> all(prompt.begin(), prompt.end());
  for (const std::int32_t id : report.ids) {
    const at::Tensor ids = at::tensor(all, at::kLong).unsqueeze(0);
    EXPECT_EQ(id, model.logits(model.hidden(ids).select(1, -1)).argmax(-1).item<std::int64_t>());
    all.push_back(id);
  }
}

// Left padding: a prompt among others, or alone in a batch, goes on as it does by itself.
TEST(Generate, ABatchOfUnequalPromptsGivesWhatEachGivesAlone) {
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  const std::vector<std::vector<std::int32_t>> prompts = {some_tokens(7), some_tokens(1),
                                                          some_tokens(12), some_tokens(7)};
  for (const SampleOptions& options :
       {SampleOptions{}, SampleOptions{.temperature = 0.8, .seed = 3}}) {
    const auto reports = generate_batch(model, prompts, 9, options, /*ignore_stop=*/true);
    ASSERT_EQ(reports.size(), prompts.size());
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const auto alone = generate(model, prompts[i], 9, options, {}, true).ids;
      EXPECT_EQ(reports[i].ids, alone) << "prompt " << i;
      EXPECT_EQ(generate_batch(model, {prompts[i]}, 9, options, true)[0].ids, alone);
    }
  }
  EXPECT_TRUE(generate_batch(model, {}, 9, {}).empty());
  EXPECT_GRAFT_ERROR(generate_batch(model, {some_tokens(2), {}}, 9, {}), ErrorKind::usage,
                     HasSubstr("has no tokens"));
}

TEST(Generate, ARowOfABatchThatStopsLeavesTheOthersAlone) {
  TempFolder folder;
  const Model free = golden_model(folder / "free");
  const auto ids = generate(free, some_tokens(6), 8, {}, {}, true).ids;
  ModelFiles files = ModelFiles::golden("llama");
  files.config["eos_token_id"] = nlohmann::json::array({ids[3]});
  files.write(folder / "stops");
  const Model stops(std::make_shared<const Backbone>(Backbone::load(folder / "stops")));
  const std::vector<std::vector<std::int32_t>> prompts = {some_tokens(6), some_tokens(3)};
  const auto reports = generate_batch(stops, prompts, 8, {});
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const GenerateReport alone = generate(stops, prompts[i], 8, {});
    EXPECT_EQ(reports[i].ids, alone.ids);
    EXPECT_EQ(reports[i].stopped, alone.stopped);
  }
  EXPECT_TRUE(reports[0].stopped);
}

TEST(Generate, NothingIsCarriedFromOneRequestToTheNext) {
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  const auto a = some_tokens(9), b = some_tokens(4);
  const auto tokens = some_tokens(100);
  const double before = perplexity(model, tokens, {32, 0, 0, false}, "t").nll;
  const auto first = generate(model, a, 12, {.temperature = 0.8, .seed = 4}).ids;
  generate(model, b, 12, {});
  EXPECT_EQ(generate(model, a, 12, {.temperature = 0.8, .seed = 4}).ids, first);
  EXPECT_EQ(perplexity(model, tokens, {32, 0, 0, false}, "t").nll, before);
}

TEST(Generate, StopsAtAStopTokenAndWhenTheCallerSays) {
  TempFolder folder;
  const Model free = golden_model(folder / "free");
  const auto ids = generate(free, some_tokens(6), 8, {}, {}, true).ids;
  ModelFiles files = ModelFiles::golden("llama");
  files.config["eos_token_id"] = nlohmann::json::array({ids[3]});
  files.write(folder / "stops");
  const Model stops(std::make_shared<const Backbone>(Backbone::load(folder / "stops")));
  const GenerateReport report = generate(stops, some_tokens(6), 8, {});
  EXPECT_TRUE(report.stopped);
  const auto first = std::find(ids.begin(), ids.end(), ids[3]);
  EXPECT_EQ(report.ids, std::vector<std::int32_t>(ids.begin(), first));
  int seen = 0;
  EXPECT_EQ(generate(
                free, some_tokens(6), 8, {}, [&](std::int32_t) { return ++seen < 3; }, true)
                .ids.size(),
            3u);
}

TEST(Generate, ABatchEndsWhenTheCallerSays) {
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  bool stop = false;
  int asked = 0;
  const auto reports = generate_batch(model, {some_tokens(4), some_tokens(4)}, 50, {}, true, [&] {
    stop = stop || ++asked == 5;
    return stop;
  });
  ASSERT_EQ(reports.size(), 2u);
  for (const GenerateReport& report : reports) EXPECT_LE(report.ids.size(), 4u);
}

TEST(TokenSampler, ATemperatureNearZeroIsGreedy) {
  const at::Tensor logits = at::tensor({-3.0f, 90.0f, 89.5f, 90.0f});
  for (const double temperature : {1e-310, 1e-30, 1e-4})
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const auto id = TokenSampler({.temperature = temperature, .seed = seed}).pick(logits);
      EXPECT_TRUE(id == 1 || id == 3) << temperature << ": " << id;
    }
}

TEST(Generate, BadOptionsAreNamed) {
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  EXPECT_GRAFT_ERROR(generate(model, {}, 4, {}), ErrorKind::usage,
                     HasSubstr("prompt has no tokens"));
  EXPECT_GRAFT_ERROR(TokenSampler({.temperature = -1}), ErrorKind::usage,
                     HasSubstr("temperature is -1"));
  EXPECT_GRAFT_ERROR(TokenSampler({.temperature = 1, .top_p = 0}), ErrorKind::usage,
                     HasSubstr("top-p is 0"));
  EXPECT_GRAFT_ERROR(TokenSampler({.temperature = 1, .top_k = -2}), ErrorKind::usage,
                     HasSubstr("top-k is -2"));
}

TEST(TokenSampler, FollowsTheDistributionWithinTopKAndTopP) {
  const at::Tensor logits =
      at::tensor({0.0, std::log(2.0), std::log(5.0), std::log(2.0)});  // .1 .2 .5 .2
  const auto counts = [&](const SampleOptions& options) {
    TokenSampler sampler(options);
    std::vector<int> count(4);
    for (int i = 0; i < 4000; ++i) ++count[static_cast<std::size_t>(sampler.pick(logits))];
    return count;
  };
  const auto all = counts({.temperature = 1});
  EXPECT_NEAR(all[0], 400, 80);
  EXPECT_NEAR(all[2], 2000, 130);
  const auto top_k = counts({.temperature = 1, .top_k = 1});
  EXPECT_EQ(top_k[2], 4000);
  const auto top_p = counts({.temperature = 1, .top_p = 0.65});
  EXPECT_EQ(top_p[0], 0);
  EXPECT_EQ(top_p[3], 0) << "equal probabilities: the lower id comes first";
  EXPECT_NEAR(top_p[2], 4000 * 5.0 / 7.0, 130);
  EXPECT_EQ(TokenSampler({}).pick(logits), 2);
}

// ---- agreement

TEST(Agreement, AModelAgreesWithItself) {
  TempFolder folder;
  const Model model = golden_model(folder / "m");
  const at::Tensor prompts = spread_prompts(some_tokens(400), 64, 5, 12, "text");
  EXPECT_EQ(prompts.sizes(), (std::vector<std::int64_t>{5, 12}));
  const Agreement result = agreement(model, continue_greedily(model, prompts, 9));
  EXPECT_EQ(result.greedy, 1.0);
  EXPECT_EQ(result.forced, 1.0);
}

TEST(Agreement, AConstantModelAgreesByChanceAlone) {
  TempFolder folder;
  const Model teacher = golden_model(folder / "m"),
              constant = uniform_model(folder / "u");  // always says token 0
  const auto continuations =
      continue_greedily(teacher, spread_prompts(some_tokens(400), 0, 4, 10, "text"), 8);
  const double zeros = continuations.continuations.eq(0).to(at::kDouble).mean().item<double>();
  const Agreement result = agreement(constant, continuations);
  EXPECT_EQ(result.greedy, zeros);
  EXPECT_EQ(result.forced, zeros);
}

TEST(Agreement, PromptsBeginWhereSaid) {
  const auto tokens = some_tokens(400);
  const at::Tensor prompts = spread_prompts(tokens, 64, 5, 12, "text");
  const std::vector<std::int64_t> starts = prompt_starts(400, 64, 5, 12, "text");
  ASSERT_EQ(starts.size(), 5u);
  EXPECT_EQ(starts.front(), 64);
  for (std::size_t i = 0; i < starts.size(); ++i)
    EXPECT_EQ(prompts[static_cast<std::int64_t>(i)][0].item<std::int64_t>(),
              tokens[static_cast<std::size_t>(starts[i])]);
}

TEST(Agreement, PromptsNeedEnoughText) {
  EXPECT_GRAFT_ERROR(spread_prompts(some_tokens(30), 0, 4, 10, "short.txt"), ErrorKind::input,
                     AllOf(HasSubstr("'short.txt'"), HasSubstr("30 tokens"), HasSubstr("need 40"),
                           HasSubstr("(agreement.prompts, agreement.prompt_length)")));
}

}  // namespace
}  // namespace graft
