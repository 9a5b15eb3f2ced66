// A training objective in C++20 without LibTorch: the Huber loss between the output of a converted
// block and that of the teacher's block.
//
//   loss = sum_t w_t mean_i huber(student_ti - teacher_ti) / sum_t w_t
//   huber(d) = d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2)
//
// w_t is a token's weight, 0 where the mask leaves it out. Being a sum over tokens divided by their
// weight, the loss depends neither on padding nor on how a batch is cut; the host has to be told
// the weight, since it puts the parts of a batch together by it.
//
// Start here: change the two functions of one difference, huber() and its slope.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "graft/plugin.hpp"

namespace {

namespace sdk = graft::sdk;

// The order of needs().
enum Signal : std::size_t { kStudent, kTeacher, kMask, kWeight };
constexpr const char* kNames[] = {GRAFT_SIGNAL_STUDENT_HIDDEN, GRAFT_SIGNAL_TEACHER_HIDDEN,
                                  GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT};

class MyObjective final : public sdk::Objective {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.my-objective";
    d.alias = "my_objective";
    d.name = "My objective";
    d.version = "0.1.0";
    d.license = "Apache-2.0";
    d.description = "Huber loss between the outputs of a converted block and the teacher's";
    d.dtypes = {sdk::float32, sdk::float64};
    d.options.push_back(
        sdk::Option::real("delta", 1.0, "difference from which on the loss grows linearly")
            .range(1e-6, 1e6));
    return d;
  }

  explicit MyObjective(const sdk::Config& config) : delta_(config.get<double>("delta")) {}

  void needs(sdk::SignalNeeds& needs) override {
    needs.add(kNames[kStudent], /*want_grad=*/true);
    needs.add(kNames[kTeacher]);
    needs.add(kNames[kMask], false, /*optional=*/true);
    needs.add(kNames[kWeight], false, /*optional=*/true);
  }

  void run(const graft_exec&, const sdk::ObjectiveArgs& args) override {
    check(args);
    if (sdk::same_dtype(args.signal(kStudent).dtype, sdk::float64)) {
      run_in<double>(args);
    } else {
      run_in<float>(args);
    }
  }

 private:
  // [loss]
  double huber(double d) const {
    const double size = std::fabs(d);
    return size <= delta_ ? 0.5 * d * d : delta_ * (size - 0.5 * delta_);
  }
  double slope(double d) const { return std::clamp(d, -delta_, delta_); }
  // [/loss]

  static void check(const sdk::ObjectiveArgs& args) {
    const DLTensor& student = args.signal(kStudent);
    if (student.ndim < 1) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, sdk::cat("tensor:", kNames[kStudent]),
                        "expected shape [..., model], got a scalar");
    }
    const auto shape = sdk::shape_of(student);
    sdk::check_shape(args.signal(kTeacher), kNames[kTeacher], shape);
    for (const Signal s : {kMask, kWeight}) {
      if (const DLTensor* const tensor = args.find_signal(s))
        sdk::check_shape(*tensor, kNames[s], shape.first(shape.size() - 1));
    }
    if (const DLTensor* const grad = args.grad(kStudent)) sdk::check_shape(*grad, "grad", shape);
    if (sdk::numel(args.loss()) != 1) {
      throw sdk::Status(
          GRAFT_INVALID_ARGUMENT, "tensor:loss",
          sdk::cat("expected one number, got shape ", sdk::shape_string(args.loss())));
    }
  }

  // What a token counts for. An empty span stands for a signal that is not there.
  struct Weights {
    std::span<const uint8_t> mask;
    std::span<const float> weight;
    double of(std::size_t t) const {
      if (!mask.empty() && mask[t] == 0) return 0;
      return weight.empty() ? 1 : weight[t];
    }
  };

  static Weights weights(const sdk::ObjectiveArgs& args) {
    Weights w;
    if (const DLTensor* const mask = args.find_signal(kMask))
      w.mask = sdk::data<const uint8_t>(*mask, kNames[kMask]);
    if (const DLTensor* const weight = args.find_signal(kWeight))
      w.weight = sdk::data<const float>(*weight, kNames[kWeight]);
    return w;
  }

  template <class Real>
  void run_in(const sdk::ObjectiveArgs& args) const {
    const auto student = sdk::data<const Real>(args.signal(kStudent), kNames[kStudent]);
    const auto teacher = sdk::data<const Real>(args.signal(kTeacher), kNames[kTeacher]);
    const auto loss = sdk::data<float>(args.loss(), "loss");
    std::span<Real> grad;
    if (const DLTensor* const tensor = args.grad(kStudent)) grad = sdk::data<Real>(*tensor, "grad");
    const Weights w = weights(args);
    const auto model = static_cast<std::size_t>(sdk::shape_of(args.signal(kStudent)).back());
    const std::size_t tokens = model == 0 ? 0 : student.size() / model;

    double total = 0, weight = 0;
    for (std::size_t t = 0; t < tokens; ++t) weight += w.of(t);
    for (std::size_t t = 0; t < tokens; ++t) {
      // A token that does not count may hold anything, NaN too: it is not touched.
      const double share = w.of(t) == 0 ? 0 : w.of(t) / weight / static_cast<double>(model);
      for (std::size_t i = t * model; i < (t + 1) * model; ++i) {
        const double d = share == 0 ? 0 : static_cast<double>(student[i]) - teacher[i];
        total += share * huber(d);
        if (!grad.empty()) grad[i] = static_cast<Real>(args.grad_scale() * share * slope(d));
      }
    }
    loss[0] = static_cast<float>(total);
    report_weight(args, weight);
  }

  static void report_weight(const sdk::ObjectiveArgs& args, double weight) {
    args.metric(GRAFT_METRIC_WEIGHT,
                DLTensor{&weight, {kDLCPU, 0}, 0, sdk::float64, nullptr, nullptr, 0});
  }

  double delta_;
};

}  // namespace

GRAFT_DEFINE_PLUGIN((sdk::LibraryInfo{.id = "org.example.my-objective",
                                      .version = "0.1.0",
                                      .license = "Apache-2.0"}),
                    sdk::objective<MyObjective>())
