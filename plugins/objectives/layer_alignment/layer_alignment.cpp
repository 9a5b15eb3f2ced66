// layer_alignment: how far the output of a converted block is from the teacher's.
#include <graft/version.h>
#include <graft/torch_mixer.hpp>

#include <string>

#include "plugins/objectives/layer_alignment/alignment_loss.h"

namespace graft::layer_alignment {
namespace {

enum Signal : std::size_t { kStudent, kTeacher, kMask, kWeight };
constexpr const char* kNames[] = {GRAFT_SIGNAL_STUDENT_HIDDEN, GRAFT_SIGNAL_TEACHER_HIDDEN,
                                  GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT};

at::Tensor hidden(const DLTensor& tensor, std::string_view name) {
  const at::Tensor view = sdk::torch_view(tensor, name);
  if (!view.is_floating_point()) {
    throw sdk::Status(GRAFT_INVALID_ARGUMENT, sdk::cat("tensor:", name),
                      sdk::cat("expected a floating dtype, got ", sdk::dtype_name(tensor.dtype)));
  }
  return view;
}

Loss loss_option(const sdk::Config& config) {
  try {
    return loss_named(config.get<std::string>("loss"));
  } catch (const std::invalid_argument& problem) {
    throw sdk::Status(GRAFT_INVALID_ARGUMENT, "config.loss", problem.what());
  }
}

class LayerAlignment final : public sdk::Objective {
 public:
  explicit LayerAlignment(const sdk::Config& config)
      : options_{loss_option(config), config.get<bool>("relative")} {
    if (options_.relative && (options_.loss == Loss::cosine || options_.loss == Loss::nmse)) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, "config.relative",
                        sdk::cat("loss = ", config.get<std::string>("loss"),
                                 " is relative as it is; relative = true is for mse and l2"));
    }
  }

  static sdk::Description describe() {
    return {.id = "org.graft.layer-alignment",
            .alias = "layer_alignment",
            .name = "Layer alignment",
            .version = GRAFT_VERSION_STRING,
            .license = "Apache-2.0",
            .citation = "https://arxiv.org/abs/2606.16429",
            .description =
                "Distance between the output of a converted block and the teacher's, "
                "token by token.",
            .caps = GRAFT_CAP_PAD_MASK | GRAFT_CAP_STRIDED,
            .options = {sdk::Option::string("loss", "mse",
                                            "mse, l2 (distance / sqrt(model)), cosine (1 - cos) or "
                                            "nmse (mse / variance of the teacher)")
                            .one_of({"mse", "l2", "cosine", "nmse"}),
                        sdk::Option::boolean("relative", false,
                                             "mse, l2: divide by the teacher's own size instead "
                                             "of the number of tokens")},
            .dtypes = {sdk::float32, sdk::bfloat16, sdk::float64}};
  }

  void needs(sdk::SignalNeeds& needs) override {
    needs.add(kNames[kStudent], /*want_grad=*/true);
    needs.add(kNames[kTeacher]);
    needs.add(kNames[kMask], false, /*optional=*/true);
    needs.add(kNames[kWeight], false, /*optional=*/true);
  }

  void run(const graft_exec&, const sdk::ObjectiveArgs& args) override {
    const at::NoGradGuard no_grad;
    const DLTensor& student = args.signal(kStudent);
    check(args, student);
    const DLTensor* const grad = args.grad(kStudent);
    const auto optional = [&](Signal s) {
      const DLTensor* const tensor = args.find_signal(s);
      return tensor == nullptr ? at::Tensor() : sdk::torch_view(*tensor, kNames[s]);
    };
    const at::Tensor o = hidden(student, kNames[kStudent]);
    const at::Tensor y = hidden(args.signal(kTeacher), kNames[kTeacher]);
    const Alignment result =
        align(options_, o, y, optional(kMask), optional(kWeight), grad != nullptr);
    const at::Tensor loss = sdk::torch_view(args.loss(), "loss");
    loss.copy_(result.loss.reshape(loss.sizes()));
    if (grad != nullptr) hidden(*grad, "grad").copy_(result.grad * args.grad_scale());
    report_weight(args, result.denominator);
  }

 private:
  // What parts of a batch are put together by.
  static void report_weight(const sdk::ObjectiveArgs& args, const at::Tensor& weight) {
    double number = weight.item<double>();
    args.metric(GRAFT_METRIC_WEIGHT,
                DLTensor{&number, {kDLCPU, 0}, 0, sdk::float64, nullptr, nullptr, 0});
  }

  static void check(const sdk::ObjectiveArgs& args, const DLTensor& student) {
    if (student.ndim < 1) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, sdk::cat("tensor:", kNames[kStudent]),
                        "expected shape [..., model], got a scalar");
    }
    const auto shape = sdk::shape_of(student);
    sdk::check_shape(args.signal(kTeacher), kNames[kTeacher], shape);
    for (const Signal s : {kMask, kWeight}) {
      const DLTensor* const tensor = args.find_signal(s);
      if (tensor != nullptr) sdk::check_shape(*tensor, kNames[s], shape.first(shape.size() - 1));
    }
    const DLTensor* const grad = args.grad(kStudent);
    if (grad != nullptr) sdk::check_shape(*grad, "grad", shape);
    if (sdk::numel(args.loss()) != 1) {
      throw sdk::Status(
          GRAFT_INVALID_ARGUMENT, "tensor:loss",
          sdk::cat("expected one number, got shape ", sdk::shape_string(args.loss())));
    }
  }

  AlignmentOptions options_;
};

}  // namespace
}  // namespace graft::layer_alignment

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.layer-alignment",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = GRAFT_VERSION_STRING,
                                             .license = "Apache-2.0"}),
                    graft::sdk::objective<graft::layer_alignment::LayerAlignment>())
