#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plugins/testing/plugin_under_test.h"

namespace graft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Options = std::map<std::string, sdk::Value>;

PluginUnderTest& plugin() {
  static PluginUnderTest library(PLUGIN_FILE);
  return library;
}

sdk::Value text(const char* value) { return sdk::Value::of(std::string(value)); }

std::shared_ptr<graft_objective> objective(const Options& options = {}) {
  std::shared_ptr<graft_objective> made;
  const Outcome outcome =
      plugin().create<graft_objective_factory>(GRAFT_EXT_OBJECTIVE_FACTORY, options, &made);
  EXPECT_TRUE(outcome.ok()) << outcome.message;
  return made;
}

// A DLTensor over an at::Tensor that it keeps.
class Borrowed {
 public:
  Borrowed(const at::Tensor& tensor, DLDataType dtype)
      : tensor_(tensor),
        shape_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        dl_{tensor.data_ptr(),
            {kDLCPU, 0},
            static_cast<int32_t>(tensor.dim()),
            dtype,
            shape_.data(),
            strides_.data(),
            0} {}
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  DLTensor* get() { return &dl_; }

 private:
  at::Tensor tensor_;
  std::vector<int64_t> shape_, strides_;
  DLTensor dl_;
};

struct Call {
  at::Tensor student, teacher, mask, weight, grad, loss = at::full({}, -1.0, at::kFloat);
  double grad_scale = 1;
  DLDataType dtype = sdk::float32;

  Outcome run(graft_objective& objective) const {
    std::vector<std::unique_ptr<Borrowed>> kept;
    const auto borrow = [&](const at::Tensor& t, DLDataType type) -> DLTensor* {
      if (!t.defined()) return nullptr;
      return kept.emplace_back(std::make_unique<Borrowed>(t, type))->get();
    };
    const DLTensor* const signals[] = {borrow(student, dtype), borrow(teacher, dtype),
                                       borrow(mask, sdk::uint8), borrow(weight, sdk::float32)};
    DLTensor* const grads[] = {borrow(grad, dtype), nullptr, nullptr, nullptr};
    graft_objective_args args{};
    args.struct_size = sizeof args;
    args.n_signals = 4;
    args.signals = signals;
    args.grads = grads;
    args.loss = borrow(loss, sdk::float32);
    args.grad_scale = grad_scale;
    graft_exec exec{};
    exec.struct_size = sizeof exec;
    exec.device_type = kDLCPU;
    return outcome_of(
        [&](graft_error* error) { return objective.v->run(&objective, &exec, &args, error); });
  }
};

Call random_call() {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(3);
  Call call;
  call.student = at::randn({2, 3, 4}, generator);
  call.teacher = at::randn({2, 3, 4}, generator);
  call.grad = at::full({2, 3, 4}, std::nanf(""));
  return call;
}

TEST(LayerAlignment, NeedsTheTwoHiddensAndMayUseMaskAndWeight) {
  const auto made = objective();
  std::vector<std::string> needs;
  for (uint32_t i = 0; i < made->v->n_needs; ++i) {
    const graft_signal_need& need = made->v->needs[i];
    needs.push_back(std::string(need.name) + ((need.flags & GRAFT_NEED_GRAD) != 0 ? " grad" : "") +
                    ((need.flags & GRAFT_NEED_REQUIRED) == 0 ? " optional" : ""));
  }
  EXPECT_THAT(needs, ElementsAre("student.layer.hidden grad", "teacher.layer.hidden",
                                 "loss_mask optional", "token_weight optional"));
}

TEST(LayerAlignment, WritesLossAndScaledGradient) {
  Call call = random_call();
  call.grad_scale = 0.5;
  const Outcome outcome = call.run(*objective());
  ASSERT_TRUE(outcome.ok()) << outcome.message;
  const at::Tensor error = call.student - call.teacher;
  EXPECT_NEAR(call.loss.item<double>(), error.square().mean().item<double>(), 1e-6);
  EXPECT_TRUE(at::allclose(call.grad, error * (0.5 * 2 / 24)));
}

TEST(LayerAlignment, EachLossIsReachedByItsName) {
  const Call call = random_call();
  const auto loss = [&](const Options& options) {
    const Outcome outcome = call.run(*objective(options));
    EXPECT_TRUE(outcome.ok()) << outcome.message;
    return call.loss.item<double>();
  };
  const at::Tensor d = call.student - call.teacher, y = call.teacher;
  EXPECT_NEAR(loss({{"loss", text("l2")}}), d.norm(2, {-1}).mean().item<double>() / 2, 1e-6);
  EXPECT_NEAR(loss({{"loss", text("l2")}, {"relative", sdk::Value::of(true)}}),
              (d.norm(2, {-1}).mean() / y.norm(2, {-1}).mean()).item<double>(), 1e-6);
  EXPECT_NEAR(loss({{"loss", text("cosine")}}),
              1 - at::cosine_similarity(call.student, y, -1).mean().item<double>(), 1e-6);
  const at::Tensor centred = y - y.mean(at::IntArrayRef{0, 1}, true);
  EXPECT_NEAR(loss({{"loss", text("nmse")}}),
              (d.square().sum() / centred.square().sum()).item<double>(), 1e-6);
}

TEST(LayerAlignment, TakesBfloat16AndStridedTensors) {
  Call plain = random_call();
  plain.student = plain.student.to(at::kBFloat16);
  plain.teacher = plain.teacher.to(at::kBFloat16);
  plain.grad = plain.grad.to(at::kBFloat16);
  plain.dtype = sdk::bfloat16;
  ASSERT_TRUE(plain.run(*objective()).ok());
  Call strided = plain;
  strided.loss = at::zeros({}, at::kFloat);
  strided.student = plain.student.transpose(0, 2).contiguous().transpose(0, 2);
  strided.grad = at::zeros({4, 3, 2}, at::kBFloat16).transpose(0, 2);
  ASSERT_TRUE(strided.run(*objective()).ok());
  EXPECT_EQ(plain.loss.item<float>(), strided.loss.item<float>());
  EXPECT_TRUE(at::equal(plain.grad, strided.grad));
}

TEST(LayerAlignment, MaskAndWeightAreRead) {
  Call call = random_call();
  call.mask = at::ones({2, 3}, at::kByte);
  call.mask[1].zero_();
  call.weight = at::ones({2, 3}, at::kFloat);
  call.weight[0][0] = 3;
  call.student[1].fill_(std::nanf(""));
  ASSERT_TRUE(call.run(*objective()).ok());
  const at::Tensor squares = (call.student - call.teacher)[0].square().sum(-1);
  const double expected = (3 * squares[0] + squares[1] + squares[2]).item<double>() / (5 * 4);
  EXPECT_NEAR(call.loss.item<double>(), expected, 1e-6);
  EXPECT_EQ(call.grad[1].abs().max().item<double>(), 0.0);
}

TEST(LayerAlignment, WithoutAGradientOnlyTheLossIsWritten) {
  Call call = random_call();
  call.grad = at::Tensor();
  ASSERT_TRUE(call.run(*objective()).ok());
  EXPECT_GT(call.loss.item<double>(), 0.0);
}

TEST(LayerAlignment, RelativeIsForMseAndL2) {
  for (const char* loss : {"cosine", "nmse"}) {
    std::shared_ptr<graft_objective> made;
    const Outcome outcome = plugin().create<graft_objective_factory>(
        GRAFT_EXT_OBJECTIVE_FACTORY, {{"loss", text(loss)}, {"relative", sdk::Value::of(true)}},
        &made);
    EXPECT_EQ(outcome.status, GRAFT_INVALID_ARGUMENT);
    EXPECT_EQ(outcome.where, "config.relative");
    EXPECT_EQ(outcome.message, std::string("loss = ") + loss +
                                   " is relative as it is; relative = true is for mse and l2");
    EXPECT_EQ(made, nullptr);
  }
}

struct Wrong {
  const char* where;
  const char* message;
  void (*spoil)(Call&);
};

TEST(LayerAlignment, WrongTensorsAreNamedAndTheInstanceLivesOn) {
  const Wrong wrongs[] = {
      {"tensor:teacher.layer.hidden", "expected shape [2, 3, 4], got [2, 3, 5]",
       [](Call& c) {
         c.teacher = at::zeros({2, 3, 5});
       }},
      {"tensor:teacher.layer.hidden", "is missing (NULL)",
       [](Call& c) { c.teacher = at::Tensor(); }},
      {"tensor:student.layer.hidden", "is missing (NULL)",
       [](Call& c) { c.student = at::Tensor(); }},
      {"tensor:loss_mask", "expected shape [2, 3], got [2, 4]",
       [](Call& c) {
         c.mask = at::ones({2, 4}, at::kByte);
       }},
      {"tensor:token_weight", "expected shape [2, 3], got [6]",
       [](Call& c) { c.weight = at::ones({6}); }},
      {"tensor:grad", "expected shape [2, 3, 4], got [24]",
       [](Call& c) { c.grad = at::zeros({24}); }},
      {"tensor:loss", "is missing (NULL)", [](Call& c) { c.loss = at::Tensor(); }},
      {"tensor:loss", "expected one number, got shape [2]",
       [](Call& c) { c.loss = at::zeros({2}); }},
      {"tensor:student.layer.hidden", "expected a floating dtype, got int32",
       [](Call& c) { c.dtype = sdk::int32; }},
  };
  const auto made = objective();
  for (const Wrong& wrong : wrongs) {
    Call call = random_call();
    wrong.spoil(call);
    const Outcome outcome = call.run(*made);
    EXPECT_EQ(outcome.status, GRAFT_INVALID_ARGUMENT) << wrong.message;
    EXPECT_EQ(outcome.where, wrong.where);
    EXPECT_THAT(outcome.message, HasSubstr(wrong.message));
    EXPECT_TRUE(random_call().run(*made).ok());
  }
}

}  // namespace
}  // namespace graft::testing
