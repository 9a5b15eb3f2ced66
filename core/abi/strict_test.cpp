// GRAFT_HOST_STRICT=1: what it says of plugins and of hosts that break the ABI.
#include "core/abi/strict.h"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <thread>

#include "core/abi/library.h"
#include "core/base/testing.h"

namespace graft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// strict_mode() looks once per process: before any test.
const bool strict_is_set = ::setenv("GRAFT_HOST_STRICT", "1", 1) == 0;

TEST(Strict, ModeIsOn) {
  ASSERT_TRUE(strict_is_set);
  EXPECT_TRUE(strict_mode());
}

template <class Struct>
Struct sized() {
  Struct s{};
  s.struct_size = sizeof s;
  return s;
}

// A float tensor [n], or [1,n].
struct Tensor {
  alignas(64) float values[16] = {};
  std::int64_t shape[2], strides[2];
  DLTensor dl;
  explicit Tensor(std::int64_t n, std::int32_t ndim = 1, float fill = 0)
      : shape{ndim == 1 ? n : 1, n}, strides{ndim == 1 ? 1 : n, 1}, dl{values, {kDLCPU, 0},
                                                                       ndim,   {kDLFloat, 32, 1},
                                                                       shape,  strides,
                                                                       0} {
    std::fill_n(values, 16, fill);
  }
};

float* data(const DLTensor* tensor) { return static_cast<float*>(tensor->data); }

// A plugin inside this program: a parameter 'w' [3], saved 'kept' [2], state 'S' [1,2], tap 't'
// [2]. It keeps the contract; a test breaks it where its hooks, called last, say so.
struct StandIn {
  std::function<void(const graft_exec&, const graft_mixer_forward&)> forward;
  std::function<void(const graft_mixer_backward&)> backward;
  std::function<void(const graft_init_args&)> init;
  std::function<void(const graft_objective_args&)> loss;
  std::function<void(DLTensor* const*)> params;
  std::function<void()> deinit;
  const graft_host* host = nullptr;

  static StandIn* current;
  StandIn() { current = this; }
};
StandIn* StandIn::current = nullptr;

void write(const DLTensor* tensor, float value) {
  if (tensor == nullptr) return;
  std::fill_n(data(tensor), tensor->shape[tensor->ndim - 1], value);
}

graft_status stand_in_forward(graft_mixer*, const graft_exec* exec, const graft_mixer_forward* call,
                              graft_error*) {
  write(call->y, 2 * data(call->x)[0]);
  if (call->saved != nullptr) write(call->saved[0], 3);
  if (call->taps != nullptr) write(call->taps[0], 4);
  if (call->state_out != nullptr)
    write(call->state_out[0], call->state_in == nullptr ? 1 : data(call->state_in[0])[0] + 1);
  if (StandIn::current->forward) StandIn::current->forward(*exec, *call);
  return GRAFT_OK;
}

graft_status stand_in_backward(graft_mixer*, const graft_exec* exec,
                               const graft_mixer_backward* call, graft_error*) {
  write(call->dx, 2 * data(call->dy)[0]);
  const bool add = (exec->flags & GRAFT_X_ACCUMULATE) != 0;
  if (call->dparams != nullptr)
    write(call->dparams[0], (add ? data(call->dparams[0])[0] : 0) + data(call->dy)[0]);
  if (StandIn::current->backward) StandIn::current->backward(*call);
  return GRAFT_OK;
}

graft_status stand_in_plan(graft_mixer*, const graft_plan_in*, graft_plan_out* out, graft_error*) {
  static graft_tensor_spec kept = sized<graft_tensor_spec>(), state = kept, tap = kept;
  kept.name = "kept";
  state.name = "S";
  tap.name = "t";
  kept.dtype = state.dtype = tap.dtype = {kDLFloat, 32, 1};
  kept.ndim = tap.ndim = 1;
  kept.shape[0] = tap.shape[0] = state.shape[1] = 2;
  state.ndim = 2;
  state.shape[0] = 1;
  static const graft_tensor_spec *const all_kept[] = {&kept}, *const all_state[] = {&state},
                                        *const all_taps[] = {&tap};
  out->n_saved = out->n_state = out->n_taps = 1;
  out->saved = all_kept;
  out->state = all_state;
  out->taps = all_taps;
  out->workspace_forward = out->workspace_backward = out->workspace_step = 16;
  return GRAFT_OK;
}

graft_status stand_in_params(graft_mixer*, const graft_param_spec* const** specs, std::uint32_t* n,
                             graft_error*) {
  static graft_param_spec w = sized<graft_param_spec>();
  w.name = "w";
  w.ndim = 1;
  w.shape[0] = 3;
  static const graft_param_spec* const all[] = {&w};
  *specs = all;
  *n = 1;
  return GRAFT_OK;
}

const void* stand_in_extension(graft_mixer*, const char* id) {
  static graft_mixer_domain domain = sized<graft_mixer_domain>();
  domain.set = [](graft_mixer*, const char*, std::uint32_t, const double*, DLTensor* const* params,
                  std::uint8_t*, graft_error*) {
    write(params[0], 5);
    if (StandIn::current->params) StandIn::current->params(params);
    return graft_status{GRAFT_OK};
  };
  return std::string(id) == GRAFT_EXT_MIXER_DOMAIN ? &domain : nullptr;
}

graft_status stand_in_run(graft_initializer*, const graft_exec*, const graft_init_args* args,
                          graft_error*) {
  if (args->n_student > 0) {
    write(args->student[0]->tensor, 7);
    args->student_written[0] = 1;
  }
  if (StandIn::current->init) StandIn::current->init(*args);
  return GRAFT_OK;
}

graft_status stand_in_loss(graft_objective*, const graft_exec*, const graft_objective_args* args,
                           graft_error*) {
  *data(args->loss) = data(args->signals[0])[0];
  if (args->grads != nullptr) write(args->grads[0], 1);
  if (StandIn::current->loss) StandIn::current->loss(*args);
  return GRAFT_OK;
}

// The tables of all three kinds.
struct Tables {
  graft_desc desc = sized<graft_desc>();
  const graft_desc* descs[1] = {&desc};
  graft_mixer_vtbl mixer_table = sized<graft_mixer_vtbl>();
  graft_initializer_vtbl initializer_table = sized<graft_initializer_vtbl>();
  graft_objective_vtbl objective_table = sized<graft_objective_vtbl>();
  graft_mixer mixer{&mixer_table, nullptr};
  graft_initializer initializer{&initializer_table, nullptr};
  graft_objective objective{&objective_table, nullptr};
  graft_signal_need needs[1] = {{"s", GRAFT_NEED_REQUIRED | GRAFT_NEED_GRAD, 0}};
  graft_mixer_factory mixers = sized<graft_mixer_factory>();
  graft_initializer_factory initializers = sized<graft_initializer_factory>();
  graft_objective_factory objectives = sized<graft_objective_factory>();
  graft_plugin plugin = sized<graft_plugin>();

  Tables() {
    desc.id = desc.alias = "x";
    desc.caps = GRAFT_CAP_BACKWARD | GRAFT_CAP_STEP | GRAFT_CAP_STATE_IO;
    mixer_table.destroy = [](graft_mixer*) {};
    mixer_table.param_specs = &stand_in_params;
    mixer_table.plan = &stand_in_plan;
    mixer_table.forward = mixer_table.step = &stand_in_forward;
    mixer_table.backward = &stand_in_backward;
    mixer_table.get_extension = &stand_in_extension;
    initializer_table.destroy = [](graft_initializer*) {};
    initializer_table.run = &stand_in_run;
    objective_table.destroy = [](graft_objective*) {};
    objective_table.run = &stand_in_loss;
    objective_table.needs = needs;
    objective_table.n_needs = 1;
    mixers.count = initializers.count = objectives.count = 1;
    mixers.descs = initializers.descs = objectives.descs = descs;
    plugin.id = "org.example.x";
    add_functions();
  }
  static Tables& all() {
    static Tables tables;
    return tables;
  }
  static graft_status negotiate(const graft_negotiate_in* in, graft_negotiate_out* out,
                                graft_error*) {
    out->abi = in->max_abi;
    out->plugin = &all().plugin;
    return GRAFT_OK;
  }

 private:
  void add_functions() {
    mixers.create = [](const char*, const graft_layer_info*, const graft_config*, graft_mixer** out,
                       graft_error*) {
      *out = &all().mixer;
      return graft_status{GRAFT_OK};
    };
    initializers.create = [](const char*, const graft_config*, graft_initializer** out,
                             graft_error*) {
      *out = &all().initializer;
      return graft_status{GRAFT_OK};
    };
    objectives.create = [](const char*, const graft_config*, graft_objective** out, graft_error*) {
      *out = &all().objective;
      return graft_status{GRAFT_OK};
    };
    plugin.init = [](const graft_host* host, const char*, graft_error*) {
      StandIn::current->host = host;
      return graft_status{GRAFT_OK};
    };
    plugin.deinit = [] {
      if (StandIn::current->deinit) StandIn::current->deinit();
    };
    plugin.get_extension = [](const char* id) -> const void* {
      const std::string name = id;
      if (name == GRAFT_EXT_MIXER_FACTORY) return &all().mixers;
      if (name == GRAFT_EXT_INITIALIZER_FACTORY) return &all().initializers;
      if (name == GRAFT_EXT_OBJECTIVE_FACTORY) return &all().objectives;
      return nullptr;
    };
  }
};

class StrictCall : public ::testing::Test {
 protected:
  StrictCall() : library_(PluginLibrary::negotiate(&Tables::negotiate, "/x.so", host_)) {
    exec_.device_type = kDLCPU;
    exec_.workspace = workspace_;
    exec_.workspace_bytes = 16;
  }
  template <class Made>
  void expect_plugin_blamed(Made&& action, const std::string& message) {
    EXPECT_GRAFT_ERROR(action(), ErrorKind::plugin, "plugin 'org.example.x' (" + message);
  }
  template <class Made>
  void expect_host_blamed(Made&& action, const std::string& message) {
    EXPECT_GRAFT_ERROR(action(), ErrorKind::internal,
                       "the host: calls plugin 'org.example.x' (" + message);
  }

  StandIn plugin_;
  HostServices host_;
  std::shared_ptr<PluginLibrary> library_;
  alignas(256) std::byte workspace_[16] = {};
  graft_exec exec_ = sized<graft_exec>();
};

// ---------------------------------------------------------------- mixers

class StrictMixer : public StrictCall {
 protected:
  StrictMixer() {
    mixer_ = library_->create_mixer(library_->components()[0], sized<graft_layer_info>(), {});
    mixer_->plan(sized<graft_plan_in>());
    call_.n_params = call_.n_state = call_.n_saved = call_.n_taps = 1;
    call_.x = &x_.dl;
    call_.y = &y_.dl;
    call_.params = params_;
    call_.state_in = states_in_;
    call_.state_out = states_out_;
    call_.saved = all_saved_;
    call_.taps = taps_;
    backward_.fwd = &fwd_;
    backward_.dy = &dy_.dl;
    backward_.dx = &dx_.dl;
    backward_.dparams = dparams_;
  }
  void forward() { mixer_->forward(exec_, call_); }
  void backward() {
    fwd_ = call_;
    fwd_.y = nullptr;
    fwd_.state_out = fwd_.taps = nullptr;
    mixer_->backward(exec_, backward_);
  }

  Tensor x_{4, 1, 1}, y_{4}, w_{3, 1, 1}, state_{2, 2, 8}, next_{2, 2}, kept_{2}, tap_{2},
      dy_{4, 1, 1}, dx_{4}, dw_{3, 1, 10};
  const DLTensor *params_[1] = {&w_.dl}, *states_in_[1] = {&state_.dl};
  DLTensor *states_out_[1] = {&next_.dl}, *all_saved_[1] = {&kept_.dl}, *taps_[1] = {&tap_.dl},
           *dparams_[1] = {&dw_.dl};
  graft_mixer_forward call_ = sized<graft_mixer_forward>(), fwd_{};
  graft_mixer_backward backward_ = sized<graft_mixer_backward>();
  std::unique_ptr<Mixer> mixer_;
};

TEST_F(StrictMixer, ResultsOfAGoodPluginArrive) {
  forward();
  EXPECT_EQ(y_.values[3], 2);
  EXPECT_EQ(y_.values[4], 0) << "behind the end";
  EXPECT_EQ(next_.values[1], 9);
  EXPECT_EQ(kept_.values[1], 3);
  EXPECT_EQ(tap_.values[0], 4);
  backward();
  EXPECT_EQ(dx_.values[3], 2);
  EXPECT_EQ(dw_.values[2], 1);
  exec_.flags = GRAFT_X_ACCUMULATE;
  backward();
  EXPECT_EQ(dw_.values[2], 2);
  exec_.flags = 0;
  states_out_[0] = &state_.dl;
  mixer_->step(exec_, call_);
  EXPECT_THAT(std::vector<float>(state_.values, state_.values + 3), ElementsAre(9, 9, 8));
}

TEST_F(StrictMixer, WhatAForwardBreaksIsNamed) {
  using Exec = const graft_exec&;
  using Call = const graft_mixer_forward&;
  const std::pair<std::function<void(Exec, Call)>, std::string> cases[] = {
      {[](Exec, Call c) { data(c.y)[4] = 1; }, "wrote past the end of y"},
      {[](Exec, Call c) { data(c.y)[-1] = 1; }, "wrote before the start of y"},
      {[](Exec, Call c) { data(c.state_out[0])[2] = 1; }, "wrote past the end of state_out 'S'"},
      {[](Exec, Call c) { data(c.saved[0])[30] = 1; }, "wrote past the end of saved 'kept'"},
      {[](Exec, Call c) { data(c.taps[0])[-2] = 1; }, "wrote before the start of tap 't'"},
      {[](Exec e, Call) { static_cast<char*>(e.workspace)[16] = 1; },
       "wrote past the end of the workspace"},
      {[](Exec, Call c) { data(c.x)[2] = 9; }, "changed its input x"},
      {[](Exec, Call c) { data(c.params[0])[0] = 9; }, "changed its input parameter 'w'"},
      {[](Exec, Call c) { data(c.state_in[0])[0] = 9; }, "changed its input state_in 'S'"},
      {[](Exec, Call c) { data(c.params[0])[3] = 9; }, "wrote past the end of parameter 'w'"},
      {[](Exec, Call c) { std::memset(c.y->data, 0xFF, 16); }, "did not write y"},
      {[](Exec, Call c) { std::memset(c.taps[0]->data, 0xFF, 8); }, "did not write tap 't'"},
      {[](Exec e, Call c) { data(c.y)[2] = static_cast<float*>(e.workspace)[1]; },
       "did not write element 2 of y, or computed it from memory that nobody wrote"}};
  for (const auto& [hook, message] : cases) {
    plugin_.forward = hook;
    y_.values[0] = -1;
    expect_plugin_blamed([&] { forward(); }, "mixer 'x'), forward: " + message);
    EXPECT_EQ(y_.values[0], -1) << "of a call that is refused nothing arrives: " << message;
  }
  plugin_.forward = [](Exec, Call c) { data(c.y)[0] = NAN; };
  EXPECT_NO_THROW(forward()) << "a NaN that was computed is the numbers' matter";
}

TEST_F(StrictMixer, WhatABackwardBreaksIsNamed) {
  using Call = const graft_mixer_backward&;
  const std::pair<std::function<void(Call)>, std::string> cases[] = {
      {[](Call c) { data(c.dx)[4] = 1; }, "wrote past the end of dx"},
      {[](Call c) { data(c.dparams[0])[-1] = 1; },
       "wrote before the start of gradient of parameter 'w'"},
      {[](Call c) { std::memset(c.dparams[0]->data, 0xFF, 12); },
       "did not write gradient of parameter 'w'"},
      {[](Call c) { data(c.dy)[0] = 5; }, "changed its input dy"},
      {[](Call c) { data(c.fwd->saved[0])[1] = 5; }, "changed its input saved 'kept'"}};
  forward();
  for (const auto& [hook, message] : cases) {
    plugin_.backward = hook;
    expect_plugin_blamed([&] { backward(); }, "mixer 'x'), backward: " + message);
  }
  EXPECT_EQ(kept_.values[1], 3) << "the plugin had a copy";
}

TEST_F(StrictMixer, WhatTheHostBreaksIsNamed) {
  const auto refused = [&](const std::string& message) {
    expect_host_blamed([&] { forward(); }, "mixer 'x'), forward: " + message);
  };
  const graft_mixer_forward good = call_;
  x_.dl.data = x_.values + 1;
  refused("tensor x is not aligned to 64 bytes");
  x_.dl.data = x_.values;
  x_.dl.strides = nullptr;
  refused("tensor x is without shape or strides");
  x_.dl.strides = x_.strides;
  x_.dl.byte_offset = 4;
  refused("tensor x has a byte_offset");
  x_.dl.byte_offset = 0;
  x_.strides[0] = 2;
  refused("tensor x is not row-major");
  x_.strides[0] = 1;
  call_.n_saved = 0;
  refused("n_saved is 0; there are 1 by param_specs and the last plan");
  call_ = good;
  call_.pad_mask = &y_.dl;
  refused("pad_mask is given to a mixer without GRAFT_CAP_PAD_MASK");
  call_ = good;
  call_.y = nullptr;
  refused("y = NULL is given to a mixer without GRAFT_CAP_TAPS_ONLY");
  call_ = good;
  call_.y = &x_.dl;
  refused("output y overlaps x");
  call_ = good;
  call_.saved = nullptr;
  exec_.flags = GRAFT_X_TRAINING;
  refused("saved is NULL, but the call is one of training");
  exec_.flags = 0;
  call_ = good;
  w_.shape[0] = 2;
  refused("parameter 'w' has another shape than the mixer asked for");
  w_.shape[0] = 3;
  exec_.workspace = nullptr;
  refused("a workspace of 16 bytes is NULL");
  exec_.workspace = workspace_ + 8;
  refused("the workspace is not aligned to 256 bytes");
  backward_.dstate_in = states_out_;
  expect_host_blamed([&] { backward(); },
                     "mixer 'x'), backward: a gradient of the state is given to a mixer without "
                     "GRAFT_CAP_STATEFUL_GRAD");
}

TEST_F(StrictMixer, ParametersSetByNameAreGuarded) {
  DLTensor* const params[] = {&w_.dl};
  const double values[] = {4};
  const auto set = [&] { mixer_->set_natural(GRAFT_NATURAL_HALF_LIFE, values, params, {}); };
  set();
  EXPECT_EQ(w_.values[2], 5);
  plugin_.params = [](DLTensor* const* given) { data(given[0])[3] = 1; };
  expect_plugin_blamed(set, "mixer 'x'), graft.mixer-domain: wrote past the end of parameter 'w'");
}

// ---------------------------------------------------------------- objectives

class StrictObjective : public StrictCall {
 protected:
  StrictObjective() {
    objective_ = library_->create_objective(library_->components()[2], {});
    loss_.dl.ndim = 0;
    args_.n_signals = 1;
    args_.signals = signals_;
    args_.grads = grads_;
    args_.loss = &loss_.dl;
    args_.metric_ctx = this;
    args_.metric = [](void* self, const char*, const DLTensor* scalar) {
      static_cast<StrictObjective*>(self)->metric_ = *data(scalar);
    };
  }
  void run() { objective_->run(exec_, args_); }

  Tensor signal_{4, 1, 6}, grad_{4}, loss_{1};
  const DLTensor* signals_[1] = {&signal_.dl};
  DLTensor* grads_[1] = {&grad_.dl};
  float metric_ = 0;
  graft_objective_args args_ = sized<graft_objective_args>();
  std::unique_ptr<Objective> objective_;
};

void report(const graft_objective_args& args, float value, std::int32_t ndim = 0) {
  std::int64_t one = 1;
  const DLTensor scalar{&value, {kDLCPU, 0}, ndim, {kDLFloat, 32, 1}, &one, &one, 0};
  args.metric(args.metric_ctx, "m", &scalar);
}

TEST_F(StrictObjective, BothSidesAreChecked) {
  using Args = const graft_objective_args&;
  plugin_.loss = [](Args args) { report(args, 11); };
  run();
  EXPECT_EQ(loss_.values[0], 6);
  EXPECT_EQ(grad_.values[3], 1);
  EXPECT_EQ(metric_, 11);
  const std::pair<std::function<void(Args)>, std::string> cases[] = {
      {[](Args a) { data(a.signals[0])[0] = 1; }, "changed its input signal 's'"},
      {[](Args a) { data(a.grads[0])[4] = 1; }, "wrote past the end of gradient of signal 's'"},
      {[](Args a) { std::memset(a.loss->data, 0xFF, 4); }, "did not write the loss"},
      {[](Args a) { report(a, 1, 1); }, "gives metric 'm' that is no scalar of float32 or float64"},
      {[](Args a) { a.metric(a.metric_ctx, "m", nullptr); },
       "calls metric() without a name or number (NULL)"},
      {[](Args a) { std::thread([&] { report(a, 1); }).join(); },
       "calls metric() on another thread than run()'s"}};
  for (const auto& [hook, message] : cases) {
    plugin_.loss = hook;
    expect_plugin_blamed([&] { run(); }, "objective 'x'), run: " + message);
  }
  plugin_.loss = nullptr;
  signals_[0] = nullptr;
  expect_host_blamed([&] { run(); }, "objective 'x'), run: the signal 's' is not given");
}

// ---------------------------------------------------------------- initializers

class StrictInitializer : public StrictCall {
 protected:
  StrictInitializer() {
    initializer_ = library_->create_initializer(library_->components()[1], {});
    exec_.workspace = nullptr;
    exec_.workspace_bytes = 0;
    args_.n_teacher = args_.n_student = 1;
    args_.n_batches = 1;
    args_.layer = &layer_;
    args_.teacher = teachers_;
    args_.student = students_;
    args_.student_written = written_;
    args_.mixer = &Tables::all().mixer;
    args_.ctx = this;
    args_.next_batch = [](void* ctx, const graft_named_tensor* const** out, std::uint32_t* n,
                          graft_error*) {
      *out = static_cast<StrictInitializer*>(ctx)->batch_;
      *n = 1;
      return graft_status{GRAFT_OK};
    };
    args_.rewind = [](void*, graft_error*) { return graft_status{GRAFT_OK}; };
    args_.probe = [](void* ctx, std::uint32_t, const char* const*, const DLTensor** out,
                     graft_error*) {
      *out = &static_cast<StrictInitializer*>(ctx)->student_.dl;
      return graft_status{GRAFT_OK};
    };
  }
  static graft_named_tensor named(const char* name, Tensor& tensor) {
    auto out = sized<graft_named_tensor>();
    out.name = name;
    out.tensor = &tensor.dl;
    return out;
  }
  void run() { initializer_->run(exec_, args_); }

  Tensor teacher_{3, 1, 1}, student_{3, 1, 2}, signal_{4, 1, 3};
  graft_named_tensor from_ = named("q", teacher_), to_ = named("w", student_),
                     input_ = named("block.input", signal_);
  const graft_named_tensor *teachers_[1] = {&from_}, *students_[1] = {&to_}, *batch_[1] = {&input_};
  std::uint8_t written_[1] = {0};
  graft_layer_info layer_ = sized<graft_layer_info>();
  graft_init_args args_ = sized<graft_init_args>();
  std::unique_ptr<Initializer> initializer_;
};

const graft_named_tensor* next(const graft_init_args& args) {
  const graft_named_tensor* const* signals = nullptr;
  std::uint32_t n = 0;
  args.next_batch(args.ctx, &signals, &n, nullptr);
  return n == 0 ? nullptr : signals[0];
}

TEST_F(StrictInitializer, ResultsArriveAndAProbeSeesThem) {
  float probed = 0;
  plugin_.init = [&](const graft_init_args& args) {
    EXPECT_EQ(data(next(args)->tensor)[3], 3);
    const DLTensor* out = nullptr;
    args.probe(args.ctx, 1, nullptr, &out, nullptr);
    probed = data(out)[2];
  };
  run();
  EXPECT_EQ(probed, 7);
  EXPECT_EQ(student_.values[2], 7);
  EXPECT_EQ(written_[0], 1);
}

TEST_F(StrictInitializer, WhatItBreaksIsNamed) {
  using Args = const graft_init_args&;
  const std::pair<std::function<void(Args)>, std::string> cases[] = {
      {[](Args a) { data(a.student[0]->tensor)[3] = 1; }, "wrote past the end of parameter 'w'"},
      {[](Args a) { a.student_written[0] = 0; },
       "changed parameter 'w', but not its student_written"},
      {[](Args a) { a.student_written[1] = 1; }, "wrote past the end of student_written"},
      {[](Args a) { data(a.teacher[0]->tensor)[0] = 5; }, "changed its input teacher's tensor 'q'"},
      {[](Args a) { data(next(a)->tensor)[0] = 5; }, "changed its input signal 'block.input'"},
      {[](Args a) {
         data(next(a)->tensor)[0] = 5;
         next(a);
       },
       "changed its input signal 'block.input'"},
      {[](Args a) { std::thread([&] { a.rewind(a.ctx, nullptr); }).join(); },
       "calls rewind() on another thread than run()'s"}};
  for (const auto& [hook, message] : cases) {
    plugin_.init = hook;
    std::fill_n(student_.values, 3, 2.0f);
    expect_plugin_blamed([&] { run(); }, "initializer 'x'), run: " + message);
  }
  plugin_.init = nullptr;
  args_.mixer = nullptr;
  expect_host_blamed([&] { run(); }, "initializer 'x'), run: mixer is NULL");
}

// ---------------------------------------------------------------- threads, the end

TEST_F(StrictInitializer, TwoCallsAtOnceIntoOneInstance) {
  plugin_.init = [&](const graft_init_args&) {
    std::thread([&] {
      expect_host_blamed([&] { run(); },
                         "initializer 'x'), run: while another call runs that must "
                         "not run beside it");
    }).join();
  };
  run();
  plugin_.init = nullptr;
  EXPECT_NO_THROW(run()) << "free again afterwards";
}

// What is logged while it lives, without times.
class Log {
 public:
  Log() : before_(spdlog::default_logger()) {
    const auto logger = std::make_shared<spdlog::logger>(
        "t", std::make_shared<spdlog::sinks::ostream_sink_mt>(lines_));
    logger->set_pattern("%l %v");
    spdlog::set_default_logger(logger);
  }
  ~Log() { spdlog::set_default_logger(before_); }
  std::string text() const { return lines_.str(); }

 private:
  std::ostringstream lines_;
  std::shared_ptr<spdlog::logger> before_;
};

TEST_F(StrictCall, CallsToTheHostBehindTheLastDeinitAreLogged) {
  Log log;
  auto second = PluginLibrary::negotiate(&Tables::negotiate, "/x.so", host_);
  const graft_host* const host = plugin_.host;
  const auto* const pool =
      static_cast<const graft_host_parallel*>(host->get_extension(host, GRAFT_HOST_EXT_PARALLEL));
  plugin_.deinit = [&] { host->log(host, GRAFT_LOG_INFO, "bye"); };
  second.reset();
  host->should_stop(host);  // the other one is still there
  EXPECT_EQ(log.text(), "info org.example.x: bye\n");
  library_.reset();
  EXPECT_EQ(log.text(), "info org.example.x: bye\ninfo org.example.x: bye\n");
  pool->num_threads(host);
  EXPECT_THAT(log.text(),
              HasSubstr("warning org.example.x: the plugin misbehaves: calls the host's "
                        "host-parallel.num_threads after its last deinit"));
  host->log(host, GRAFT_LOG_INFO, "still here");
  EXPECT_THAT(log.text(), HasSubstr("calls the host's log after its last deinit"));
}

TEST_F(StrictCall, TwoThreadsInOneLibrary) {
  Log log;
  std::unique_ptr<OneAtATime> init;
  std::thread([&] {
    const auto* const key = reinterpret_cast<const void*>(&Tables::negotiate);
    init = std::make_unique<OneAtATime>(key, "the other's init");
  }).join();
  EXPECT_GRAFT_ERROR(PluginLibrary::negotiate(&Tables::negotiate, "/x.so", host_),
                     ErrorKind::internal,
                     HasSubstr("the host: calls plugin '/x.so', negotiation and init: while"));
  EXPECT_EQ(log.text(), "");
  library_.reset();
  EXPECT_THAT(log.text(), HasSubstr("error the host: calls plugin 'org.example.x', deinit: while"));
  init.reset();
  EXPECT_NO_THROW(PluginLibrary::negotiate(&Tables::negotiate, "/x.so", host_));
}

}  // namespace
}  // namespace graft
