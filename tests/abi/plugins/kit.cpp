// Several components in one library, through the C++ SDK: what its wrappers have to carry.
#include <cmath>
#include <new>
#include <stdexcept>

#include "graft/plugin.hpp"

namespace {

namespace sdk = graft::sdk;

// Throws what it is told to from where it is told to; y = x otherwise.
class Thrower final : public sdk::Mixer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.kit.thrower";
    d.alias = "thrower";
    d.caps = GRAFT_CAP_BACKWARD;
    d.param_schema = 3;
    d.options.push_back(
        sdk::Option::string("thrown", "none", "what to throw")
            .one_of({"none", "status", "ok_status", "exception", "bad_alloc", "int", "torch"}));
    d.options.push_back(sdk::Option::string("where", "forward", "from which call")
                            .one_of({"create", "param_specs", "plan", "forward", "backward"}));
    return d;
  }
  Thrower(const sdk::LayerInfo&, const sdk::Config& config)
      : thrown_(config.get<std::string>("thrown")), where_(config.get<std::string>("where")) {
    maybe_throw("create");
  }
  void param_specs(sdk::ParamSpecs& specs) override {
    maybe_throw("param_specs");
    specs.add("w", GRAFT_ROLE_QUERY, "a,b", {2, 2}).eye();
    specs.add("frozen", "org.example.role.thing", "a", {3}).frozen().constant(0.5).fp32();
  }
  void plan(const graft_plan_in& in, sdk::Plan& out) override {
    maybe_throw("plan");
    out.saved.add("kept", "batch", {in.batch}, sdk::float32);
    out.taps.add(GRAFT_TAP_PRE_OUTPUT, "batch,tokens,model", {in.batch, in.tokens, 4},
                 sdk::bfloat16, "a tap");
    out.workspace_backward = 128;
  }
  void forward(const graft_exec&, const graft_mixer_forward&) override { maybe_throw("forward"); }
  void backward(const graft_exec&, const graft_mixer_backward& call) override {
    maybe_throw("backward");
    // What the host did not fill is zero, in the nested struct too.
    if (call.fwd->taps != nullptr) throw sdk::Status(GRAFT_INTERNAL, "taps", "are there");
  }
  const void* extension(std::string_view id) noexcept override {
    return id == "org.example.answer/1" ? &kAnswer : nullptr;
  }

 private:
  static constexpr int kAnswer = 42;
  void maybe_throw(const char* call) const {
    if (where_ != call) return;
    if (thrown_ == "status") throw sdk::Status(GRAFT_OUT_OF_RANGE, "tensor:x", "is out of range");
    if (thrown_ == "ok_status") throw sdk::Status(GRAFT_OK, "", "thrown, yet fine");
    if (thrown_ == "exception") throw std::runtime_error("the author forgot this");
    if (thrown_ == "bad_alloc") throw std::bad_alloc();
    if (thrown_ == "int") throw 42;
    // As c10::Error words it.
    if (thrown_ == "torch") {
      throw std::runtime_error(
          "mat1 and mat2 shapes cannot be multiplied\nException raised from meta at x.cpp:3 (most "
          "recent call "
          "first):\nframe #0 ...");
    }
  }
  std::string thrown_, where_;
};

// Reads options of every type and says in an error what it got.
class Options final : public sdk::Mixer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.kit.options";
    d.alias = "options";
    d.options.push_back(sdk::Option::boolean("flag", true, "a switch"));
    d.options.push_back(sdk::Option::integer("whole", 3, "a count").range(0, 10));
    d.options.push_back(sdk::Option::real("part", 0.5, "a share").range(0.0, 1.0));
    d.options.push_back(sdk::Option::string("word", "one", "a choice").one_of({"one", "two"}));
    d.options.push_back(sdk::Option::integers("wholes", {1, 2}, "counts").at_least(0));
    d.options.push_back(sdk::Option::reals("parts", {0.25}, "shares"));
    return d;
  }
  Options(const sdk::LayerInfo& layer, const sdk::Config& c) {
    text_ = sdk::cat(c.get<bool>("flag"), " ", c.get<int>("whole"), " ", c.get<double>("part"), " ",
                     c.get<std::string>("word"), " ", c.get<std::vector<int64_t>>("wholes").size(),
                     " ", c.get<std::vector<double>>("parts").size(), " ", layer.family, " ",
                     layer.rope_inv_freq.size());
  }
  void param_specs(sdk::ParamSpecs&) override {}
  void plan(const graft_plan_in&, sdk::Plan&) override {
    throw sdk::Status(GRAFT_INTERNAL, "", text_);
  }
  void forward(const graft_exec&, const graft_mixer_forward&) override {}

 private:
  std::string text_;
};

// Copies the teacher's query to the student's, scaled by the mean of the calibration inputs.
class Copy final : public sdk::Initializer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.kit.copy";
    d.alias = "copy";
    d.options.push_back(sdk::Option::boolean("calibrate", false, "use the calibration batches"));
    return d;
  }
  explicit Copy(const sdk::Config& config) : calibrate_(config.get<bool>("calibrate")) {}
  void needs(sdk::RoleNeeds& needs) override {
    needs.teacher(GRAFT_ROLE_QUERY);
    needs.student(GRAFT_ROLE_QUERY);
    needs.student(GRAFT_ROLE_OUTPUT, false);
  }
  void calibration(sdk::CalibrationNeeds& needs) override {
    if (calibrate_) needs.add(GRAFT_SIGNAL_BLOCK_INPUT, true, 4);
  }
  void run(const graft_exec&, sdk::InitArgs& args) override {
    double mean = 1.0;
    if (calibrate_) mean = calibration_mean(args);
    const auto from = args.teacher(GRAFT_ROLE_QUERY).values();
    const auto to = args.student(GRAFT_ROLE_QUERY).write();
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<float>(mean * from[i]);
    const double tokens[] = {4.0};
    if (!args.set_natural(GRAFT_NATURAL_HALF_LIFE, tokens)) {
      sdk::log(GRAFT_LOG_INFO, "the mixer has no half-life: left as it is");
    }
  }

 private:
  static double calibration_mean(sdk::InitArgs& args) {
    double sum = 0, count = 0;
    for (int pass = 0; pass < 2; ++pass) {
      args.for_each_batch([&](const sdk::Batch& batch) {
        for (const float value : batch.at(GRAFT_SIGNAL_BLOCK_INPUT).values())
          sum += value, count += 1;
        const auto y = sdk::data<const float>(args.probe("y"), "y");
        sum += y[0] - y[0];
      });
    }
    return sum / count;
  }
  bool calibrate_;
};

// loss = grad_scale-free sum of squares of one signal, with its gradient.
class Square final : public sdk::Objective {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.kit.square";
    d.alias = "square";
    return d;
  }
  explicit Square(const sdk::Config&) {}
  void needs(sdk::SignalNeeds& needs) override {
    needs.add(GRAFT_SIGNAL_STUDENT_HIDDEN, true);
    needs.add(GRAFT_SIGNAL_LOSS_MASK, false, true);
  }
  uint64_t workspace(const sdk::ObjectiveArgs& args) override {
    return sdk::byte_size(args.signal(0));
  }
  void run(const graft_exec& exec, const sdk::ObjectiveArgs& args) override {
    if (exec.workspace_bytes < workspace(args)) {
      throw sdk::Status(GRAFT_INVALID_ARGUMENT, "workspace", "is too small");
    }
    const auto x = sdk::data<const float>(args.signal(0), GRAFT_SIGNAL_STUDENT_HIDDEN);
    double loss = 0;
    for (const float value : x) loss += static_cast<double>(value) * value;
    sdk::data<float>(args.loss(), "loss")[0] = static_cast<float>(loss);
    if (DLTensor* const grad = args.grad(0)) {
      const auto dx = sdk::data<float>(*grad, "grad");
      for (std::size_t i = 0; i < x.size(); ++i)
        dx[i] = static_cast<float>(2 * args.grad_scale() * x[i]);
    }
    args.metric("squares", args.loss());
  }
};

}  // namespace

GRAFT_DEFINE_PLUGIN((sdk::LibraryInfo{
                        .id = "org.example.kit", .version = "1.2.3", .license = "MIT"}),
                    sdk::mixer<Thrower>(), sdk::mixer<Options>(), sdk::initializer<Copy>(),
                    sdk::objective<Square>())
