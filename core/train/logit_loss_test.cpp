#include "core/train/logit_loss.h"

#include <cmath>
#include <fstream>
#include <sstream>

#include "core/student/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// The model "llama" with another vocabulary, tied or not, of random numbers.
Backbone model_of(const std::filesystem::path& folder, std::int64_t vocabulary, bool tied,
                  std::uint64_t seed, Compute compute = Compute::float32) {
  ModelFiles files = ModelFiles::golden("llama");
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto random = [&] { return at::randn({vocabulary, 64}, generator) * 0.3; };
  files.config["vocab_size"] = vocabulary;
  files.config["tie_word_embeddings"] = tied;
  files.tensors["model.embed_tokens.weight"] = random();
  files.tensors.erase("lm_head.weight");
  if (!tied) files.tensors["lm_head.weight"] = random();
  files.write(folder);
  return Backbone::load(folder, {compute, {}, {}});
}

class LogitLossTest : public testing::Test {
 protected:
  static constexpr std::int64_t kVocabulary = 320;
  LogitLossTest()
      : student_(model_of(folder_ / "student", kVocabulary, false, 1)),
        teacher_(model_of(folder_ / "teacher", kVocabulary, true, 2)) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(3);
    input_.student_rows = at::randn({2, 9, 64}, generator).requires_grad_();
    input_.teacher_rows = at::randn({2, 9, 64}, generator);
    input_.labels = at::randint(0, kVocabulary, {2, 9}, generator, at::kLong);
    input_.student = &student_;
    input_.teacher = &teacher_;
  }

  const Objective* objective(const std::string& name,
                             const std::map<std::string, OptionValue>& options = {}) {
    return made_.emplace_back(plugins_.registry().create_objective(name, options)).get();
  }
  std::vector<WeightedObjective> kl_and_cross_entropy() {
    return {{objective("kl"), "kl", 0.75}, {objective("cross_entropy"), "ce", 0.5}};
  }
  at::Tensor& projection() { return student_.parameters().at("lm_head.weight").value; }

  struct Gradients {
    double loss = 0;
    std::map<std::string, double> parts;
    double tokens = 0;
    at::Tensor rows, projection;
  };
  // The blockwise loss and what it leaves in the leaves.
  Gradients run(const LogitLossInput& input, const std::vector<WeightedObjective>& terms,
                double denominator = 0) {
    clear();
    const LogitLoss loss = logit_loss(input, terms, denominator);
    loss.loss.backward();
    return {loss.loss.item<double>(), loss.parts, loss.tokens, input.student_rows.grad().clone(),
            projection().grad().defined() ? projection().grad().clone() : at::Tensor()};
  }
  // The same without blocks or plugins, by LibTorch's autograd in float64.
  Gradients unblocked(const LogitLossInput& input, const at::Tensor& counts,
                      const at::Tensor& weight) {
    const at::Tensor h = input.student_rows.detach().to(at::kDouble).requires_grad_();
    const at::Tensor w = projection().detach().to(at::kDouble).requires_grad_();
    const at::Tensor log_q = at::linear(h, w).log_softmax(-1);
    const at::Tensor log_p =
        at::linear(input.teacher_rows.to(at::kDouble),
                   teacher_.parameters().at("model.embed_tokens.weight").value.to(at::kDouble))
            .log_softmax(-1);
    const at::Tensor share = counts.to(at::kDouble) * weight.to(at::kDouble);
    const at::Tensor kl = ((log_p.exp() * (log_p - log_q)).sum(-1) * share).sum() / share.sum();
    const at::Tensor label = input.labels.clamp_min(0).unsqueeze(-1);
    const at::Tensor ce = -(log_q.gather(-1, label).squeeze(-1) * share).sum() / share.sum();
    const at::Tensor loss = 0.75 * kl + 0.5 * ce;
    loss.backward();
    return {loss.item<double>(),
            {{"kl", kl.item<double>()}, {"ce", ce.item<double>()}},
            share.sum().item<double>(),
            h.grad(),
            w.grad()};
  }
  void clear() {
    input_.student_rows.mutable_grad().reset();
    projection().mutable_grad().reset();
  }
  static std::int64_t bytes_for_rows(std::int64_t rows) { return rows * kVocabulary * 4 * 4; }

  TempFolder folder_;
  BuiltPlugins plugins_;
  Backbone student_, teacher_;
  LogitLossInput input_;
  std::vector<std::shared_ptr<Objective>> made_;
};

TEST_F(LogitLossTest, EqualsTheUnblockedLossAndItsGradientsAtEachBlockSize) {
  projection().requires_grad_(true);
  const auto terms = kl_and_cross_entropy();
  const Gradients exact = unblocked(input_, at::ones({2, 9}), at::ones({2, 9}));
  for (const std::int64_t rows : {1, 2, 5, 17, 18, 19, 1000}) {
    input_.block_bytes = bytes_for_rows(rows);
    const Gradients got = run(input_, terms);
    EXPECT_NEAR(got.loss, exact.loss, 1e-5) << rows;
    EXPECT_NEAR(got.parts.at("kl"), exact.parts.at("kl"), 1e-5) << rows;
    EXPECT_NEAR(got.parts.at("ce"), exact.parts.at("ce"), 1e-5) << rows;
    EXPECT_EQ(got.parts.size(), 2u);
    EXPECT_EQ(got.tokens, 18);
    EXPECT_EQ(got.rows.sizes(), input_.student_rows.sizes());
    EXPECT_LT(max_difference(got.rows, exact.rows), 1e-6) << rows;
    EXPECT_LT(max_difference(got.projection, exact.projection), 1e-6) << rows;
  }
}

TEST_F(LogitLossTest, MaskLabelsAndWeightsDecideWhatCountsForAllAlike) {
  projection().requires_grad_(true);
  at::Tensor mask = at::ones({2, 9}, at::kByte), weight = at::ones({2, 9});
  mask[0][3] = 0;
  input_.labels[1][8] = kNoLabel;
  weight[0][0] = 2.5;
  weight[1][1] = 0;
  at::Tensor counts = mask.to(at::kBool).logical_and(input_.labels != kNoLabel);
  // Never looked at.
  {
    at::NoGradGuard no_grad;
    input_.student_rows[0][3] = NAN;
    input_.teacher_rows[1][8] = NAN;
    input_.labels[0][3] = 999999;
  }
  input_.mask = mask;
  input_.token_weight = weight;
  LogitLossInput clean = input_;
  clean.student_rows = input_.student_rows.detach().nan_to_num();
  clean.teacher_rows = input_.teacher_rows.nan_to_num();
  clean.labels = input_.labels.clone();
  clean.labels[0][3] = 0;
  const Gradients exact = unblocked(clean, counts, weight);
  EXPECT_EQ(counted_tokens(input_), 2.5 + 14);
  for (const std::int64_t rows : {1, 4, 1000}) {
    input_.block_bytes = bytes_for_rows(rows);
    const Gradients got = run(input_, kl_and_cross_entropy());
    EXPECT_EQ(got.tokens, 2.5 + 14);
    EXPECT_NEAR(got.loss, exact.loss, 1e-5) << rows;
    EXPECT_LT(max_difference(got.rows, exact.rows), 1e-6) << rows;
    EXPECT_LT(max_difference(got.projection, exact.projection), 1e-6) << rows;
  }
}

TEST_F(LogitLossTest, MicroBatchesAddUpToTheStep) {
  projection().requires_grad_(true);
  const auto terms = kl_and_cross_entropy();
  const Gradients whole = run(input_, terms);
  double loss = 0;
  at::Tensor rows = at::zeros({18, 64}), weights = at::zeros_like(projection());
  for (const auto& [begin, n] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {1, 9}, {10, 8}}) {
    const auto part = [&, begin = begin, n = n](const at::Tensor& all) {
      return all.detach().flatten(0, 1).narrow(0, begin, n);
    };
    LogitLossInput micro = input_;
    micro.student_rows = part(input_.student_rows).clone().requires_grad_();
    micro.teacher_rows = part(input_.teacher_rows);
    micro.labels = part(input_.labels);
    const Gradients got = run(micro, terms, 18);
    EXPECT_EQ(got.tokens, static_cast<double>(n));
    loss += got.loss;
    rows.narrow(0, begin, n).copy_(got.rows);
    weights += got.projection;
  }
  EXPECT_NEAR(loss, whole.loss, 1e-5);
  EXPECT_LT(max_difference(rows, whole.rows.flatten(0, 1)), 1e-7);
  EXPECT_LT(max_difference(weights, whole.projection), 1e-6);
}

TEST_F(LogitLossTest, AFrozenProjectionGetsNoGradient) {
  const Gradients got = run(input_, kl_and_cross_entropy());
  EXPECT_FALSE(got.projection.defined());
  EXPECT_GT(got.rows.abs().max().item<double>(), 0);
}

TEST_F(LogitLossTest, ATiedProjectionTrainsTheEmbedding) {
  Backbone tied = model_of(folder_ / "tied", kVocabulary, true, 1);
  at::Tensor& embedding = tied.parameters().at("model.embed_tokens.weight").value;
  embedding.requires_grad_(true);
  input_.student = &tied;
  logit_loss(input_, kl_and_cross_entropy()).loss.backward();
  ASSERT_TRUE(embedding.grad().defined());
  EXPECT_GT(embedding.grad().abs().max().item<double>(), 0);
}

// The gradient arrives through a graph, scaled by what stands above the loss.
TEST_F(LogitLossTest, IsANodeOfAGraph) {
  const auto terms = kl_and_cross_entropy();
  const Gradients direct = run(input_, terms);
  const at::Tensor scale = at::ones({}).requires_grad_();
  LogitLossInput input = input_;
  input.student_rows = input_.student_rows * scale;
  clear();
  (3 * logit_loss(input, terms).loss).backward();
  EXPECT_LT(max_difference(input_.student_rows.grad(), 3 * direct.rows), 1e-6);
  EXPECT_NEAR(scale.grad().item<double>(),
              3 * (direct.rows * input_.student_rows.detach()).sum().item<double>(), 1e-4);
}

TEST_F(LogitLossTest, BackwardTwiceIsRefused) {
  const LogitLoss loss = logit_loss(input_, kl_and_cross_entropy());
  loss.loss.backward({}, /*retain_graph=*/true);
  EXPECT_GRAFT_ERROR(loss.loss.backward(), ErrorKind::internal, HasSubstr("once"));
}

TEST_F(LogitLossTest, WithoutAGraphOnlyTheLossIsComputed) {
  const Gradients with = run(input_, kl_and_cross_entropy());
  at::NoGradGuard no_grad;
  const LogitLoss without = logit_loss(input_, kl_and_cross_entropy());
  EXPECT_FALSE(without.loss.requires_grad());
  EXPECT_NEAR(without.loss.item<double>(), with.loss, 1e-6);
}

TEST_F(LogitLossTest, WeightZeroIsReportedAndTrainsNothing) {
  const auto both = kl_and_cross_entropy();
  const Gradients one = run(input_, {{both[0].objective, "kl", 0.75}});
  const Gradients with = run(input_, {both[0], {both[1].objective, "ce", 0}});
  EXPECT_EQ(with.loss, one.loss);
  EXPECT_TRUE(at::equal(with.rows, one.rows));
  EXPECT_GT(with.parts.at("ce"), 1);
}

TEST_F(LogitLossTest, ReportsWhatAnObjectiveReports) {
  const auto* const z = objective("cross_entropy", {{"z_loss", 0.01}});
  const auto* const plain = objective("cross_entropy");
  input_.block_bytes = bytes_for_rows(4);
  const Gradients got = run(input_, {{z, "z", 1}, {plain, "plain", 0}});
  EXPECT_NEAR(got.parts.at("z"), got.parts.at("plain") + got.parts.at("z.z_loss"), 1e-5);
  EXPECT_EQ(got.parts.count("z.weight"), 0u);
}

TEST_F(LogitLossTest, NoTokenThatCountsGivesZero) {
  projection().requires_grad_(true);
  input_.mask = at::zeros({2, 9}, at::kBool);
  const Gradients got = run(input_, kl_and_cross_entropy());
  EXPECT_EQ(got.loss, 0);
  EXPECT_EQ(got.tokens, 0);
  EXPECT_EQ(got.parts.at("kl"), 0);
  EXPECT_EQ(got.rows.abs().max().item<double>(), 0);
  EXPECT_EQ(got.projection.abs().max().item<double>(), 0);
}

TEST_F(LogitLossTest, ALossThatIsNotFiniteIsHandedOn) {
  {
    at::NoGradGuard no_grad;
    input_.student_rows[0][0][0] = NAN;
  }
  EXPECT_TRUE(std::isnan(run(input_, kl_and_cross_entropy()).loss));
}

TEST_F(LogitLossTest, Bfloat16ProductsGiveTheSameToTheirRounding) {
  const Gradients exact = run(input_, kl_and_cross_entropy());
  const Backbone low = model_of(folder_ / "low", kVocabulary, false, 1, Compute::bfloat16);
  input_.student = &low;
  const Gradients got = run(input_, kl_and_cross_entropy());
  EXPECT_NEAR(got.loss, exact.loss, 0.02 * exact.loss);
  EXPECT_LT(((got.rows - exact.rows).norm() / exact.rows.norm()).item<double>(), 0.05);
}

TEST_F(LogitLossTest, WrongStagesAreRefusedByName) {
  const auto* const kl = objective("kl");
  const auto* const ce = objective("cross_entropy");
  const auto* const layer = objective("layer_alignment");
  const auto refused = [&](const std::vector<WeightedObjective>& terms) {
    logit_loss(input_, terms);
  };
  EXPECT_GRAFT_ERROR(
      refused({{layer, "align", 1}}), ErrorKind::usage,
      AllOf(HasSubstr("'align' (layer_alignment) needs signal student.layer.hidden"),
            HasSubstr("the scope \"model\" gives student.logits, teacher.logits, labels")));
  EXPECT_GRAFT_ERROR(refused({{kl, "a", 1}, {ce, "a", 1}}), ErrorKind::usage,
                     HasSubstr("two objectives have the name 'a'"));
  EXPECT_GRAFT_ERROR(refused({{kl, "a", -1}}), ErrorKind::usage,
                     HasSubstr("the weight of objective 'a' is -1"));
  EXPECT_GRAFT_ERROR(refused({{kl, "a", NAN}}), ErrorKind::usage, HasSubstr("nan"));
  input_.teacher_rows = at::Tensor();
  EXPECT_GRAFT_ERROR(refused({{kl, "kl", 1}}), ErrorKind::usage,
                     AllOf(HasSubstr("teacher.logits"),
                           HasSubstr("gives student.logits, labels, loss_mask, token_weight")));
  input_.labels = at::Tensor();
  EXPECT_GRAFT_ERROR(refused({{ce, "ce", 1}}), ErrorKind::usage, HasSubstr("needs signal labels"));
}

// As if that token's own loss were 0, at each block size, one that holds nothing else included.
TEST_F(LogitLossTest, ATokenThatAnObjectiveLeavesOutAddsNothing) {
  projection().requires_grad_(true);
  input_.labels[0][2] = 7;
  for (const std::int64_t t : {0, 1, 3}) input_.labels[1][t] = 9;
  const auto* const ce = objective("cross_entropy", {});
  const auto* const leaving = objective("cross_entropy", {{"ignore_index", std::int64_t{7}}});
  const Gradients all = run(input_, {{ce, "ce", 1}});
  LogitLossInput without = input_;
  without.labels = input_.labels.clone();
  without.labels.masked_fill_(input_.labels == 7, kNoLabel);
  const Gradients rest = run(without, {{ce, "ce", 1}}, all.tokens);
  for (const std::int64_t rows : {1, 2, 5, 18, 1000}) {
    input_.block_bytes = bytes_for_rows(rows);
    const Gradients got = run(input_, {{leaving, "ce", 1}});
    EXPECT_NEAR(got.loss, rest.loss, 1e-5) << rows;
    EXPECT_NEAR(got.parts.at("ce"), rest.loss, 1e-5) << rows;
    EXPECT_EQ(got.tokens, all.tokens);
    EXPECT_LT(max_difference(got.rows, rest.rows), 1e-6) << rows;
    EXPECT_LT(max_difference(got.projection, rest.projection), 1e-6) << rows;
  }
  EXPECT_LT(rest.loss, all.loss);
}

TEST_F(LogitLossTest, LabelsOutOfRangeAreNamedByTheObjective) {
  input_.labels[0][2] = kVocabulary;
  EXPECT_GRAFT_ERROR(run(input_, kl_and_cross_entropy()), ErrorKind::plugin,
                     AllOf(HasSubstr("cross_entropy"), HasSubstr("is 320"), HasSubstr("V = 320")));
}

TEST_F(LogitLossTest, ShapesThatDoNotFitAreNamed) {
  input_.labels = at::zeros({17}, at::kLong);
  EXPECT_GRAFT_ERROR(run(input_, kl_and_cross_entropy()), ErrorKind::internal,
                     HasSubstr("labels has 17 numbers for 18 tokens"));
  input_.labels = at::Tensor();
  input_.token_weight = at::full({2, 9}, -1.0);
  EXPECT_GRAFT_ERROR(run(input_, {{objective("kl"), "kl", 1}}), ErrorKind::internal,
                     HasSubstr("token_weight"));
}

// Bytes of this process: the peak since the last clear, and what is in use now.
std::int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key + ":")) return 1024 * std::stoll(line.substr(key.size() + 1));
  throw std::runtime_error("no " + key);
}

// Whole, the logits of the student, the teacher and their gradient would take 7.5 GB.
TEST(LogitLossMemory, AVocabularyOf152kAnd4096TokensStayBelow300MB) {
  constexpr std::int64_t vocabulary = 152064, tokens = 4096;
  TempFolder folder;
  BuiltPlugins plugins;
  Backbone student = model_of(folder / "student", vocabulary, true, 1);
  at::Tensor& projection = student.parameters().at("model.embed_tokens.weight").value;
  projection.requires_grad_(true);
  projection.mutable_grad() = at::zeros_like(projection);
  const auto kl = plugins.registry().create_objective("kl");
  const auto ce = plugins.registry().create_objective("cross_entropy");
  LogitLossInput input;
  input.student_rows = at::randn({tokens, 64}).requires_grad_();
  input.teacher_rows = at::randn({tokens, 64});
  input.labels = at::randint(0, vocabulary, {tokens}, at::kLong);
  input.student = input.teacher = &student;
  const std::vector<WeightedObjective> terms = {{kl.get(), "kl", 0.5}, {ce.get(), "ce", 0.5}};
  const std::int64_t before = status_bytes("VmRSS");
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak starts anew
  const LogitLoss loss = logit_loss(input, terms);
  loss.loss.backward();
  const std::int64_t extra =
      status_bytes("VmHWM") - before - static_cast<std::int64_t>(projection.nbytes());
  RecordProperty("extra_bytes", std::to_string(extra));
  EXPECT_LT(extra, 300'000'000) << "over the inputs and the projection's gradient";
  EXPECT_NEAR(loss.parts.at("ce"), std::log(vocabulary), 4);
  EXPECT_GT(input.student_rows.grad().abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace graft
