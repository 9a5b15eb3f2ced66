#include "plugins/objectives/layer_alignment/alignment_loss.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace graft::layer_alignment {
namespace {

// The problems are tiny: threads would only wait for each other.
const bool one_thread = [] {
  at::set_num_threads(1);
  return true;
}();

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

at::Tensor randn(at::IntArrayRef shape, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble));
}

double largest(const at::Tensor& difference) { return difference.abs().max().item<double>(); }
double number(const at::Tensor& scalar) { return scalar.item<double>(); }

const AlignmentOptions kAll[] = {{Loss::mse, false}, {Loss::mse, true},     {Loss::l2, false},
                                 {Loss::l2, true},   {Loss::cosine, false}, {Loss::nmse, false}};

std::string label(const AlignmentOptions& options) {
  static constexpr const char* names[] = {"mse", "l2", "cosine", "nmse"};
  return std::string(names[static_cast<int>(options.loss)]) + (options.relative ? " relative" : "");
}

// The same losses from differentiable operations over the counted tokens only.
at::Tensor reference(const AlignmentOptions& options, const at::Tensor& student,
                     const at::Tensor& teacher, const at::Tensor& mask, const at::Tensor& weight) {
  const int64_t dim = student.size(-1);
  const at::Tensor keep = at::nonzero(mask.reshape({-1})).squeeze(1);
  const at::Tensor o = student.reshape({-1, dim}).index_select(0, keep);
  const at::Tensor y = teacher.reshape({-1, dim}).index_select(0, keep);
  const at::Tensor w = weight.reshape({-1}).index_select(0, keep);
  const at::Tensor s = w.sqrt();
  const auto distance = [](const at::Tensor& rows) { return rows.norm(2, {-1}); };
  switch (options.loss) {
    case Loss::mse: {
      const at::Tensor error = ((o - y).square().sum(-1) * w).sum();
      if (options.relative) return error / (y.square().sum(-1) * w).sum();
      return error / (w.sum() * dim);
    }
    case Loss::l2:
      if (options.relative) return (distance(o - y) * s).sum() / (distance(y) * s).sum();
      return (distance(o - y) * s).sum() / (s.sum() * std::sqrt(static_cast<double>(dim)));
    case Loss::cosine:
      return ((1 - at::cosine_similarity(o, y, -1)) * w).sum() / w.sum();
    case Loss::nmse: {
      const at::Tensor mean = (y * w.unsqueeze(1)).sum(0) / w.sum();
      return ((o - y).square().sum(-1) * w).sum() / ((y - mean).square().sum(-1) * w).sum();
    }
  }
  return {};
}

TEST(AlignmentLoss, ValueAndGradientEqualAutogradsOverAllSizes) {
  for (const AlignmentOptions& options : kAll) {
    for (const int64_t batch : {1, 3}) {
      for (const int64_t tokens : {2, 7}) {
        for (const int64_t dim : {1, 2, 65}) {
          const at::Tensor student = randn({batch, tokens, dim}, 1).requires_grad_(true);
          const at::Tensor teacher = randn({batch, tokens, dim}, 2);
          const at::Tensor weight = randn({batch, tokens}, 3).square();
          at::Tensor mask = at::ones({batch, tokens}, at::kByte);
          if (tokens > 2) mask.select(1, 1).zero_();
          const at::Tensor expected = reference(options, student, teacher, mask, weight);
          expected.backward();
          const Alignment got = align(options, student.detach(), teacher, mask, weight, true);
          EXPECT_NEAR(number(got.loss), number(expected), 1e-12) << label(options);
          EXPECT_LT(largest(got.grad - student.grad()), 1e-12) << label(options);
        }
      }
    }
  }
}

TEST(AlignmentLoss, GradientEqualsFiniteDifferences) {
  const at::Tensor teacher = randn({2, 3, 4}, 4), weight = randn({2, 3}, 5).square();
  for (const AlignmentOptions& options : kAll) {
    const at::Tensor student = randn({2, 3, 4}, 6);
    const at::Tensor grad = align(options, student, teacher, {}, weight, true).grad;
    for (int64_t i = 0; i < student.numel(); ++i) {
      constexpr double h = 1e-6;
      at::Tensor up = student.clone(), down = student.clone();
      up.view({-1})[i] += h;
      down.view({-1})[i] -= h;
      const double slope = (number(align(options, up, teacher, {}, weight, false).loss) -
                            number(align(options, down, teacher, {}, weight, false).loss)) /
                           (2 * h);
      EXPECT_NEAR(grad.reshape({-1})[i].item<double>(), slope, 1e-8) << label(options);
    }
  }
}

TEST(AlignmentLoss, WithoutMaskAndWeightAllTokensCountOnce) {
  const at::Tensor student = randn({2, 5, 6}, 7), teacher = randn({2, 5, 6}, 8);
  const at::Tensor ones = at::ones({2, 5}, at::kDouble);
  for (const AlignmentOptions& options : kAll) {
    const Alignment bare = align(options, student, teacher, {}, {}, true);
    const Alignment full = align(options, student, teacher, ones.to(at::kByte), ones, true);
    EXPECT_EQ(number(bare.loss), number(full.loss)) << label(options);
    EXPECT_EQ(largest(bare.grad - full.grad), 0.0) << label(options);
  }
}

TEST(AlignmentLoss, HandMadeValues) {
  // Errors (3, 4) and (0, 0); the teacher's tokens (1, 0) and (0, 2).
  const at::Tensor teacher = at::tensor({1.0, 0.0, 0.0, 2.0}).reshape({1, 2, 2});
  const at::Tensor student = at::tensor({4.0, 4.0, 0.0, 2.0}).reshape({1, 2, 2});
  const auto loss = [&](Loss kind, bool relative) {
    return number(align({kind, relative}, student, teacher, {}, {}, false).loss);
  };
  EXPECT_DOUBLE_EQ(loss(Loss::mse, false), 25.0 / 4);
  EXPECT_DOUBLE_EQ(loss(Loss::mse, true), 25.0 / 5);
  EXPECT_DOUBLE_EQ(loss(Loss::l2, false), 5 / std::sqrt(2.0) / 2);
  EXPECT_DOUBLE_EQ(loss(Loss::l2, true), 5.0 / 3);
  EXPECT_DOUBLE_EQ(loss(Loss::cosine, false), (1 - std::sqrt(0.5)) / 2);
  // Mean (.5, 1): spread .25 + 1 twice.
  EXPECT_DOUBLE_EQ(loss(Loss::nmse, false), 25.0 / 2.5);
}

TEST(AlignmentLoss, MaskedTokensCountForNothingWhateverTheyHold) {
  const at::Tensor clean_student = randn({1, 4, 3}, 9), clean_teacher = randn({1, 4, 3}, 10);
  const at::Tensor clean_weight = randn({1, 4}, 11).square();
  for (const double junk : {kNaN, std::numeric_limits<double>::infinity(), 1e300}) {
    at::Tensor student = at::cat({clean_student, clean_student}, 1);
    at::Tensor teacher = at::cat({clean_teacher, clean_teacher}, 1);
    at::Tensor weight = at::cat({clean_weight, clean_weight}, 1);
    student.narrow(1, 4, 4).fill_(junk);
    teacher.narrow(1, 4, 2).fill_(junk);
    weight.narrow(1, 4, 3).fill_(junk);
    at::Tensor mask = at::ones({1, 8}, at::kByte);
    mask.narrow(1, 4, 4).zero_();
    for (const AlignmentOptions& options : kAll) {
      const Alignment padded = align(options, student, teacher, mask, weight, true);
      const Alignment alone = align(options, clean_student, clean_teacher, {}, clean_weight, true);
      EXPECT_DOUBLE_EQ(number(padded.loss), number(alone.loss)) << label(options);
      EXPECT_LT(largest(padded.grad.narrow(1, 0, 4) - alone.grad), 1e-15) << label(options);
      EXPECT_EQ(largest(padded.grad.narrow(1, 4, 4)), 0.0) << label(options);
    }
  }
}

TEST(AlignmentLoss, AWeightOfZeroIsAMask) {
  const at::Tensor teacher = randn({1, 3, 2}, 12),
                   weight = at::tensor({1.0, 2.0, 0.0}).unsqueeze(0);
  at::Tensor student = randn({1, 3, 2}, 13);
  student[0][2].fill_(kNaN);
  for (const AlignmentOptions& options : kAll) {
    const Alignment got = align(options, student, teacher, {}, weight, true);
    EXPECT_TRUE(std::isfinite(number(got.loss))) << label(options);
    EXPECT_EQ(largest(got.grad[0][2]), 0.0) << label(options);
  }
}

TEST(AlignmentLoss, ANaNThatCountsIsSeen) {
  at::Tensor student = randn({1, 3, 2}, 14);
  student[0][1][0] = kNaN;
  for (const AlignmentOptions& options : kAll) {
    EXPECT_TRUE(
        std::isnan(number(align(options, student, randn({1, 3, 2}, 15), {}, {}, true).loss)));
  }
}

TEST(AlignmentLoss, NoTokenAtAllIsZero) {
  const at::Tensor none = at::zeros({1, 3}, at::kByte);
  for (const AlignmentOptions& options : kAll) {
    const Alignment masked =
        align(options, randn({1, 3, 2}, 16), randn({1, 3, 2}, 17), none, {}, true);
    EXPECT_EQ(number(masked.loss), 0.0) << label(options);
    EXPECT_EQ(largest(masked.grad), 0.0) << label(options);
    const at::Tensor empty = at::zeros({1, 0, 2}, at::kDouble);
    const Alignment nothing = align(options, empty, empty, {}, {}, true);
    EXPECT_EQ(number(nothing.loss), 0.0) << label(options);
    EXPECT_EQ(nothing.grad.sizes(), empty.sizes());
  }
}

// Micro-batches of 1 and 9 tokens give what the 10 give, combined by their denominators.
TEST(AlignmentLoss, DoesNotDependOnHowABatchIsSplit) {
  const at::Tensor student = randn({1, 10, 4}, 18), teacher = randn({1, 10, 4}, 19);
  const at::Tensor weight = randn({1, 10}, 20).square();
  for (const AlignmentOptions& options : kAll) {
    if (options.loss == Loss::nmse) continue;  // its denominator holds the batch's mean
    const Alignment whole = align(options, student, teacher, {}, weight, true);
    double numerator = 0, denominator = 0;
    std::vector<at::Tensor> grads;
    for (const auto& [from, count] : {std::pair<int64_t, int64_t>{0, 1}, {1, 9}}) {
      const Alignment part =
          align(options, student.narrow(1, from, count), teacher.narrow(1, from, count), {},
                weight.narrow(1, from, count), true);
      numerator += number(part.loss) * number(part.denominator);
      denominator += number(part.denominator);
      grads.push_back(part.grad * part.denominator);
    }
    EXPECT_NEAR(number(whole.loss), numerator / denominator, 1e-12) << label(options);
    EXPECT_LT(largest(whole.grad - at::cat(grads, 1) / denominator), 1e-12) << label(options);
  }
}

TEST(AlignmentLoss, EqualityIsAMinimumWithAFiniteGradient) {
  const at::Tensor y = randn({2, 3, 4}, 21);
  for (const AlignmentOptions& options : kAll) {
    const Alignment got = align(options, y, y, {}, {}, true);
    EXPECT_NEAR(number(got.loss), 0.0, 1e-15) << label(options);
    EXPECT_LT(largest(got.grad), 1e-14) << label(options);
  }
}

TEST(AlignmentLoss, ZeroVectorsHaveCosineZeroAndAFiniteGradient) {
  at::Tensor student = randn({1, 3, 4}, 22).to(at::kFloat),
             teacher = randn({1, 3, 4}, 23).to(at::kFloat);
  student[0][0].zero_();
  teacher[0][1].zero_();
  student[0][2].zero_();
  teacher[0][2].zero_();
  const Alignment got = align({Loss::cosine}, student, teacher, {}, {}, true);
  EXPECT_EQ(number(got.loss), 1.0);
  EXPECT_TRUE(at::isfinite(got.grad).all().item<bool>());
  // A student of zeros is pulled along the teacher.
  EXPECT_GT(-at::dot(got.grad[0][0], teacher[0][0]).item<double>(), 0.0);
  EXPECT_EQ(largest(got.grad[0][2]), 0.0);
}

TEST(AlignmentLoss, CosineDoesNotSeeTheScale) {
  const at::Tensor student = randn({1, 5, 6}, 24), teacher = randn({1, 5, 6}, 25);
  const double loss = number(align({Loss::cosine}, student, teacher, {}, {}, false).loss);
  EXPECT_NEAR(number(align({Loss::cosine}, student * 1e3, teacher * 1e-3, {}, {}, false).loss),
              loss, 1e-12);
}

TEST(AlignmentLoss, ATeacherWithoutScaleLeavesTheAbsoluteLoss) {
  const at::Tensor student = randn({1, 4, 3}, 26), zeros = at::zeros({1, 4, 3}, at::kDouble);
  for (const Loss loss : {Loss::mse, Loss::l2}) {
    EXPECT_EQ(number(align({loss, true}, student, zeros, {}, {}, false).loss),
              number(align({loss, false}, student, zeros, {}, {}, false).loss));
  }
  EXPECT_EQ(number(align({Loss::nmse}, student, zeros, {}, {}, false).loss),
            number(align({Loss::mse}, student, zeros, {}, {}, false).loss));
  // One token has no variance: its mean square stands in.
  const at::Tensor one = randn({1, 1, 3}, 27);
  EXPECT_EQ(number(align({Loss::nmse}, student.narrow(1, 0, 1), one, {}, {}, false).loss),
            number(align({Loss::mse, true}, student.narrow(1, 0, 1), one, {}, {}, false).loss));
}

TEST(AlignmentLoss, Float32AndBfloat16FollowFloat64) {
  const at::Tensor student = randn({2, 8, 64}, 28), teacher = randn({2, 8, 64}, 29);
  for (const AlignmentOptions& options : kAll) {
    for (const auto& [dtype, tolerance] :
         {std::pair{at::kFloat, 1e-6}, std::pair{at::kBFloat16, 1e-6}}) {
      const at::Tensor s = student.to(dtype), t = teacher.to(dtype);
      const Alignment exact = align(options, s.to(at::kDouble), t.to(at::kDouble), {}, {}, true);
      const Alignment got = align(options, s, t, {}, {}, true);
      EXPECT_NEAR(number(got.loss), number(exact.loss), tolerance) << label(options);
      EXPECT_EQ(got.grad.scalar_type(), at::kFloat);
      EXPECT_LT(largest(got.grad - exact.grad), tolerance) << label(options);
    }
  }
}

TEST(AlignmentLoss, LargeValuesStayFinite) {
  for (const AlignmentOptions& options : kAll) {
    const at::Tensor student = randn({1, 4, 8}, 30).to(at::kFloat) * 1e4;
    const at::Tensor teacher = randn({1, 4, 8}, 31).to(at::kFloat) * 1e4;
    const Alignment got = align(options, student, teacher, {}, {}, true);
    EXPECT_TRUE(std::isfinite(number(got.loss))) << label(options);
    EXPECT_TRUE(at::isfinite(got.grad).all().item<bool>()) << label(options);
  }
}

TEST(LossNamed, KnowsFour) {
  EXPECT_EQ(loss_named("nmse"), Loss::nmse);
  try {
    loss_named("mae");
    FAIL() << "expected an error";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "expected mse, l2, cosine or nmse, got 'mae'");
  }
}

}  // namespace
}  // namespace graft::layer_alignment
