// Plugins written with the C++ SDK and in plain C, seen from the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "core/base/testing.h"
#include "core/loader/registry.h"
#include "graft/plugin.hpp"
#include "tests/abi/support.h"

namespace graft {
namespace {

using ::testing::AllOf;
using testing::cpu_exec;
using testing::CpuTensor;
using ::testing::ElementsAre;
using testing::fixture;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::plan_for;
using testing::sized;
using testing::small_layer;

class SdkTest : public ::testing::Test {
 protected:
  std::unique_ptr<Mixer> mixer(const std::string& name,
                               const std::map<std::string, OptionValue>& options = {},
                               std::int64_t model_dim = 4) {
    return registry_.create_mixer(name, small_layer(model_dim), options);
  }
  HostServices host_;
  PluginRegistry registry_{{fixture("test_kit"), fixture("test_identity"), fixture("test_leaky")},
                           host_};
};

// ---------------------------------------------------------------- what a library says of itself

TEST_F(SdkTest, LibraryAndItsComponents) {
  registry_.scan();
  const auto libraries = registry_.libraries();
  ASSERT_EQ(libraries.size(), 3u);
  const PluginLibrary& kit = *libraries[0];
  EXPECT_EQ(kit.id(), "org.example.kit");
  EXPECT_EQ(kit.version(), "1.2.3");
  EXPECT_EQ(kit.license(), "MIT");
  EXPECT_EQ(kit.build_tags(), "");
  EXPECT_EQ(kit.abi(), GRAFT_ABI_CURRENT);
  std::vector<std::string> labels;
  for (const Component& component : kit.components()) labels.push_back(component.label());
  EXPECT_THAT(labels, ElementsAre("mixer 'thrower'", "mixer 'options'", "initializer 'copy'",
                                  "objective 'square'"));
  EXPECT_TRUE(kit.components()[0].supports({kDLFloat, 32, 1}, kDLCPU));
  EXPECT_FALSE(kit.components()[0].supports({kDLBfloat, 16, 1}, kDLCPU));
  EXPECT_FALSE(kit.components()[0].supports({kDLFloat, 32, 1}, kDLCUDA));
}

TEST_F(SdkTest, ParameterSpecsAndPlan) {
  const auto thrower = mixer("thrower");
  EXPECT_EQ(thrower->param_schema(), 3u);
  ASSERT_EQ(thrower->param_specs().size(), 2u);
  const graft_param_spec &w = *thrower->param_specs()[0], &frozen = *thrower->param_specs()[1];
  EXPECT_STREQ(w.name, "w");
  EXPECT_STREQ(w.axes, "a,b");
  EXPECT_EQ(w.flags, GRAFT_P_TRAINABLE);
  EXPECT_EQ(w.init, GRAFT_INIT_EYE);
  EXPECT_EQ(frozen.flags, GRAFT_P_FP32);
  EXPECT_EQ(frozen.init_a, 0.5);
  EXPECT_STREQ(frozen.role, "org.example.role.thing");

  const graft_plan_out plan = thrower->plan(plan_for(2, 3));
  ASSERT_EQ(plan.n_saved, 1u);
  EXPECT_EQ(plan.saved[0]->shape[0], 2);
  EXPECT_EQ(plan.n_state, 0u);
  ASSERT_EQ(plan.n_taps, 1u);
  EXPECT_STREQ(plan.taps[0]->name, GRAFT_TAP_PRE_OUTPUT);
  EXPECT_EQ(plan.taps[0]->dtype.code, kDLBfloat);
  EXPECT_EQ(plan.workspace_backward, 128u);
}

TEST_F(SdkTest, UnknownExtensionsAreNull) {
  const auto thrower = mixer("thrower");
  graft_mixer* const handle = thrower->get();
  EXPECT_EQ(*static_cast<const int*>(handle->v->get_extension(handle, "org.example.answer/1")), 42);
  for (const char* id :
       {"", "org.example.answer/2", "org.example.answer/1x", "graft.mixer-domain/11"}) {
    EXPECT_EQ(handle->v->get_extension(handle, id), nullptr) << id;
  }
  EXPECT_EQ(handle->v->get_extension(handle, nullptr), nullptr);
}

// ---------------------------------------------------------------- errors

TEST_F(SdkTest, WhateverIsThrownBecomesAMessage) {
  const auto call = sized<graft_mixer_forward>();
  struct Case {
    const char *thrown, *text;
  };
  const Case cases[] = {
      {"status", "tensor:x: is out of range"},
      {"ok_status", "thrown, yet fine"},
      {"exception", "the author forgot this"},
      {"bad_alloc", "out of memory"},
      {"int", "an exception that does not derive from std::exception"},
      {"torch", "mat1 and mat2 shapes cannot be multiplied"},
  };
  for (const auto& [thrown, text] : cases) {
    SCOPED_TRACE(thrown);
    const auto make = [&](const char* where) {
      return mixer("thrower", {{"thrown", thrown}, {"where", std::string(where)}});
    };
    const auto message = [&](const char* where) {
      return std::string("mixer 'thrower', ") + where + ": " + text;
    };
    EXPECT_GRAFT_ERROR(make("create"), ErrorKind::plugin, message("create"));
    // The wrapper asks for the specs while it makes the instance.
    EXPECT_GRAFT_ERROR(make("param_specs"), ErrorKind::plugin, message("create"));
    EXPECT_GRAFT_ERROR(make("plan")->plan(plan_for(1, 1)), ErrorKind::plugin, message("plan"));
    auto two_params = call;
    two_params.n_params = 2;
    CpuTensor y({1});
    two_params.y = y.dl();
    EXPECT_GRAFT_ERROR(make("forward")->forward(cpu_exec(), two_params), ErrorKind::plugin,
                       message("forward"));
    auto backward = sized<graft_mixer_backward>();
    backward.fwd = &two_params;
    EXPECT_GRAFT_ERROR(make("backward")->backward(cpu_exec(), backward), ErrorKind::plugin,
                       message("backward"));
  }
}

TEST_F(SdkTest, StatusesReachTheCallerAsTheyAre) {
  const auto thrower = mixer("thrower", {{"thrown", "status"}});
  graft_mixer* const handle = thrower->get();
  CpuTensor y({1});
  auto call = sized<graft_mixer_forward>();
  call.n_params = 2;
  call.y = y.dl();
  const auto exec = cpu_exec();
  auto error = sized<graft_error>();
  EXPECT_EQ(handle->v->forward(handle, &exec, &call, &error), GRAFT_OUT_OF_RANGE);
  EXPECT_EQ(error.code, GRAFT_OUT_OF_RANGE);
  EXPECT_STREQ(error.where, "tensor:x");
  EXPECT_STREQ(error.message, "is out of range");
  // A caller that wants no words, or has no room for them, gets the status alone.
  EXPECT_EQ(handle->v->forward(handle, &exec, &call, nullptr), GRAFT_OUT_OF_RANGE);
  graft_error small{};
  small.struct_size = 8;
  EXPECT_EQ(handle->v->forward(handle, &exec, &call, &small), GRAFT_OUT_OF_RANGE);
  EXPECT_EQ(small.message[0], '\0');
}

TEST_F(SdkTest, WrongNumberOfParametersIsRefused) {
  const auto thrower = mixer("thrower");
  auto call = sized<graft_mixer_forward>();
  call.n_params = 1;
  EXPECT_GRAFT_ERROR(thrower->forward(cpu_exec(), call), ErrorKind::plugin,
                     "mixer 'thrower', forward: params: expected 2 parameters, got 1");
}

TEST(SdkStatus, LongTextIsCutBetweenCharacters) {
  auto error = sized<graft_error>();
  sdk::detail::fill_error(&error, GRAFT_INTERNAL, std::string(500, 'w'),
                          std::string(886, 'm') + "é");
  EXPECT_EQ(std::string(error.where).size(), 127u);
  EXPECT_EQ(std::string(error.message), std::string(886, 'm'));
  sdk::detail::fill_error(&error, GRAFT_INTERNAL, "", std::string(885, 'm') + "é");
  EXPECT_EQ(std::string(error.message), std::string(885, 'm') + "é");
}

// ---------------------------------------------------------------- options and layer

TEST_F(SdkTest, OptionsArriveAsTheirTypes) {
  const std::string call = "mixer 'options', plan: ";
  EXPECT_GRAFT_ERROR(mixer("options")->plan(plan_for(1, 1)), ErrorKind::plugin,
                     call + "1 3 0.5 one 2 1 llama 2");
  const std::map<std::string, OptionValue> given{
      {"flag", false},
      {"whole", std::int64_t{10}},
      {"part", std::int64_t{1}},
      {"word", std::string("two")},
      {"wholes", std::vector<std::int64_t>{}},
      {"parts", std::vector<std::int64_t>{1, 2, 3}},
  };
  EXPECT_GRAFT_ERROR(mixer("options", given)->plan(plan_for(1, 1)), ErrorKind::plugin,
                     call + "0 10 1 two 0 3 llama 2");
}

TEST(SdkConfig, WrongQuestionsAreErrors) {
  const char* const keys[] = {"whole", "word"};
  graft_value values[2] = {{GRAFT_INT, 1, {.i = 300}}, {GRAFT_STRING, 1, {.s = "x"}}};
  const graft_config c{sizeof c, 2, keys, values};
  const sdk::Config config(&c);
  EXPECT_EQ(config.get<int16_t>("whole"), 300);
  const auto message = [&](auto&& ask) -> std::string {
    try {
      ask();
    } catch (const sdk::Status& status) {
      return status.where() + ": " + status.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([&] { config.get<int8_t>("whole"); }),
            "config.whole: 300 does not fit into 8 bits");
  EXPECT_EQ(message([&] { config.get<double>("whole"); }),
            "config.whole: expected float, got integer");
  EXPECT_EQ(message([&] { config.get<bool>("word"); }), "config.word: expected bool, got string");
  EXPECT_EQ(message([&] { config.get<bool>("wrod"); }),
            "config.wrod: the host gave no value for this option");
  EXPECT_FALSE(config.has("wrod"));
}

// ---------------------------------------------------------------- small mixers

// Runs a mixer without state over x [B,T,D].
std::vector<float> run(Mixer& mixer, CpuTensor& x, std::int64_t batch, std::int64_t tokens,
                       std::int64_t model, const DLTensor* param = nullptr) {
  const graft_plan_out plan = mixer.plan(plan_for(batch, tokens));
  CpuTensor y({batch, tokens, model}, NAN);
  auto call = sized<graft_mixer_forward>();
  call.x = x.dl();
  call.y = y.dl();
  call.n_params = param == nullptr ? 0 : 1;
  call.params = &param;
  call.n_state = plan.n_state;
  call.n_taps = plan.n_taps;
  mixer.forward(cpu_exec(), call);
  return y.copy();
}

TEST_F(SdkTest, IdentityInC) {
  const auto identity = mixer("identity", {{"scale", 2.0}});
  EXPECT_THAT(identity->param_specs(), IsEmpty());
  EXPECT_TRUE(identity->has_step());
  CpuTensor x({1, 2, 2}, {1, 2, 3, 4}), dx({1, 2, 2}, NAN), empty({1, 0, 2});
  EXPECT_THAT(run(*identity, x, 1, 2, 2), ElementsAre(2, 4, 6, 8));
  EXPECT_THAT(run(*identity, empty, 1, 0, 2), IsEmpty());

  const auto fwd = sized<graft_mixer_forward>();
  auto backward = sized<graft_mixer_backward>();
  backward.fwd = &fwd;
  backward.dy = x.dl();
  backward.dx = dx.dl();
  identity->backward(cpu_exec(), backward);
  EXPECT_THAT(dx.copy(), ElementsAre(2, 4, 6, 8));

  auto wrong = plan_for(1, 1);
  wrong.dtype = {kDLBfloat, 16, 1};
  EXPECT_GRAFT_ERROR(identity->plan(wrong), ErrorKind::plugin,
                     "mixer 'identity', plan: plan.dtype: only float32 is there");
  auto call = sized<graft_mixer_forward>();
  call.x = x.dl();
  EXPECT_GRAFT_ERROR(identity->forward(cpu_exec(), call), ErrorKind::plugin,
                     "mixer 'identity', forward: tensor:x: a tensor is missing (NULL)");
  EXPECT_GRAFT_ERROR(
      mixer("identity", {{"scale", 1000.0}}), ErrorKind::usage,
      "mixer 'identity', option 'scale': expected a number from -100.0 to 100.0, got 1000.0");
}

// The leaky integrator worked by hand: a = 1/2.
TEST_F(SdkTest, LeakyForwardStateAndStep) {
  const auto leaky = mixer("leaky", {{"half_life", std::int64_t{1}}}, 1);
  ASSERT_EQ(leaky->param_specs().size(), 1u);
  const graft_param_spec& spec = *leaky->param_specs()[0];
  EXPECT_STREQ(spec.domain, "logit");
  EXPECT_NEAR(spec.init_a, 0.0, 1e-12);
  CpuTensor decay({1}, {0}), x({1, 3, 1}, {4, 4, 8});
  EXPECT_THAT(run(*leaky, x, 1, 3, 1, decay.dl()), ElementsAre(2, 3, 5.5));

  // Two tokens, then one from the state they left, in place.
  CpuTensor head({1, 2, 1}, {4, 4}), tail({1, 1, 1}, {8}), y2({1, 2, 1}), y1({1, 1, 1}),
      state({1, 1}, NAN);
  const DLTensor* params[] = {decay.dl()};
  DLTensor* state_out[] = {state.dl()};
  const DLTensor* state_in[] = {state.dl()};
  auto call = sized<graft_mixer_forward>();
  call.n_params = call.n_state = 1;
  call.params = params;
  call.x = head.dl();
  call.y = y2.dl();
  call.state_out = state_out;
  ASSERT_EQ(leaky->plan(plan_for(1, 2)).n_state, 1u);
  leaky->forward(cpu_exec(), call);
  EXPECT_THAT(state.copy(), ElementsAre(3));
  leaky->plan(plan_for(1, 1));
  call.x = tail.dl();
  call.y = y1.dl();
  call.state_in = state_in;
  leaky->step(cpu_exec(), call);
  EXPECT_THAT(y1.copy(), ElementsAre(5.5));
  EXPECT_THAT(state.copy(), ElementsAre(5.5));
}

TEST_F(SdkTest, LeakyBackwardIsTheDerivative) {
  const auto leaky = mixer("leaky", {{"heads", std::int64_t{2}}}, 4);
  const std::int64_t B = 2, T = 5, D = 4;
  CpuTensor decay({2}, {0.3f, -0.7f}), x({B, T, D}), w({B, T, D}), y({B, T, D}), saved({B, T, D});
  for (std::size_t i = 0; i < x.values().size(); ++i) {
    x.values()[i] = std::sin(static_cast<float>(i));
    w.values()[i] = std::cos(static_cast<float>(3 * i));
  }
  const graft_plan_out plan = leaky->plan(plan_for(B, T, GRAFT_X_TRAINING));
  ASSERT_EQ(plan.n_saved, 1u);
  const DLTensor* params[] = {decay.dl()};
  DLTensor* saved_list[] = {saved.dl()};
  auto call = sized<graft_mixer_forward>();
  call.n_params = call.n_saved = call.n_state = 1;
  call.params = params;
  call.saved = saved_list;
  call.x = x.dl();
  call.y = y.dl();
  leaky->forward(cpu_exec(GRAFT_X_TRAINING), call);

  CpuTensor dx({B, T, D}, NAN), ddecay({2}, {100, 100});
  DLTensor* dparams[] = {ddecay.dl()};
  auto backward = sized<graft_mixer_backward>();
  backward.fwd = &call;
  backward.dy = w.dl();
  backward.dx = dx.dl();
  backward.dparams = dparams;
  leaky->backward(cpu_exec(GRAFT_X_TRAINING | GRAFT_X_ACCUMULATE), backward);
  const auto accumulated = ddecay.copy();
  leaky->backward(cpu_exec(GRAFT_X_TRAINING), backward);
  EXPECT_NEAR(accumulated[0], 100 + ddecay.values()[0], 1e-4);

  // Against central differences of sum(w * y).
  const auto loss = [&] {
    double sum = 0;
    const auto out = run(*leaky, x, B, T, D, decay.dl());
    for (std::size_t i = 0; i < out.size(); ++i) sum += static_cast<double>(w.values()[i]) * out[i];
    return sum;
  };
  const auto slope = [&](float& value) {
    const float before = value, h = 1e-2f;
    value = before + h;
    const double up = loss();
    value = before - h;
    const double down = loss();
    value = before;
    return (up - down) / (2.0 * static_cast<double>(h));
  };
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_NEAR(ddecay.values()[i], slope(decay.values()[i]), 2e-4) << i;
  for (std::size_t i = 0; i < x.values().size(); i += 3)
    EXPECT_NEAR(dx.values()[i], slope(x.values()[i]), 2e-4) << i;
}

TEST_F(SdkTest, NaturalValues) {
  const auto leaky = mixer("leaky", {{"heads", std::int64_t{2}}}, 2);
  CpuTensor decay({2}, {9, 9});
  DLTensor* params[] = {decay.dl()};
  std::uint8_t written[1] = {0};
  const double half_lives[] = {1.0, std::numeric_limits<double>::infinity()};
  EXPECT_TRUE(leaky->set_natural(GRAFT_NATURAL_HALF_LIFE, half_lives, params, written));
  EXPECT_EQ(written[0], 1);
  EXPECT_NEAR(decay.values()[0], 0, 1e-6);
  EXPECT_EQ(decay.values()[1], std::numeric_limits<float>::infinity());
  // Half of what was there at token 0 is left 1 token later, and all of it where nothing decays.
  CpuTensor x({1, 2, 2}, {8, 8, 0, 0});
  EXPECT_THAT(run(*leaky, x, 1, 2, 2, decay.dl()), ElementsAre(4, 0, 2, 0));

  written[0] = 0;
  EXPECT_FALSE(leaky->set_natural(GRAFT_NATURAL_WRITE_GATE, half_lives, params, written));
  EXPECT_EQ(written[0], 0);
  const double wrong[] = {1.0};
  EXPECT_GRAFT_ERROR(
      leaky->set_natural(GRAFT_NATURAL_HALF_LIFE, wrong, params, written), ErrorKind::plugin,
      "mixer 'leaky', setting 'half-life': natural:half-life: expected 2 values, got 1");
  const double zero[] = {0.0, 1.0};
  EXPECT_GRAFT_ERROR(leaky->set_natural(GRAFT_NATURAL_HALF_LIFE, zero, params, {}),
                     ErrorKind::plugin, HasSubstr("expected more than 0, got 0"));
  EXPECT_FALSE(leaky->migrate(0, {{"decay", decay.dl()}}, params));
}

TEST_F(SdkTest, AuthorsErrorsNameOptionAndTensor) {
  EXPECT_GRAFT_ERROR(
      mixer("leaky", {{"heads", std::int64_t{3}}}, 4), ErrorKind::plugin,
      "mixer 'leaky', create: config.heads: the model's width 4 is no multiple of 3");
  const auto leaky = mixer("leaky");
  CpuTensor decay({1}), x({1, 2, 3}), y({1, 2, 4});
  const DLTensor* params[] = {decay.dl()};
  auto call = sized<graft_mixer_forward>();
  call.n_params = 1;
  call.params = params;
  call.y = y.dl();
  EXPECT_GRAFT_ERROR(leaky->forward(cpu_exec(), call), ErrorKind::plugin,
                     "mixer 'leaky', forward: tensor:x: is missing (NULL)");
  call.x = x.dl();
  EXPECT_GRAFT_ERROR(leaky->forward(cpu_exec(), call), ErrorKind::plugin,
                     "mixer 'leaky', forward: tensor:x: expected shape [?, ?, 4], got [1, 2, 3]");
}

// ---------------------------------------------------------------- DLPack's corners

std::string tensor_message(const DLTensor& tensor) {
  try {
    sdk::data<const float>(tensor, "x");
  } catch (const sdk::Status& status) {
    return status.where() + ": " + status.what();
  }
  return "";
}

TEST(SdkTensor, StridesNullMeansContiguous) {
  CpuTensor x({2, 3}, {0, 1, 2, 3, 4, 5});
  x.dl()->strides = nullptr;
  EXPECT_TRUE(sdk::is_contiguous(*x.dl()));
  EXPECT_EQ(sdk::stride_of(*x.dl(), 0), 3);
  EXPECT_EQ(sdk::data<const float>(*x.dl(), "x")[5], 5);
}

TEST(SdkTensor, Scalar) {
  CpuTensor x({}, {7});
  x.dl()->shape = x.dl()->strides = nullptr;
  EXPECT_EQ(sdk::numel(*x.dl()), 1);
  EXPECT_EQ(sdk::shape_string(*x.dl()), "[]");
  EXPECT_EQ(sdk::data<const float>(*x.dl(), "x")[0], 7);
}

TEST(SdkTensor, ByteOffset) {
  CpuTensor x({4}, {0, 1, 2, 3});
  std::int64_t two = 2;
  x.dl()->shape = &two;
  x.dl()->byte_offset = 2 * sizeof(float);
  EXPECT_THAT(sdk::data<const float>(*x.dl(), "x"), ElementsAre(2, 3));
}

TEST(SdkTensor, SliceIsRefused) {
  CpuTensor x({2, 2});
  std::int64_t strides[] = {4, 2};
  x.dl()->strides = strides;
  EXPECT_FALSE(sdk::is_contiguous(*x.dl()));
  EXPECT_EQ(sdk::stride_of(*x.dl(), 1), 2);
  EXPECT_EQ(tensor_message(*x.dl()),
            "tensor:x: expected contiguous memory, got strides [4, 2] for shape [2, 2]");
}

TEST(SdkTensor, StrideOfAnAxisOfOneIsFree) {
  CpuTensor x({3, 1, 2});
  std::int64_t strides[] = {2, 77, 1};
  x.dl()->strides = strides;
  EXPECT_TRUE(sdk::is_contiguous(*x.dl()));
}

TEST(SdkTensor, Empty) {
  CpuTensor x({2, 0});
  std::int64_t strides[] = {99, 99};
  x.dl()->strides = strides;
  x.dl()->byte_offset = 8;
  EXPECT_TRUE(sdk::is_contiguous(*x.dl()));
  EXPECT_TRUE(sdk::data<const float>(*x.dl(), "x").empty());
}

TEST(SdkTensor, WrongTypeDeviceOrNoData) {
  CpuTensor x({2});
  x.dl()->dtype = sdk::bfloat16;
  EXPECT_EQ(tensor_message(*x.dl()), "tensor:x: expected dtype float32, got bfloat16");
  EXPECT_EQ(sdk::byte_size(*x.dl()), 4u);
  x.dl()->dtype = {kDLFloat, 32, 4};
  EXPECT_EQ(tensor_message(*x.dl()), "tensor:x: expected dtype float32, got float32x4");
  x.dl()->dtype = sdk::float32;
  x.dl()->data = nullptr;
  EXPECT_EQ(tensor_message(*x.dl()), "tensor:x: has no data for shape [2]");
  x.dl()->device = {kDLCUDA, 0};
  EXPECT_EQ(tensor_message(*x.dl()), "tensor:x: expected a tensor on device type 1, got 2");
}

TEST(SdkTensor, TypeNames) {
  EXPECT_EQ(sdk::dtype_name(sdk::uint8), "uint8");
  EXPECT_EQ(sdk::dtype_name(sdk::int64), "int64");
  EXPECT_EQ(sdk::dtype_name({kDLBool, 8, 1}), "bool8");
  EXPECT_EQ(sdk::dtype_name({99, 8, 1}), "dtype(99)8");
  EXPECT_TRUE(sdk::same_dtype(sdk::dtype_of<std::int32_t>(), sdk::int32));
  EXPECT_TRUE(sdk::same_dtype(sdk::dtype_of<const std::uint8_t>(), sdk::uint8));
}

// ---------------------------------------------------------------- initializer

// Three calibration batches, of which the last lacks the signal when `drop_last`.
struct Feed {
  CpuTensor x{{2}, {1, 3}}, y{{1}, {0}};
  graft_named_tensor signal = sized<graft_named_tensor>();
  const graft_named_tensor* signals[1] = {&signal};
  int at = 0, rewinds = 0, probes = 0;
  bool drop_last = false;

  Feed() {
    signal.name = GRAFT_SIGNAL_BLOCK_INPUT;
    signal.tensor = x.dl();
  }
  static graft_status next(void* ctx, const graft_named_tensor* const** out, std::uint32_t* n,
                           graft_error*) {
    auto& feed = *static_cast<Feed*>(ctx);
    if (feed.at == 3) return GRAFT_NOT_FOUND;
    *out = feed.signals;
    *n = ++feed.at == 3 && feed.drop_last ? 0 : 1;
    return GRAFT_OK;
  }
  static graft_status rewind(void* ctx, graft_error*) {
    auto& feed = *static_cast<Feed*>(ctx);
    feed.at = 0;
    ++feed.rewinds;
    return GRAFT_OK;
  }
  static graft_status probe(void* ctx, std::uint32_t n, const char* const* taps,
                            const DLTensor** out, graft_error* error) {
    auto& feed = *static_cast<Feed*>(ctx);
    ++feed.probes;
    if (n != 1 || std::string(taps[0]) != "y") {
      std::snprintf(error->message, sizeof error->message, "no such tap");
      return GRAFT_NOT_FOUND;
    }
    out[0] = feed.y.dl();
    return GRAFT_OK;
  }
};

class InitializerTest : public SdkTest {
 protected:
  InitializerTest() {
    teacher_.role = student_.role = GRAFT_ROLE_QUERY;
    teacher_.name = "q_proj";
    student_.name = "q";
    teacher_.tensor = from_.dl();
    student_.tensor = to_.dl();
    args_.n_teacher = args_.n_student = 1;
    args_.layer = &layer_;
    args_.teacher = teachers_;
    args_.student = students_;
    args_.student_written = &written_;
    args_.ctx = &feed_;
    args_.next_batch = &Feed::next;
    args_.rewind = &Feed::rewind;
    args_.probe = &Feed::probe;
    args_.n_batches = 3;
  }
  Feed feed_;
  CpuTensor from_{{2}, {1, 2}}, to_{{2}, {0, 0}};
  graft_named_tensor teacher_ = sized<graft_named_tensor>(), student_ = sized<graft_named_tensor>();
  const graft_named_tensor *teachers_[1] = {&teacher_}, *students_[1] = {&student_};
  std::uint8_t written_ = 0;
  graft_layer_info layer_ = small_layer();
  graft_init_args args_ = sized<graft_init_args>();
};

TEST_F(InitializerTest, NeedsDependOnTheOptions) {
  const auto plain = registry_.create_initializer("copy");
  ASSERT_EQ(plain->needs().size(), 3u);
  EXPECT_STREQ(plain->needs()[0].role, GRAFT_ROLE_QUERY);
  EXPECT_EQ(plain->needs()[0].flags, GRAFT_NEED_TEACHER | GRAFT_NEED_REQUIRED);
  EXPECT_EQ(plain->needs()[1].flags, GRAFT_NEED_REQUIRED);
  EXPECT_EQ(plain->needs()[2].flags, 0u);
  EXPECT_TRUE(plain->calibration().empty());
  const auto calibrated = registry_.create_initializer("copy", {{"calibrate", true}});
  ASSERT_EQ(calibrated->calibration().size(), 1u);
  EXPECT_STREQ(calibrated->calibration()[0].name, GRAFT_SIGNAL_BLOCK_INPUT);
  EXPECT_EQ(calibrated->calibration()[0].flags, GRAFT_NEED_REQUIRED);
  EXPECT_EQ(calibrated->calibration()[0].max_sequences, 4u);
}

TEST_F(InitializerTest, CopiesAndMarks) {
  registry_.create_initializer("copy")->run(cpu_exec(), args_);
  EXPECT_THAT(to_.copy(), ElementsAre(1, 2));
  EXPECT_EQ(written_, 1);
  EXPECT_EQ(feed_.rewinds, 0);
}

TEST_F(InitializerTest, TwoPassesAndAProbe) {
  registry_.create_initializer("copy", {{"calibrate", true}})->run(cpu_exec(), args_);
  EXPECT_THAT(to_.copy(), ElementsAre(2, 4));
  EXPECT_EQ(feed_.rewinds, 2);
  EXPECT_EQ(feed_.probes, 6);
}

TEST_F(InitializerTest, SetsNaturalValuesOfAMixerInAnotherLibrary) {
  const auto leaky = mixer("leaky");
  args_.mixer = leaky->get();
  CpuTensor decay({1}, {9});
  student_.tensor = decay.dl();
  CpuTensor one({1}, {5});
  teacher_.tensor = one.dl();
  // The copy puts 5 into the only parameter, the half-life of 4 tokens then replaces it.
  registry_.create_initializer("copy")->run(cpu_exec(), args_);
  const double a = std::exp2(-1.0 / 4.0);
  EXPECT_NEAR(decay.values()[0], std::log(a / (1 - a)), 1e-6);
}

TEST_F(InitializerTest, MissingRolesAndSignalsAreNamed) {
  teacher_.role = GRAFT_ROLE_KEY;
  const auto copy = registry_.create_initializer("copy");
  EXPECT_GRAFT_ERROR(copy->run(cpu_exec(), args_), ErrorKind::plugin,
                     "initializer 'copy', run: role:graft.role.query: the teacher has no parameter "
                     "of this role; it "
                     "has: graft.role.key");
  feed_.drop_last = true;
  EXPECT_GRAFT_ERROR(
      registry_.create_initializer("copy", {{"calibrate", true}})->run(cpu_exec(), args_),
      ErrorKind::plugin,
      "initializer 'copy', run: signal:block.input: is not in this calibration batch, which has: "
      "none");
}

TEST(InitializerStop, ComesBackAsInterrupted) {
  HostServices::Settings settings;
  settings.should_stop = [] { return true; };
  // A copy of the file: the SDK keeps the first host it was given.
  const TempFolder folder;
  std::filesystem::copy_file(fixture("test_kit"), folder / "kit.so");
  HostServices host(settings);
  PluginRegistry registry({folder / "kit.so"}, host);
  Feed feed;
  auto args = sized<graft_init_args>();
  const auto layer = small_layer();
  args.layer = &layer;
  args.ctx = &feed;
  args.n_batches = 3;
  args.next_batch = &Feed::next;
  args.rewind = &Feed::rewind;
  EXPECT_GRAFT_ERROR(
      registry.create_initializer("copy", {{"calibrate", true}})->run(cpu_exec(), args),
      ErrorKind::interrupted, "initializer 'copy', run: stopped on request");
}

// ---------------------------------------------------------------- objective

TEST_F(SdkTest, Objective) {
  const auto square = registry_.create_objective("square");
  ASSERT_EQ(square->needs().size(), 2u);
  EXPECT_EQ(square->needs()[0].flags, GRAFT_NEED_REQUIRED | GRAFT_NEED_GRAD);
  EXPECT_EQ(square->needs()[1].flags, 0u);
  CpuTensor x({2}, {3, 4}), dx({2}, NAN), loss({}, {0});
  const DLTensor* signals[] = {x.dl(), nullptr};
  DLTensor* grads[] = {dx.dl(), nullptr};
  std::vector<std::string> metrics;
  auto args = sized<graft_objective_args>();
  args.n_signals = 2;
  args.signals = signals;
  args.grads = grads;
  args.loss = loss.dl();
  args.grad_scale = 0.5;
  args.metric_ctx = &metrics;
  args.metric = [](void* ctx, const char* name, const DLTensor* value) {
    static_cast<std::vector<std::string>*>(ctx)->push_back(
        std::string(name) + "=" + std::to_string(static_cast<float*>(value->data)[0]));
  };
  EXPECT_EQ(square->workspace(args), 8u);
  EXPECT_GRAFT_ERROR(square->run(cpu_exec(), args), ErrorKind::plugin,
                     "objective 'square', run: workspace: is too small");
  auto exec = cpu_exec();
  exec.workspace_bytes = 8;
  square->run(exec, args);
  EXPECT_THAT(loss.copy(), ElementsAre(25));
  EXPECT_THAT(dx.copy(), ElementsAre(3, 4));
  EXPECT_THAT(metrics, ElementsAre("squares=25.000000"));

  args.n_signals = 1;
  EXPECT_GRAFT_ERROR(square->run(exec, args), ErrorKind::plugin,
                     "objective 'square', run: signals: expected 2 signals, got 1");
  args.n_signals = 2;
  signals[0] = nullptr;
  EXPECT_GRAFT_ERROR(square->run(exec, args), ErrorKind::plugin,
                     "objective 'square', run: tensor:student.layer.hidden: is missing (NULL)");
}

// ---------------------------------------------------------------- log

TEST_F(InitializerTest, LogLinesNameTheLibrary) {
  std::ostringstream lines;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(lines)));
  spdlog::set_pattern("%l %v");
  registry_.create_initializer("copy")->run(cpu_exec(), args_);
  spdlog::set_default_logger(before);
  EXPECT_THAT(lines.str(),
              HasSubstr("info org.example.kit: the mixer has no half-life: left as it is"));
}

}  // namespace
}  // namespace graft
