#include "plugins/objectives/shared/testing.h"

namespace graft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PluginUnderTest& plugin() {
  static PluginUnderTest library(PLUGIN_FILE);
  return library;
}

std::shared_ptr<graft_objective> cross_entropy(double z_loss = 0,
                                               std::int64_t ignore_index = -100) {
  return make_objective(plugin(), {{"z_loss", sdk::Value::of(z_loss)},
                                   {"ignore_index", sdk::Value::of(ignore_index)}});
}

// The README's formula, token by token, in float64.
double mean_loss(const LogitCall& call, const std::vector<std::int64_t>& labels, double z_loss,
                 std::int64_t ignore_index = -100) {
  double sum = 0, weights = 0;
  for (std::size_t row = 0; row < labels.size(); ++row) {
    const double weight =
        (call.mask.there() ? call.mask[row] : 1) * (call.weight.there() ? call.weight[row] : 1);
    if (weight == 0 || labels[row] == ignore_index) continue;
    const auto logits = row_of(call.student, row);
    const auto log_q = log_softmax(logits);
    const double log_z = logits[0] - log_q[0];
    sum += weight * (-log_q[static_cast<std::size_t>(labels[row])] + z_loss * log_z * log_z);
    weights += weight;
  }
  return weights > 0 ? sum / weights : 0;
}

Numbers numbers_of(const std::vector<std::int64_t>& labels) {
  std::vector<double> values(labels.begin(), labels.end());
  return {{static_cast<std::int64_t>(labels.size())}, values, sdk::int64};
}

LogitCall random_call(const std::vector<std::int64_t>& labels, std::int64_t vocabulary,
                      DLDataType dtype = sdk::float32, double deviation = 2) {
  const auto rows = static_cast<std::int64_t>(labels.size());
  LogitCall call;
  call.student =
      Numbers({rows, vocabulary},
              normals(labels.size() * static_cast<std::size_t>(vocabulary), 1, deviation), dtype);
  call.other = numbers_of(labels);
  call.grad = Numbers::filled({rows, vocabulary}, kNan, dtype);
  return call;
}

TEST(CrossEntropy, NeedsLogitsAndLabelsAndMayUseMaskAndWeight) {
  const auto made = cross_entropy();
  std::vector<std::string> needs;
  for (uint32_t i = 0; i < made->v->n_needs; ++i) {
    const graft_signal_need& need = made->v->needs[i];
    needs.push_back(std::string(need.name) + ((need.flags & GRAFT_NEED_GRAD) != 0 ? " grad" : "") +
                    ((need.flags & GRAFT_NEED_REQUIRED) == 0 ? " optional" : ""));
  }
  EXPECT_THAT(needs, ElementsAre("student.logits grad", "labels", "loss_mask optional",
                                 "token_weight optional"));
}

// Worked by hand: q = (1/4, 3/4), label 0.
TEST(CrossEntropy, TwoTokensByHand) {
  LogitCall call;
  call.student = Numbers({1, 2}, {0, std::log(3.0)});
  call.other = numbers_of({0});
  call.grad = Numbers::filled({1, 2}, kNan);
  ASSERT_TRUE(call.run(*cross_entropy()).ok());
  EXPECT_NEAR(call.loss, std::log(4.0), 1e-7);
  EXPECT_NEAR(call.grad[0], -0.75, 1e-7);
  EXPECT_NEAR(call.grad[1], 0.75, 1e-7);
  ASSERT_TRUE(call.run(*cross_entropy(0.1)).ok());  // log Z = log 4
  EXPECT_NEAR(call.loss, std::log(4.0) + 0.1 * std::pow(std::log(4.0), 2), 1e-6);
  EXPECT_NEAR(call.grad[0], 0.25 * (1 + 0.2 * std::log(4.0)) - 1, 1e-7);
  EXPECT_NEAR(call.metrics["z_loss"], 0.1 * std::pow(std::log(4.0), 2), 1e-6);
}

// Sizes around the pieces and lanes of the loops; labels at both ends of the vocabulary.
TEST(CrossEntropy, IsTheFormulaAtEachSize) {
  for (const std::int64_t vocabulary : {1, 2, 15, 17, 1023, 1024, 1025, 3000}) {
    for (const double z_loss : {0.0, 1e-4, 0.5}) {
      const std::vector<std::int64_t> labels = {vocabulary - 1, 0, vocabulary / 2};
      LogitCall call = random_call(labels, vocabulary);
      ASSERT_TRUE(call.run(*cross_entropy(z_loss)).ok());
      const double expected = mean_loss(call, labels, z_loss);
      EXPECT_NEAR(call.loss, expected, 2e-6 * std::max(1.0, expected)) << vocabulary;
    }
  }
}

TEST(CrossEntropy, GradientIsTheSlopeOfTheFormula) {
  const std::vector<std::int64_t> labels = {4, -100, 18, 0};
  for (const double z_loss : {0.0, 0.3}) {
    LogitCall call = random_call(labels, 19);
    call.weight = Numbers({4}, {0.5, 1, 2, 0});
    call.grad_scale = 1.5;
    ASSERT_TRUE(call.run(*cross_entropy(z_loss)).ok());
    for (std::size_t i = 0; i < call.student.size(); ++i) {
      const double at = call.student[i], step = 1.0 / 512;
      const auto moved = [&](double x) {
        LogitCall other = call;
        other.student.set(i, x);
        return mean_loss(other, labels, z_loss);
      };
      const double slope = (moved(at + step) - moved(at - step)) / (2 * step);
      EXPECT_NEAR(call.grad[i], 1.5 * slope, 2e-5) << z_loss << " " << i;
    }
  }
}

TEST(CrossEntropy, SixteenBitLogitsAreReadAndTheGradientIsWrittenInTheirFormat) {
  for (const DLDataType dtype : {sdk::bfloat16, sdk::float16}) {
    const double unit = sdk::same_dtype(dtype, sdk::bfloat16) ? 0.0079 : 0.00098;
    LogitCall call = random_call({7, 1099}, 1100, dtype);
    ASSERT_TRUE(call.run(*cross_entropy()).ok());
    LogitCall exact = call;
    exact.student = Numbers(call.student.shape(), call.student.values());
    exact.grad = Numbers::filled(call.student.shape(), kNan);
    ASSERT_TRUE(exact.run(*cross_entropy()).ok());
    EXPECT_EQ(call.loss, exact.loss);
    for (std::size_t i = 0; i < call.grad.size(); ++i)
      EXPECT_NEAR(call.grad[i], exact.grad[i], unit * std::fabs(exact.grad[i]) + 1e-7);
  }
}

TEST(CrossEntropy, LargeLogitsStayExact) {
  const std::vector<std::int64_t> labels = {3, 60, 0, 8};
  LogitCall call = random_call(labels, 64, sdk::float32, 1e4);
  ASSERT_TRUE(call.run(*cross_entropy()).ok());
  const double expected = mean_loss(call, labels, 0);
  EXPECT_NEAR(call.loss, expected, 1e-6 * expected);
  for (const double g : call.grad.values()) EXPECT_TRUE(std::isfinite(g));
  LogitCall shifted;
  shifted.student = Numbers({1, 3}, {1e4, 1e4 + 1, 1e4 + 2});
  shifted.other = numbers_of({1});
  ASSERT_TRUE(shifted.run(*cross_entropy()).ok());
  EXPECT_NEAR(shifted.loss, -log_softmax({0, 1, 2})[1], 1e-6);
}

TEST(CrossEntropy, InfiniteAndNaNLogits) {
  LogitCall call = random_call({2, 3}, 8);
  call.student.set(5, -kInf);  // ruled out, not the label
  ASSERT_TRUE(call.run(*cross_entropy()).ok());
  EXPECT_NEAR(call.loss, mean_loss(call, {2, 3}, 0), 1e-6);
  EXPECT_EQ(call.grad[5], 0);
  call.student.set(2, -kInf);  // the label itself
  ASSERT_TRUE(call.run(*cross_entropy()).ok());
  EXPECT_EQ(call.loss, kInf);
  for (const double g : call.grad.values()) EXPECT_TRUE(std::isfinite(g));
  call.student.set(9, kNan);
  ASSERT_TRUE(call.run(*cross_entropy()).ok());
  EXPECT_TRUE(std::isnan(call.loss));
}

TEST(CrossEntropy, TokensThatDoNotCountAreNotRead) {
  LogitCall alone = random_call({6}, 50);
  ASSERT_TRUE(alone.run(*cross_entropy()).ok());
  // Ignored, masked with a label out of range, of weight 0.
  LogitCall call = random_call({6, -100, 999, 1}, 50);
  for (std::size_t i = 50; i < 200; ++i) call.student.set(i, kNan);
  call.mask = Numbers({4}, {1, 1, 0, 1}, sdk::uint8);
  call.weight = Numbers({4}, {3, 2, kNan, 0});
  ASSERT_TRUE(call.run(*cross_entropy()).ok());
  EXPECT_EQ(call.loss, alone.loss);
  EXPECT_EQ(call.metrics["weight"], 3);
  for (std::size_t j = 0; j < 50; ++j) EXPECT_EQ(call.grad[j], alone.grad[j]);
  for (std::size_t i = 50; i < 200; ++i) EXPECT_EQ(call.grad[i], 0);
}

TEST(CrossEntropy, AnotherIgnoreIndex) {
  LogitCall call = random_call({0, 5, 0}, 9);
  ASSERT_TRUE(call.run(*cross_entropy(0, 0)).ok());
  EXPECT_NEAR(call.loss, mean_loss(call, {0, 5, 0}, 0, 0), 1e-6);
  EXPECT_EQ(call.metrics["weight"], 1);
}

TEST(CrossEntropy, NoTokenGivesZero) {
  for (const std::vector<std::int64_t>& labels :
       {std::vector<std::int64_t>{}, std::vector<std::int64_t>{-100, -100}}) {
    LogitCall call = random_call(labels, 7);
    ASSERT_TRUE(call.run(*cross_entropy(0.1)).ok());
    EXPECT_EQ(call.loss, 0);
    EXPECT_EQ(call.metrics["weight"], 0);
    for (const double g : call.grad.values()) EXPECT_EQ(g, 0);
  }
}

// Ten tokens: one of loss 4, nine of loss 1. The mean of the parts' means would be 2.5.
TEST(CrossEntropy, MicroBatchesOfOneAndNineTokensCombineByTheirTokens) {
  const auto with_loss = [](double loss, std::size_t tokens) {
    // q[0] = exp(-loss) of two tokens
    const double other = std::log(std::expm1(loss));
    std::vector<double> logits;
    for (std::size_t i = 0; i < tokens; ++i) logits.insert(logits.end(), {0, other});
    LogitCall call;
    call.student = Numbers({static_cast<std::int64_t>(tokens), 2}, logits);
    call.other = numbers_of(std::vector<std::int64_t>(tokens, 0));
    EXPECT_TRUE(call.run(*cross_entropy()).ok());
    EXPECT_NEAR(call.loss, loss, 1e-6);
    return call;
  };
  const LogitCall one = with_loss(4, 1), nine = with_loss(1, 9);
  EXPECT_EQ(one.metrics.at("weight"), 1);
  EXPECT_EQ(nine.metrics.at("weight"), 9);
  const double whole =
      (one.loss * one.metrics.at("weight") + nine.loss * nine.metrics.at("weight")) / 10;
  EXPECT_NEAR(whole, 1.3, 1e-6);
  LogitCall both;
  std::vector<double> logits = one.student.values();
  for (const double x : nine.student.values()) logits.push_back(x);
  both.student = Numbers({10, 2}, logits);
  both.other = numbers_of(std::vector<std::int64_t>(10, 0));
  ASSERT_TRUE(both.run(*cross_entropy()).ok());
  EXPECT_NEAR(both.loss, 1.3, 1e-6);
}

TEST(CrossEntropy, AVocabularyOf152kOnOneThreadAndOnThreeGivesTheSameBytes) {
  const std::vector<std::int64_t> labels = {0, 152063, 77, -100, 1024};
  LogitCall one = random_call(labels, 152064), three = one;
  ASSERT_TRUE(one.run(*cross_entropy()).ok());
  EXPECT_NEAR(one.loss, mean_loss(one, labels, 0), 1e-5);
  plugin().parallel = three_threads();
  const Outcome outcome = three.run(*cross_entropy());
  plugin().parallel = nullptr;
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(one.loss, three.loss);
  EXPECT_EQ(one.grad.values(), three.grad.values());
}

struct Wrong {
  graft_status status;
  const char* where;
  const char* message;
  void (*spoil)(LogitCall&);
};

TEST(CrossEntropy, WrongTensorsAreNamedAndTheInstanceLivesOn) {
  const Wrong wrongs[] = {
      {GRAFT_INVALID_ARGUMENT, "tensor:student.logits", "is missing (NULL)",
       [](LogitCall& c) { c.student = Numbers(); }},
      {GRAFT_INVALID_ARGUMENT, "tensor:labels", "is missing (NULL)",
       [](LogitCall& c) { c.other = Numbers(); }},
      {GRAFT_INVALID_ARGUMENT, "tensor:labels", "expected shape [2, 3], got [3, 2]",
       [](LogitCall& c) {
         c.other = Numbers::filled({3, 2}, 0, sdk::int64);
       }},
      {GRAFT_INVALID_ARGUMENT, "tensor:labels", "expected dtype int64, got float32",
       [](LogitCall& c) {
         c.other = Numbers::filled({2, 3}, 0);
       }},
      {GRAFT_OUT_OF_RANGE, "tensor:labels",
       "the label at [1, 0] is 4; the vocabulary has tokens 0 to 3 (V = 4), and ignore_index is "
       "-100",
       [](LogitCall& c) { c.other.set(3, 4); }},
      {GRAFT_OUT_OF_RANGE, "tensor:labels", "the label at [0, 2] is -1",
       [](LogitCall& c) { c.other.set(2, -1); }},
      {GRAFT_INVALID_ARGUMENT, "tensor:token_weight", "the weight at [1, 2] is -1",
       [](LogitCall& c) {
         c.weight = Numbers({2, 3}, {1, 1, 1, 1, 1, -1});
       }},
      {GRAFT_INVALID_ARGUMENT, "tensor:grad", "expected shape [2, 3, 4], got [24]",
       [](LogitCall& c) { c.grad = Numbers::filled({24}, 0); }},
      {GRAFT_INVALID_ARGUMENT, "tensor:grad", "expected float32, bfloat16 or float16, got int64",
       [](LogitCall& c) {
         c.grad = Numbers::filled({2, 3, 4}, 0, sdk::int64);
       }},
  };
  const auto made = cross_entropy();
  const auto good = [] {
    LogitCall call;
    call.student = Numbers({2, 3, 4}, normals(24, 1));
    call.other = Numbers({2, 3}, {0, 1, 2, 3, -100, 1}, sdk::int64);
    call.grad = Numbers::filled({2, 3, 4}, kNan);
    return call;
  };
  for (const Wrong& wrong : wrongs) {
    LogitCall call = good();
    wrong.spoil(call);
    const Outcome outcome = call.run(*made);
    EXPECT_EQ(outcome.status, wrong.status) << wrong.message;
    EXPECT_EQ(outcome.where, wrong.where);
    EXPECT_THAT(outcome.message, HasSubstr(wrong.message));
    EXPECT_TRUE(good().run(*made).ok());
  }
}

TEST(CrossEntropy, AWorkspaceThatIsMissingIsNamed) {
  LogitCall call = random_call({1, 2}, 5);
  Numbers loss({1}, {0});
  const DLTensor* const signals[] = {call.student.c(), call.other.c(), nullptr, nullptr};
  DLTensor* const grads[] = {nullptr, nullptr, nullptr, nullptr};
  graft_objective_args args{};
  args.struct_size = sizeof args;
  args.n_signals = 4;
  args.signals = signals;
  args.grads = grads;
  args.loss = loss.c();
  graft_exec exec{};
  exec.struct_size = sizeof exec;
  const auto made = cross_entropy();
  const Outcome outcome =
      outcome_of([&](graft_error* error) { return made->v->run(made.get(), &exec, &args, error); });
  EXPECT_EQ(outcome.status, GRAFT_INVALID_ARGUMENT);
  EXPECT_EQ(outcome.where, "exec.workspace");
  EXPECT_THAT(outcome.message, HasSubstr("expected 32 bytes, got 0"));
}

}  // namespace
}  // namespace graft::testing
