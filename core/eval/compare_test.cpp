#include "core/eval/compare.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/eval/perplexity.h"
#include "core/eval/predictions.h"
#include "core/student/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// The tiny teacher with a context long enough for its cache to grow.
std::filesystem::path make_teacher(const std::filesystem::path& folder) {
  make_tiny_teacher(folder);
  auto config = read_json(folder / "config.json");
  config["max_position_embeddings"] = 1024;
  write_file_atomically(folder / "config.json", config.dump());
  return folder;
}

class CompareTest : public testing::Test {
 protected:
  CompareTest()
      : teacher_folder_(make_teacher(folder_ / "teacher")),
        backbone_(std::make_shared<const Backbone>(Backbone::load(teacher_folder_))),
        teacher_(backbone_),
        tokenizer_(Tokenizer::from_file(teacher_folder_ / "tokenizer.json")),
        tokens_(tokenizer_.encode(made_up_prose(5, 3000))) {
    options_.context = 40;
    options_.windows = 5;
    options_.prompts = 3;
    options_.prompt_length = 8;
    options_.continuation = 6;
    options_.needle = {{200, 240}, {0, 0.5, 1}, 2};
    options_.speed_contexts = {16, 600};
    options_.speed_tokens = 3;
  }

  Model student() {
    Model::Mixers mixers;
    for (std::int64_t layer : {0, 1})
      mixers[layer] = std::make_shared<TokenMixer>(
          plugins_.registry().create_mixer("gdn", backbone_->layer_info(layer).c_info()), 1);
    return Model(backbone_, mixers);
  }
  Comparison comparison() const {
    return Comparison(teacher_, tokenizer_, tokens_, "text", options_);
  }

  TempFolder folder_;
  BuiltPlugins plugins_;
  std::filesystem::path teacher_folder_;
  std::shared_ptr<const Backbone> backbone_;
  Model teacher_;
  Tokenizer tokenizer_;
  std::vector<std::int32_t> tokens_;
  CompareOptions options_;
};

TEST_F(CompareTest, ATeacherIsItself) {
  const ModelFigures same = comparison().measure(teacher_, "teacher");
  EXPECT_EQ(same.name, "teacher");
  EXPECT_NEAR(same.kl, 0, 1e-9);
  EXPECT_EQ(same.agreement, 1);
  EXPECT_EQ(same.greedy, std::vector<double>(6, 1.0));
  for (const PositionBucket& bucket : same.bits_lost) EXPECT_EQ(bucket.bits_lost, 0);
}

// By the plainest way: all logits of all windows at once, in float64.
TEST_F(CompareTest, FiguresOfAStudentAreThoseOfTheirDefinition) {
  const Model other = student();
  const ModelFigures got = comparison().measure(other, "student");
  at::NoGradGuard no_grad;
  at::Tensor ids = at::empty({5, 40}, at::kLong);
  for (std::int64_t i = 0; i < 200; ++i)
    ids.data_ptr<std::int64_t>()[i] = tokens_[static_cast<std::size_t>(i)];
  const auto log_probs = [&](const Model& model) {
    return model.logits(model.hidden(ids)).narrow(1, 0, 39).to(at::kDouble).log_softmax(-1);
  };
  const at::Tensor log_p = log_probs(teacher_), log_q = log_probs(other);
  const at::Tensor label = ids.narrow(1, 1, 39).unsqueeze(-1);
  const at::Tensor lost = (log_p - log_q).gather(-1, label).squeeze(-1) / std::log(2.0);
  EXPECT_NEAR(got.kl, (log_p.exp() * (log_p - log_q)).sum(-1).mean().item<double>(), 1e-5);
  EXPECT_NEAR(got.agreement,
              log_p.argmax(-1).eq(log_q.argmax(-1)).to(at::kDouble).mean().item<double>(), 1e-9);
  EXPECT_NEAR(got.perplexity / std::exp(-log_q.gather(-1, label).mean().item<double>()), 1, 1e-5);
  // Positions 1, 2-3, 4-7, 8-15, 16-31 and the rest.
  ASSERT_EQ(got.bits_lost.size(), 6u);
  EXPECT_EQ(got.bits_lost[5].first, 32);
  EXPECT_EQ(got.bits_lost[5].last, 39);
  for (const PositionBucket& bucket : got.bits_lost)
    EXPECT_NEAR(
        bucket.bits_lost,
        lost.narrow(1, bucket.first - 1, bucket.last - bucket.first + 1).mean().item<double>(),
        1e-4);
  EXPECT_NEAR(got.perplexity / perplexity(other, tokens_, {40, 5, 0, false}, "text").value(), 1,
              1e-5);
  EXPECT_EQ(got.greedy.size(), 6u);
}

TEST_F(CompareTest, TheStateOfALinearStudentDoesNotGrow) {
  const Comparison compared = comparison();
  const ModelFigures linear = compared.measure(student(), "student");
  const ModelFigures attention = compared.measure(teacher_, "teacher");
  ASSERT_EQ(linear.speed.size(), 2u);
  EXPECT_EQ(linear.speed[0].state_bytes, linear.speed[1].state_bytes);
  EXPECT_LT(attention.speed[0].state_bytes, attention.speed[1].state_bytes);
  EXPECT_GT(linear.speed[0].decode_per_second, 0);
}

TEST_F(CompareTest, MistakesAreNamed) {
  const auto refused = [&] { comparison(); };
  options_.context = 1025;
  EXPECT_GRAFT_ERROR(refused(), ErrorKind::usage,
                     HasSubstr("eval.context: 1025 tokens are more than the teacher's context of "
                               "1024"));
  options_.context = 40;
  options_.speed_contexts = {1022};
  EXPECT_GRAFT_ERROR(refused(), ErrorKind::usage, HasSubstr("speed.contexts"));
  options_.speed_contexts = {};
  options_.needle.lengths = {50};
  EXPECT_GRAFT_ERROR(refused(), ErrorKind::usage,
                     HasSubstr("needle.lengths: 50 tokens have no room"));
  options_.needle.lengths = {};
  tokens_.resize(30);
  EXPECT_GRAFT_ERROR(refused(), ErrorKind::input,
                     AllOf(HasSubstr("'text' has 30 tokens"), HasSubstr("needs 40")));
}

TEST_F(CompareTest, AnotherVocabularyIsRefused) {
  ModelFiles files = ModelFiles::golden("llama");
  files.config["vocab_size"] = 300;
  for (const char* name : {"lm_head.weight", "model.embed_tokens.weight"})
    files.tensors[name] = files.tensors[name].narrow(0, 0, 300).contiguous();
  files.write(folder_ / "small");
  const Model other(std::make_shared<const Backbone>(Backbone::load(folder_ / "small")));
  EXPECT_GRAFT_ERROR(comparison().measure(other, "small"), ErrorKind::input,
                     AllOf(HasSubstr("'small' has a vocabulary of 300"), HasSubstr("320")));
}

TEST_F(CompareTest, JsonHoldsEveryFigure) {
  const ModelFigures figures = comparison().measure(teacher_, "teacher");
  const auto json = nlohmann::json::parse(to_json({figures}, options_, {{"text", "t"}}));
  const auto& model = json.at("models").at(0);
  EXPECT_EQ(model.at("name"), "teacher");
  EXPECT_EQ(model.at("greedy_by_position").size(), 6u);
  EXPECT_EQ(model.at("needle").size(), 6u);
  EXPECT_EQ(model.at("speed").at(1).at("context"), 600);
  EXPECT_EQ(json.at("protocol").at("text"), "t");
}

// ---------------------------------------------------------------- needles

TEST_F(CompareTest, NeedlesStandWhereTheyShould) {
  const auto cases = make_needles(tokenizer_, tokens_, options_.needle, 256);
  ASSERT_EQ(cases.size(), 6u);
  for (const NeedleCase& needles : cases) {
    ASSERT_EQ(needles.ids.sizes(), (at::IntArrayRef{2, needles.length}));
    std::string numbers[2];
    for (std::int64_t trial : {0, 1}) {
      std::vector<std::int32_t> ids;
      for (std::int64_t i = 0; i < needles.length; ++i)
        ids.push_back(needles.ids[trial][i].item<std::int32_t>());
      const std::string text = tokenizer_.decode(ids);
      const auto at = text.find(" The secret number of ");
      ASSERT_NE(at, std::string::npos);
      const auto answer =
          static_cast<std::size_t>(needles.answer_begins[static_cast<std::size_t>(trial)]);
      const std::string number = text.substr(answer);  // bytes are tokens here
      numbers[trial] = number;
      EXPECT_EQ(number.size(), 6u) << "a blank and five digits";
      EXPECT_NE(text.find(" is" + number + "."), std::string::npos) << "the needle says it";
      EXPECT_TRUE(text.ends_with(" is" + number));
      const auto question = text.find(" Question: ");
      const double rest = static_cast<double>(needles.length) -
                          static_cast<double>(text.size() - question) -
                          static_cast<double>(text.find('.', at) + 1 - at);
      EXPECT_NEAR(static_cast<double>(at), needles.depth * rest, 1);
    }
    EXPECT_NE(numbers[0], numbers[1]);
  }
}

TEST_F(CompareTest, AnUntrainedModelFindsNothing) {
  const auto cases = make_needles(tokenizer_, tokens_, options_.needle, 256);
  const NeedleFigure figure = find_needles(teacher_, cases.front());
  EXPECT_EQ(figure.length, 200);
  EXPECT_EQ(figure.found, 0);
  EXPECT_GT(figure.bits, 2);
}

TEST(Predictions, BlocksAndSequencesAddUp) {
  TempFolder folder;
  const Backbone teacher = Backbone::load(make_tiny_teacher(folder / "m"));
  at::NoGradGuard no_grad;
  const at::Tensor ids =
      at::randint(0, 320, {2, 200}, at::make_generator<at::CPUGeneratorImpl>(1), at::kLong);
  const PredictionSource source{&teacher, teacher.hidden(ids)};
  const PredictionFigures both = compare_predictions(source, nullptr, ids);
  PredictionFigures sum;
  for (std::int64_t i : {0, 1})
    sum.add(
        compare_predictions({&teacher, source.rows.narrow(0, i, 1)}, nullptr, ids.narrow(0, i, 1)));
  EXPECT_EQ(both.sequences, 2);
  EXPECT_EQ(both.nll[0], 0);
  EXPECT_NEAR(both.mean_nll(), sum.mean_nll(), 1e-9);
  EXPECT_TRUE(both.kl.empty());
  const at::Tensor log_q = teacher.logits(source.rows).log_softmax(-1);
  EXPECT_NEAR(both.nll[150],
              -(log_q[0][149][ids[0][150]] + log_q[1][149][ids[1][150]]).item<double>(), 1e-4);
}

}  // namespace
}  // namespace graft
