// Two builds of a mixer plugin, or two mixers, against each other through the ABI, call by call in
// turn:
//
//   mixer_bench ONE.so OTHER.so [batch=4] [tokens=512] [model=576] [heads=9] [dim=64] [repeats=20]
//   [bf16=0]
//
// Before timing, the outputs of both are compared (where their parameters are the same). Prints the
// least time of each call and the ratio.
#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "abi_harness.h"

namespace graft::mixers {
namespace {

using Settings = std::map<std::string, int64_t>;

Settings read_settings(int argc, char** argv) {
  Settings settings = {{"batch", 4}, {"tokens", 512}, {"model", 576}, {"heads", 9},
                       {"dim", 64},  {"repeats", 20}, {"bf16", 0}};
  for (int i = 3; i < argc; ++i) {
    const std::string text = argv[i];
    const std::size_t equals = text.find('=');
    const auto found = settings.find(text.substr(0, equals));
    if (equals == std::string::npos || found == settings.end()) {
      std::fprintf(stderr, "mixer_bench: unknown setting '%s'\n", text.c_str());
      std::exit(2);
    }
    found->second = std::strtoll(text.c_str() + equals + 1, nullptr, 10);
  }
  return settings;
}

graft_layer_info layer_info(const Settings& settings) {
  graft_layer_info info{};
  info.struct_size = sizeof info;
  info.n_layers = 1;
  info.n_heads = info.n_kv_heads = static_cast<int32_t>(settings.at("heads"));
  info.head_dim = static_cast<int32_t>(settings.at("dim"));
  info.model_dim = settings.at("model");
  info.rope_scaling = "";
  info.family = "llama";
  info.param_dtype = {kDLFloat, 32, 1};
  info.norm_eps = 1e-6;
  return info;
}

// One plugin with the tensors of its calls made beforehand, so that nothing but the call is timed.
class Subject {
 public:
  Subject(const std::string& file, const Settings& settings)
      : mixer_(file, layer_info(settings)),
        training_(settings, mixer_, true),
        inference_(settings, mixer_, false) {
    Settings one = settings;
    one["tokens"] = 1;
    step_ = std::make_unique<Call>(one, mixer_, false);
    step_->use_own_state();
  }

  void forward() { inference_.forward(mixer_); }
  void both() {
    training_.forward(mixer_);
    training_.backward(mixer_);
  }
  void step() { step_->step(mixer_); }
  const at::Tensor& y() const { return inference_.y(); }
  const at::Tensor& dx() const { return training_.dx(); }

 private:
  struct Call {
    Call(const Settings& settings, AbiMixer& mixer, bool training) : training_(training) {
      at::manual_seed(1);
      const auto type = settings.at("bf16") != 0 ? at::kBFloat16 : at::kFloat;
      const int64_t batch = settings.at("batch"), tokens = settings.at("tokens");
      x_ = at::randn({batch, tokens, settings.at("model")}).to(type);
      dy_ = at::randn_like(x_);
      y_ = at::empty_like(x_);
      dx_ = at::empty_like(x_);
      for (const graft_param_spec* spec : mixer.specs()) {
        params_.push_back(
            at::randn(at::IntArrayRef(spec->shape, static_cast<std::size_t>(spec->ndim))) * 0.04);
        dparams_.push_back(at::empty_like(params_.back()));
      }
      sizes_ = mixer.plan(batch, tokens, type, training);
      state_ = allocate(sizes_.state, sizes_.n_state);
      saved_ = allocate(sizes_.saved, sizes_.n_saved);
      workspace_ = std::make_unique<Workspace>(
          std::max({sizes_.workspace_forward, sizes_.workspace_backward, sizes_.workspace_step}));
      forward_ = {sizeof forward_,
                  static_cast<uint32_t>(params_.size()),
                  sizes_.n_state,
                  sizes_.n_saved,
                  sizes_.n_taps,
                  0,
                  borrow_.one(x_),
                  borrow_.one(y_),
                  nullptr,
                  nullptr,
                  nullptr,
                  borrow_.many(params_),
                  nullptr,
                  nullptr,
                  training ? borrow_.many(saved_) : nullptr,
                  nullptr};
      backward_ = {sizeof backward_, 0,       &forward_,        borrow_.one(dy_),
                   nullptr,          nullptr, borrow_.one(dx_), borrow_.many(dparams_),
                   nullptr};
      exec_.struct_size = sizeof exec_;
      exec_.device_type = kDLCPU;
      exec_.flags = training ? GRAFT_X_TRAINING : 0;
      exec_.workspace = workspace_->data();
      exec_.workspace_bytes = workspace_->bytes();
      plan_in_ = {sizeof plan_in_, kDLCPU, 0, dl_type(type), exec_.flags, batch, tokens};
    }

    static std::vector<at::Tensor> allocate(const graft_tensor_spec* const* specs, uint32_t n) {
      std::vector<at::Tensor> out;
      for (uint32_t i = 0; i < n; ++i) {
        out.push_back(
            at::zeros(at::IntArrayRef(specs[i]->shape, static_cast<std::size_t>(specs[i]->ndim)),
                      torch_type(specs[i]->dtype)));
      }
      return out;
    }

    void use_own_state() {
      forward_.state_out = borrow_.many(state_);
      forward_.state_in = forward_.state_out;
    }

    // As a host does: a plan before each call.
    void plan(AbiMixer& mixer) {
      graft_plan_out out{};
      out.struct_size = sizeof out;
      graft_error error = fresh_error();
      require_ok(mixer.handle()->v->plan(mixer.handle(), &plan_in_, &out, &error), error);
    }
    void forward(AbiMixer& mixer) {
      graft_error error = fresh_error();
      plan(mixer);
      require_ok(mixer.handle()->v->forward(mixer.handle(), &exec_, &forward_, &error), error);
    }
    void backward(AbiMixer& mixer) {
      graft_error error = fresh_error();
      plan(mixer);
      require_ok(mixer.handle()->v->backward(mixer.handle(), &exec_, &backward_, &error), error);
    }
    void step(AbiMixer& mixer) {
      graft_error error = fresh_error();
      plan(mixer);
      require_ok(mixer.handle()->v->step(mixer.handle(), &exec_, &forward_, &error), error);
    }
    const at::Tensor& y() const { return y_; }
    const at::Tensor& dx() const { return dx_; }

   private:
    bool training_;
    at::Tensor x_, dy_, y_, dx_;
    std::vector<at::Tensor> params_, dparams_, state_, saved_;
    graft_plan_out sizes_{};
    std::unique_ptr<Workspace> workspace_;
    Borrow borrow_;
    graft_mixer_forward forward_{};
    graft_mixer_backward backward_{};
    graft_exec exec_{};
    graft_plan_in plan_in_{};
  };

  AbiMixer mixer_;
  Call training_, inference_;
  std::unique_ptr<Call> step_;
};

double milliseconds(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

void compare(const char* what, int64_t repeats, const std::function<void()>& one,
             const std::function<void()>& other) {
  double least[2] = {1e300, 1e300};
  for (int64_t i = 0; i < repeats + 2; ++i) {
    const double times[2] = {milliseconds(one), milliseconds(other)};
    for (int s = 0; s < 2 && i >= 2; ++s) least[s] = std::min(least[s], times[s]);
  }
  std::printf("%-18s %9.3f ms %9.3f ms   %.2f\n", what, least[0], least[1], least[0] / least[1]);
}

int run(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: mixer_bench ONE.so OTHER.so [batch=4] [tokens=512] ...\n");
    return 2;
  }
  const Settings settings = read_settings(argc, argv);
  const int64_t repeats = settings.at("repeats");
  Subject one(argv[1], settings), other(argv[2], settings);
  one.forward();
  other.forward();
  one.both();
  other.both();
  const auto difference = [](const at::Tensor& a, const at::Tensor& b) {
    return ((a.to(at::kDouble) - b.to(at::kDouble)).abs().max() / b.to(at::kDouble).abs().max())
        .item<double>();
  };
  std::printf("largest difference over largest value: y %.2g, dx %.2g\n",
              difference(one.y(), other.y()), difference(one.dx(), other.dx()));
  std::printf("%-18s %12s %12s   ratio\n", "", "one", "other");
  compare(
      "forward", repeats, [&] { one.forward(); }, [&] { other.forward(); });
  compare(
      "forward+backward", repeats, [&] { one.both(); }, [&] { other.both(); });
  compare(
      "step", 20 * repeats, [&] { one.step(); }, [&] { other.step(); });
  return 0;
}

}  // namespace
}  // namespace graft::mixers

int main(int argc, char** argv) {
  try {
    return graft::mixers::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mixer_bench: %s\n", e.what());
    return 1;
  }
}
