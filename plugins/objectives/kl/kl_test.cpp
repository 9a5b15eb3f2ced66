#include "plugins/objectives/shared/testing.h"

namespace graft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PluginUnderTest& plugin() {
  static PluginUnderTest library(PLUGIN_FILE);
  return library;
}

std::shared_ptr<graft_objective> kl(const char* direction = "forward", double tau = 1) {
  return make_objective(plugin(), {{"direction", sdk::Value::of(std::string(direction))},
                                   {"tau", sdk::Value::of(tau)}});
}

constexpr const char* kDirections[] = {"forward", "reverse"};

// The README's formulas, token by token, in float64.
double divergence(const std::string& direction, double tau, const std::vector<double>& student,
                  const std::vector<double>& teacher) {
  std::vector<double> log_p = log_softmax(teacher, tau), log_q = log_softmax(student, tau);
  double most = -kInf;
  for (const double value : log_p) most = std::max(most, value);
  double sum = 0;
  for (std::size_t j = 0; j < log_p.size(); ++j) {
    if (direction == "forward") {
      if (log_p[j] > -kInf) sum += std::exp(log_p[j]) * (log_p[j] - log_q[j]);
    } else if (log_q[j] > -kInf) {
      const double p = log_p[j] == -kInf ? most - 100 : log_p[j];
      sum += std::exp(log_q[j]) * (log_q[j] - p);
    }
  }
  return tau * tau * sum;
}

double mean_divergence(const std::string& direction, double tau, const LogitCall& call) {
  double sum = 0, weights = 0;
  for (std::size_t row = 0; row < rows_of(call.student); ++row) {
    const double weight =
        (call.mask.there() ? call.mask[row] : 1) * (call.weight.there() ? call.weight[row] : 1);
    if (weight == 0) continue;
    sum += weight * divergence(direction, tau, row_of(call.student, row), row_of(call.other, row));
    weights += weight;
  }
  return weights > 0 ? sum / weights : 0;
}

LogitCall random_call(std::int64_t rows, std::int64_t vocabulary, DLDataType dtype = sdk::float32,
                      double deviation = 2) {
  const auto n = static_cast<std::size_t>(rows * vocabulary);
  LogitCall call;
  call.student = Numbers({rows, vocabulary}, normals(n, 1, deviation), dtype);
  call.other = Numbers({rows, vocabulary}, normals(n, 2, deviation), dtype);
  call.grad = Numbers::filled({rows, vocabulary}, kNan, dtype);
  return call;
}

TEST(Kl, NeedsBothLogitsAndMayUseMaskAndWeight) {
  const auto made = kl();
  std::vector<std::string> needs;
  for (uint32_t i = 0; i < made->v->n_needs; ++i) {
    const graft_signal_need& need = made->v->needs[i];
    needs.push_back(std::string(need.name) + ((need.flags & GRAFT_NEED_GRAD) != 0 ? " grad" : "") +
                    ((need.flags & GRAFT_NEED_REQUIRED) == 0 ? " optional" : ""));
  }
  EXPECT_THAT(needs, ElementsAre("student.logits grad", "teacher.logits", "loss_mask optional",
                                 "token_weight optional"));
}

// Worked by hand: p = (1/2, 1/2), q = (1/4, 3/4).
TEST(Kl, TwoTokensByHand) {
  LogitCall call;
  call.student = Numbers({1, 2}, {0, std::log(3.0)});
  call.other = Numbers({1, 2}, {5, 5});
  call.grad = Numbers::filled({1, 2}, kNan);
  ASSERT_TRUE(call.run(*kl("forward")).ok());
  EXPECT_NEAR(call.loss, 0.5 * std::log(2.0) + 0.5 * std::log(2.0 / 3.0), 1e-7);
  EXPECT_NEAR(call.grad[0], -0.25, 1e-7);
  EXPECT_NEAR(call.grad[1], 0.25, 1e-7);
  ASSERT_TRUE(call.run(*kl("reverse")).ok());
  const double reverse = 0.25 * std::log(0.5) + 0.75 * std::log(1.5);
  EXPECT_NEAR(call.loss, reverse, 1e-7);
  EXPECT_NEAR(call.grad[0], 0.25 * (std::log(0.5) - reverse), 1e-7);
  EXPECT_NEAR(call.grad[1], 0.75 * (std::log(1.5) - reverse), 1e-7);
}

// Sizes around the pieces and lanes of the loops.
TEST(Kl, IsTheFormulaAtEachSizeDirectionAndTemperature) {
  for (const std::int64_t vocabulary : {1, 2, 15, 17, 1023, 1024, 1025, 3000}) {
    for (const std::int64_t rows : {1, 3}) {
      for (const double tau : {0.5, 1.0, 4.0}) {
        for (const char* direction : kDirections) {
          LogitCall call = random_call(rows, vocabulary);
          ASSERT_TRUE(call.run(*kl(direction, tau)).ok());
          const double expected = mean_divergence(direction, tau, call);
          EXPECT_NEAR(call.loss, expected, 2e-6 * std::max(1.0, expected))
              << direction << ", V " << vocabulary << ", tau " << tau;
        }
      }
    }
  }
}

TEST(Kl, GradientIsTheSlopeOfTheFormula) {
  for (const double tau : {0.7, 1.0, 3.0}) {
    for (const char* direction : kDirections) {
      LogitCall call = random_call(3, 19);
      call.weight = Numbers({3}, {0.5, 0, 2});
      call.grad_scale = 1.5;
      ASSERT_TRUE(call.run(*kl(direction, tau)).ok());
      for (std::size_t i = 0; i < call.student.size(); ++i) {
        const double at = call.student[i], step = 1.0 / 512;
        const auto moved = [&](double x) {
          LogitCall other = call;
          other.student = Numbers(call.student.shape(), call.student.values(), sdk::float32);
          other.student.set(i, x);
          return mean_divergence(direction, tau, other);
        };
        const double slope = (moved(at + step) - moved(at - step)) / (2 * step);
        EXPECT_NEAR(call.grad[i], 1.5 * slope, 2e-5) << direction << " " << tau << " " << i;
      }
    }
  }
}

TEST(Kl, SixteenBitLogitsAreReadAndTheGradientIsWrittenInTheirFormat) {
  for (const DLDataType dtype : {sdk::bfloat16, sdk::float16}) {
    const double unit = sdk::same_dtype(dtype, sdk::bfloat16) ? 0.0079 : 0.00098;
    for (const char* direction : kDirections) {
      LogitCall call = random_call(2, 1100, dtype);
      ASSERT_TRUE(call.run(*kl(direction)).ok());
      LogitCall exact = call;
      exact.student = Numbers(call.student.shape(), call.student.values());
      exact.other = Numbers(call.other.shape(), call.other.values());
      exact.grad = Numbers::filled(call.student.shape(), kNan);
      ASSERT_TRUE(exact.run(*kl(direction)).ok());
      EXPECT_EQ(call.loss, exact.loss);
      for (std::size_t i = 0; i < call.grad.size(); ++i)
        EXPECT_NEAR(call.grad[i], exact.grad[i], unit * std::fabs(exact.grad[i]) + 1e-7);
    }
  }
}

TEST(Kl, EqualLogitsGiveExactlyNothing) {
  for (const char* direction : kDirections) {
    LogitCall call = random_call(2, 1500);
    call.other = call.student;
    ASSERT_TRUE(call.run(*kl(direction)).ok());
    EXPECT_EQ(call.loss, 0) << direction;
    for (const double g : call.grad.values()) EXPECT_NEAR(g, 0, 1e-7) << direction;
  }
}

TEST(Kl, LargeLogitsStayExact) {
  for (const char* direction : kDirections) {
    LogitCall call = random_call(4, 64, sdk::float32, 1e4);
    ASSERT_TRUE(call.run(*kl(direction)).ok());
    const double expected = mean_divergence(direction, 1, call);
    EXPECT_NEAR(call.loss, expected, 1e-6 * expected) << direction;
    for (const double g : call.grad.values()) EXPECT_TRUE(std::isfinite(g)) << direction;
  }
  LogitCall far;  // an offset shared by all logits changes nothing
  far.student = Numbers({1, 3}, {1e4, 1e4 + 1, 1e4 + 2});
  far.other = Numbers({1, 3}, {-1e4, -1e4, -1e4 + 3});
  ASSERT_TRUE(far.run(*kl()).ok());
  EXPECT_NEAR(far.loss, divergence("forward", 1, {0, 1, 2}, {0, 0, 3}), 1e-6);
}

TEST(Kl, TokensTheTeacherRulesOutCountNothingInForward) {
  LogitCall call = random_call(2, 1030);
  LogitCall without = random_call(2, 1030);
  for (const std::size_t j : {3u, 1029u, 1030u}) call.other.set(j, -kInf);
  ASSERT_TRUE(call.run(*kl("forward")).ok());
  EXPECT_NEAR(call.loss, mean_divergence("forward", 1, call), 1e-6);
  // p = 0 leaves the gradient q alone: the token's logit is pushed down.
  const double q = std::exp(log_softmax(row_of(call.student, 0))[3]);
  EXPECT_NEAR(call.grad[3], q / 2, 1e-7);
  // A student that rules out the same tokens is at no distance for it.
  for (const std::size_t j : {3u, 1029u, 1030u}) call.student.set(j, -kInf);
  ASSERT_TRUE(call.run(*kl("forward")).ok());
  EXPECT_TRUE(std::isfinite(call.loss));
  EXPECT_EQ(call.grad[3], 0);
}

TEST(Kl, InReverseARuledOutTokenStandsAHundredNatsBelowTheTeachersLargest) {
  for (const double tau : {1.0, 2.0}) {
    LogitCall call = random_call(2, 40);
    for (const std::size_t j : {3u, 45u}) call.other.set(j, -kInf);
    ASSERT_TRUE(call.run(*kl("reverse", tau)).ok());
    EXPECT_NEAR(call.loss, mean_divergence("reverse", tau, call), 1e-5);
    for (const double g : call.grad.values()) EXPECT_TRUE(std::isfinite(g));
    const double q = std::exp(log_softmax(row_of(call.student, 0), tau)[3]);
    EXPECT_GT(call.grad[3], tau * q / 2 * 80) << "nothing leads away from the token";
  }
}

TEST(Kl, AStudentThatRulesOutWhatTheTeacherSaysIsInfinitelyFar) {
  LogitCall call = random_call(1, 8);
  call.student.set(2, -kInf);
  ASSERT_TRUE(call.run(*kl("forward")).ok());
  EXPECT_EQ(call.loss, kInf);
  for (const double g : call.grad.values()) EXPECT_TRUE(std::isfinite(g));
}

TEST(Kl, AStudentsNaNIsTheLosss) {
  for (const char* direction : kDirections) {
    LogitCall call = random_call(2, 8);
    call.student.set(5, kNan);
    ASSERT_TRUE(call.run(*kl(direction)).ok());
    EXPECT_TRUE(std::isnan(call.loss)) << direction;
  }
}

TEST(Kl, TokensThatDoNotCountAreNotRead) {
  for (const char* direction : kDirections) {
    LogitCall call = random_call(4, 50);
    LogitCall alone = random_call(1, 50);
    for (std::size_t row : {1u, 2u, 3u}) {
      for (std::size_t j = 0; j < 50; ++j) {
        call.student.set(row * 50 + j, kNan);
        call.other.set(row * 50 + j, row == 1 ? kNan : -kInf);
      }
    }
    call.mask = Numbers({4}, {1, 0, 0, 1}, sdk::uint8);
    call.weight = Numbers({4}, {3, 1, kNan, 0});
    ASSERT_TRUE(call.run(*kl(direction)).ok());
    ASSERT_TRUE(alone.run(*kl(direction)).ok());
    EXPECT_EQ(call.loss, alone.loss);
    EXPECT_EQ(call.metrics["weight"], 3);
    for (std::size_t j = 0; j < 50; ++j) EXPECT_EQ(call.grad[j], alone.grad[j]);
    for (std::size_t i = 50; i < 200; ++i) EXPECT_EQ(call.grad[i], 0);
  }
}

TEST(Kl, NoTokenGivesZero) {
  LogitCall none = random_call(0, 7);
  ASSERT_TRUE(none.run(*kl()).ok());
  EXPECT_EQ(none.loss, 0);
  LogitCall masked = random_call(2, 7);
  masked.mask = Numbers({2}, {0, 0}, sdk::uint8);
  ASSERT_TRUE(masked.run(*kl()).ok());
  EXPECT_EQ(masked.loss, 0);
  EXPECT_EQ(masked.metrics["weight"], 0);
  for (const double g : masked.grad.values()) EXPECT_EQ(g, 0);
}

TEST(Kl, PartsCombineByTheirTokens) {
  LogitCall whole = random_call(10, 33);
  ASSERT_TRUE(whole.run(*kl()).ok());
  double sum = 0;
  for (const auto& [first, count] : {std::pair<std::size_t, std::size_t>{0, 1}, {1, 9}}) {
    const auto part = [&, first = first, count = count](const Numbers& of) {
      const auto all = of.values();
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first * 33);
      return Numbers({static_cast<std::int64_t>(count), 33},
                     {begin, begin + static_cast<std::ptrdiff_t>(count * 33)});
    };
    LogitCall call;
    call.student = part(whole.student);
    call.other = part(whole.other);
    call.grad = Numbers::filled(call.student.shape(), kNan);
    call.grad_scale = static_cast<double>(count) / 10;
    ASSERT_TRUE(call.run(*kl()).ok());
    sum += call.loss * static_cast<double>(count) / 10;
    for (std::size_t i = 0; i < call.grad.size(); ++i)
      EXPECT_NEAR(call.grad[i], whole.grad[first * 33 + i], 1e-8);
  }
  EXPECT_NEAR(sum, whole.loss, 1e-6);
}

TEST(Kl, WithoutAGradientOnlyTheLossIsWritten) {
  LogitCall call = random_call(2, 9);
  ASSERT_TRUE(call.run(*kl()).ok());
  const double loss = call.loss;
  call.grad = Numbers();
  ASSERT_TRUE(call.run(*kl()).ok());
  EXPECT_EQ(call.loss, loss);
}

TEST(Kl, AVocabularyOf152kOnOneThreadAndOnThreeGivesTheSameBytes) {
  LogitCall one = random_call(5, 152064), three = one;
  ASSERT_TRUE(one.run(*kl()).ok());
  EXPECT_NEAR(one.loss, mean_divergence("forward", 1, one), 1e-5);
  plugin().parallel = three_threads();
  const Outcome outcome = three.run(*kl());
  plugin().parallel = nullptr;
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(one.loss, three.loss);
  EXPECT_EQ(one.grad.values(), three.grad.values());
}

TEST(Kl, EndsWhenTheUserWantsToStop) {
  LogitCall call = random_call(2, 9);
  plugin().stop = true;
  const Outcome outcome = call.run(*kl());
  plugin().stop = false;
  EXPECT_EQ(outcome.status, GRAFT_CANCELLED);
}

struct Wrong {
  const char* where;
  const char* message;
  void (*spoil)(LogitCall&);
};

TEST(Kl, WrongTensorsAreNamedAndTheInstanceLivesOn) {
  const Wrong wrongs[] = {
      {"tensor:student.logits", "is missing (NULL)", [](LogitCall& c) { c.student = Numbers(); }},
      {"tensor:teacher.logits", "is missing (NULL)", [](LogitCall& c) { c.other = Numbers(); }},
      {"tensor:teacher.logits", "expected shape [2, 3, 4], got [6, 4]",
       [](LogitCall& c) {
         c.other = Numbers::filled({6, 4}, 0);
       }},
      {"tensor:student.logits", "expected float32, bfloat16 or float16, got float64",
       [](LogitCall& c) {
         c.student = Numbers::filled({2, 3, 4}, 0, sdk::float64);
       }},
      {"tensor:student.logits", "has a vocabulary of no tokens",
       [](LogitCall& c) {
         c.student = Numbers::filled({2, 3, 0}, 0);
         c.other = Numbers::filled({2, 3, 0}, 0);
       }},
      {"tensor:loss_mask", "expected shape [2, 3], got [3, 2]",
       [](LogitCall& c) {
         c.mask = Numbers::filled({3, 2}, 1, sdk::uint8);
       }},
      {"tensor:loss_mask", "expected dtype uint8, got float32",
       [](LogitCall& c) {
         c.mask = Numbers::filled({2, 3}, 1);
       }},
      {"tensor:token_weight", "the weight at [1, 2] is -1",
       [](LogitCall& c) {
         c.weight = Numbers({2, 3}, {1, 1, 1, 1, 1, -1});
       }},
      {"tensor:token_weight", "the weight at [0, 1] is inf",
       [](LogitCall& c) {
         c.weight = Numbers({2, 3}, {1, kInf, 1, 1, 1, 1});
       }},
      {"tensor:grad", "expected shape [2, 3, 4], got [24]",
       [](LogitCall& c) { c.grad = Numbers::filled({24}, 0); }},
      {"tensor:teacher.logits", "the logits at [1, 0] have the maximum -inf",
       [](LogitCall& c) {
         for (std::size_t j = 12; j < 16; ++j) c.other.set(j, -kInf);
       }},
      {"tensor:teacher.logits", "the logits at [0, 0] have the maximum inf",
       [](LogitCall& c) { c.other.set(1, kInf); }},
  };
  const auto made = kl();
  const auto good = [] {
    LogitCall call;
    call.student = Numbers({2, 3, 4}, normals(24, 1));
    call.other = Numbers({2, 3, 4}, normals(24, 2));
    call.grad = Numbers::filled({2, 3, 4}, kNan);
    return call;
  };
  for (const Wrong& wrong : wrongs) {
    LogitCall call = good();
    wrong.spoil(call);
    const Outcome outcome = call.run(*made);
    EXPECT_EQ(outcome.status, GRAFT_INVALID_ARGUMENT) << wrong.message;
    EXPECT_EQ(outcome.where, wrong.where);
    EXPECT_THAT(outcome.message, HasSubstr(wrong.message));
    EXPECT_TRUE(good().run(*made).ok());
  }
}

}  // namespace
}  // namespace graft::testing
