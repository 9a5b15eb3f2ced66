// The plugin that was written for ABI 1.0 and never changed since (v1_0/plugin.c), in today's host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "core/base/testing.h"
#include "core/loader/registry.h"
#include "tests/abi/support.h"

namespace graft {
namespace {

using testing::cpu_exec;
using testing::CpuTensor;
using ::testing::ElementsAre;
using testing::fixture;
using testing::plan_for;
using testing::sized;
using testing::small_layer;

class FirstVersion : public ::testing::Test {
 protected:
  std::unique_ptr<Mixer> mixer(const std::map<std::string, OptionValue>& options = {}) {
    return registry_.create_mixer("v1-0-mixer", small_layer(2), options);
  }
  // A call with room for the planned workspace.
  graft_exec exec(std::uint64_t bytes, std::uint64_t flags = 0) {
    workspace_ = std::make_unique<CpuTensor>(
        std::vector<std::int64_t>{static_cast<std::int64_t>(bytes / sizeof(float))});
    graft_exec exec = cpu_exec(flags);
    exec.workspace = workspace_->dl()->data;
    exec.workspace_bytes = bytes;
    return exec;
  }
  HostServices host_;
  PluginRegistry registry_{{fixture("v1_0")}, host_};
  std::unique_ptr<CpuTensor> workspace_;
};

TEST_F(FirstVersion, IsWhatItWas) {
  registry_.scan();
  ASSERT_EQ(registry_.libraries().size(), 1u);
  const PluginLibrary& library = *registry_.libraries()[0];
  EXPECT_EQ(library.abi(), GRAFT_ABI(1, 0));
  EXPECT_EQ(library.id(), "org.example.v1-0");
  EXPECT_EQ(library.components().size(), 3u);
  const auto made = mixer({{"keep", 0.25}, {"start", "zeros"}});
  ASSERT_EQ(made->param_specs().size(), 1u);
  EXPECT_STREQ(made->param_specs()[0]->name, "weight");
  EXPECT_EQ(made->param_specs()[0]->init, GRAFT_INIT_ZEROS);
  EXPECT_EQ(made->param_schema(), 2u);
  EXPECT_GRAFT_ERROR(mixer({{"keep", 2.0}}), ErrorKind::usage,
                     ::testing::HasSubstr("expected a number from 0.0 to 1.0, got 2.0"));
}

// keep 1/2: the sums of the channels are 4, 6, 9 and 2, 1, -1.
TEST_F(FirstVersion, ForwardStateStepAndTaps) {
  const auto made = mixer();
  CpuTensor weight({2}, {2, 1}), state({1, 2}, NAN), sums({1, 3, 2}, NAN), y({1, 3, 2}, NAN);
  CpuTensor x({1, 3, 2}, {4, 2, 4, 0, 6, -1.5f});
  const DLTensor* params[] = {weight.dl()};
  DLTensor *state_out[] = {state.dl()}, *taps[] = {sums.dl()};
  const graft_plan_out plan = made->plan(plan_for(1, 3));
  ASSERT_EQ(plan.n_state, 1u);
  ASSERT_EQ(plan.n_taps, 1u);
  EXPECT_STREQ(plan.taps[0]->name, "org.example.sums");
  auto call = sized<graft_mixer_forward>();
  call.n_params = call.n_state = call.n_taps = 1;
  call.params = params;
  call.x = x.dl();
  call.y = y.dl();
  call.state_out = state_out;
  call.taps = taps;
  made->forward(exec(plan.workspace_forward), call);
  EXPECT_THAT(y.copy(), ElementsAre(8, 2, 12, 1, 18, -1));
  EXPECT_THAT(sums.copy(), ElementsAre(4, 2, 6, 1, 9, -1));
  EXPECT_THAT(state.copy(), ElementsAre(9, -1));

  CpuTensor next({1, 1, 2}, {0, 1}), next_y({1, 1, 2}, NAN);
  const DLTensor* state_in[] = {state.dl()};
  call.x = next.dl();
  call.y = next_y.dl();
  call.taps = nullptr;
  call.state_in = state_in;
  made->step(exec(made->plan(plan_for(1, 1)).workspace_step), call);
  EXPECT_THAT(next_y.copy(), ElementsAre(9, 0.5f));
  EXPECT_THAT(state.copy(), ElementsAre(4.5f, 0.5f));
}

TEST_F(FirstVersion, Backward) {
  const auto made = mixer();
  CpuTensor weight({2}, {2, 1}), x({1, 2, 2}, {4, 2, 4, 0}), y({1, 2, 2}), saved({1, 2, 2});
  const DLTensor* params[] = {weight.dl()};
  DLTensor* saved_list[] = {saved.dl()};
  const graft_plan_out plan = made->plan(plan_for(1, 2, GRAFT_X_TRAINING));
  ASSERT_EQ(plan.n_saved, 1u);
  const std::uint64_t backward_bytes = plan.workspace_backward;
  auto call = sized<graft_mixer_forward>();
  call.n_params = call.n_state = call.n_taps = call.n_saved = 1;
  call.params = params;
  call.x = x.dl();
  call.y = y.dl();
  call.saved = saved_list;
  made->forward(exec(plan.workspace_forward, GRAFT_X_TRAINING), call);

  CpuTensor dy({1, 2, 2}, {1, 1, 1, 2}), dx({1, 2, 2}, NAN), dweight({2}, {100, 100});
  DLTensor* dparams[] = {dweight.dl()};
  call.y = nullptr;
  auto backward = sized<graft_mixer_backward>();
  backward.fwd = &call;
  backward.dy = dy.dl();
  backward.dx = dx.dl();
  backward.dparams = dparams;
  made->backward(exec(backward_bytes, GRAFT_X_TRAINING | GRAFT_X_ACCUMULATE), backward);
  EXPECT_THAT(dx.copy(), ElementsAre(3, 2, 2, 2));
  EXPECT_THAT(dweight.copy(), ElementsAre(110, 104));
  made->backward(exec(backward_bytes, GRAFT_X_TRAINING), backward);
  EXPECT_THAT(dweight.copy(), ElementsAre(10, 4));
}

TEST_F(FirstVersion, PadsAreNotThere) {
  const auto made = mixer();
  CpuTensor weight({2}, {1, 1}), y({1, 3, 2}, NAN), x({1, 3, 2}, {4, 2, NAN, NAN, 6, -2});
  std::vector<std::uint8_t> real{1, 0, 1};
  std::int64_t shape[] = {1, 3}, strides[] = {3, 1};
  const DLTensor mask{real.data(), {kDLCPU, 0}, 2, {kDLUInt, 8, 1}, shape, strides, 0};
  const DLTensor* params[] = {weight.dl()};
  auto call = sized<graft_mixer_forward>();
  call.n_params = call.n_state = call.n_taps = 1;
  call.params = params;
  call.x = x.dl();
  call.y = y.dl();
  call.pad_mask = &mask;
  made->forward(exec(made->plan(plan_for(1, 3)).workspace_forward), call);
  EXPECT_THAT(y.copy(), ElementsAre(4, 2, 0, 0, 8, -1));
}

TEST_F(FirstVersion, NaturalValuesAndMigration) {
  const auto made = mixer();
  CpuTensor weight({2}, {9, 9}), scale({1}, {3});
  DLTensor* params[] = {weight.dl()};
  std::uint8_t written[] = {0};
  const double half[] = {0.5};
  EXPECT_TRUE(made->set_natural(GRAFT_NATURAL_OUTPUT_GATE, half, params, written));
  EXPECT_THAT(weight.copy(), ElementsAre(0.5f, 0.5f));
  EXPECT_EQ(written[0], 1);
  EXPECT_FALSE(made->set_natural(GRAFT_NATURAL_HALF_LIFE, half, params, {}));
  EXPECT_TRUE(made->migrate(1, {{"scale", scale.dl()}}, params));
  EXPECT_THAT(weight.copy(), ElementsAre(3, 3));
  EXPECT_FALSE(made->migrate(7, {}, params));
  EXPECT_GRAFT_ERROR(made->migrate(1, {}, params), ErrorKind::plugin,
                     ::testing::EndsWith("param:scale: is missing"));
}

// Two batches of one token; a probe that answers as the mixer would with its weight at 2.
struct Feed {
  CpuTensor x{{1, 1, 2}, {1, 2}}, y{{1, 1, 2}, {2, 4}};
  graft_named_tensor signal = sized<graft_named_tensor>();
  const graft_named_tensor* signals[1] = {&signal};
  int at = 0, probes = 0;

  Feed() {
    signal.name = GRAFT_SIGNAL_BLOCK_INPUT;
    signal.role = signal.axes = signal.domain = "";
    signal.tensor = x.dl();
  }
  static graft_status next(void* ctx, const graft_named_tensor* const** out, std::uint32_t* n,
                           graft_error*) {
    auto& feed = *static_cast<Feed*>(ctx);
    if (feed.at++ == 2) return GRAFT_NOT_FOUND;
    *out = feed.signals;
    *n = 1;
    return GRAFT_OK;
  }
  static graft_status rewind(void* ctx, graft_error*) {
    static_cast<Feed*>(ctx)->at = 0;
    return GRAFT_OK;
  }
  static graft_status probe(void* ctx, std::uint32_t, const char* const*, const DLTensor** out,
                            graft_error*) {
    auto& feed = *static_cast<Feed*>(ctx);
    ++feed.probes;
    out[0] = feed.y.dl();
    out[1] = feed.x.dl();
    return GRAFT_OK;
  }
};

TEST_F(FirstVersion, Initializer) {
  const auto target = mixer();
  const auto made = registry_.create_initializer("v1-0-initializer");
  ASSERT_EQ(made->needs().size(), 3u);
  EXPECT_EQ(made->needs()[0].flags, GRAFT_NEED_TEACHER | GRAFT_NEED_REQUIRED);
  ASSERT_EQ(made->calibration().size(), 1u);

  CpuTensor query({1}, {10}), weight({2}, {0, 0});
  auto from = sized<graft_named_tensor>(), to = sized<graft_named_tensor>();
  from.name = "q_proj.weight";
  from.role = GRAFT_ROLE_QUERY;
  from.tensor = query.dl();
  to.name = "weight";
  to.role = "org.example.role.weight";
  to.tensor = weight.dl();
  const graft_named_tensor *teacher[] = {&from}, *student[] = {&to};
  std::uint8_t written[] = {0};
  Feed feed;
  const graft_layer_info layer = small_layer(2);
  auto args = sized<graft_init_args>();
  args.n_teacher = args.n_student = 1;
  args.n_batches = 2;
  args.layer = &layer;
  args.teacher = teacher;
  args.student = student;
  args.student_written = written;
  args.mixer = target->get();
  args.ctx = &feed;
  args.next_batch = &Feed::next;
  args.rewind = &Feed::rewind;
  args.probe = &Feed::probe;
  made->run(cpu_exec(), args);
  EXPECT_THAT(weight.copy(), ElementsAre(11.5f, 11.5f));
  EXPECT_EQ(written[0], 1);
  EXPECT_EQ(feed.probes, 4);
}

TEST_F(FirstVersion, Objective) {
  const auto made = registry_.create_objective("v1-0-objective");
  ASSERT_EQ(made->needs().size(), 3u);
  EXPECT_EQ(made->needs()[0].flags, GRAFT_NEED_REQUIRED | GRAFT_NEED_GRAD);
  EXPECT_EQ(made->needs()[2].flags, 0u);
  CpuTensor student({1, 2, 2}, {1, 2, 3, 4}), teacher({1, 2, 2}, {0, 0, 3, 2});
  CpuTensor gradient({1, 2, 2}, NAN), loss({}, {0});
  const DLTensor* signals[] = {student.dl(), teacher.dl(), nullptr};
  DLTensor* grads[] = {gradient.dl(), nullptr, nullptr};
  std::map<std::string, double> metrics;
  auto args = sized<graft_objective_args>();
  args.n_signals = 3;
  args.signals = signals;
  args.grads = grads;
  args.loss = loss.dl();
  args.grad_scale = 4;
  args.metric_ctx = &metrics;
  args.metric = [](void* ctx, const char* name, const DLTensor* value) {
    (*static_cast<std::map<std::string, double>*>(ctx))[name] = *static_cast<double*>(value->data);
  };
  const std::uint64_t bytes = made->workspace(args);
  EXPECT_EQ(bytes, 16u);
  made->run(exec(bytes), args);
  EXPECT_THAT(loss.copy(), ElementsAre((0.5f + 2 + 2) / 2));
  EXPECT_THAT(gradient.copy(), ElementsAre(2, 4, 0, 4));
  EXPECT_THAT(metrics, ElementsAre(std::pair("weight", 2.0)));
}

}  // namespace
}  // namespace graft
