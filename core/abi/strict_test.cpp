// GRAFT_HOST_STRICT=1, seen from a plugin.
#include "core/abi/strict.h"

#include <cmath>
#include <cstdlib>
#include <thread>

#include "core/abi/library.h"
#include "core/base/testing.h"

namespace graft {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// strict_mode() looks once per process: before any test.
const bool strict_is_set = ::setenv("GRAFT_HOST_STRICT", "1", 1) == 0;

struct alignas(64) Buffer {
  float values[16] = {};
};

// A tensor of n floats.
struct Tensor {
  Buffer buffer;
  std::int64_t shape[1], strides[1] = {1};
  DLTensor dl;
  explicit Tensor(std::int64_t n)
      : shape{n}, dl{buffer.values, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, shape, strides, 0} {}
};

TEST(Strict, ModeIsOn) {
  ASSERT_TRUE(strict_is_set);
  EXPECT_TRUE(strict_mode());
}

TEST(Strict, PoisonReachesExactlyTheElements) {
  Tensor t(3);
  poison(&t.dl);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(t.buffer.values[i])) << i;
  for (int i = 3; i < 16; ++i) EXPECT_EQ(t.buffer.values[i], 0) << i;
  // A view with gaps is not ours to fill.
  Tensor view(3);
  view.strides[0] = 2;
  poison(&view.dl);
  EXPECT_THAT(view.buffer.values, Each(0));
  poison(static_cast<const DLTensor*>(nullptr));
}

TEST(Strict, PromisesAreChecked) {
  const auto expect_broken = [](DLTensor tensor, const std::string& text) {
    EXPECT_GRAFT_ERROR(check_promised(&tensor, "mixer 'm', x"), ErrorKind::internal,
                       "mixer 'm', x: the host passes a tensor " + text);
  };
  Tensor t(2);
  EXPECT_NO_THROW(check_promised(&t.dl, "x"));
  DLTensor broken = t.dl;
  broken.strides = nullptr;
  expect_broken(broken, "without shape or strides");
  broken = t.dl;
  broken.byte_offset = 4;
  expect_broken(broken, "with a byte_offset");
  broken = t.dl;
  broken.data = t.buffer.values + 1;
  expect_broken(broken, "that is not aligned to 64 bytes");
  broken.data = nullptr;
  expect_broken(broken, "without data");
  // No element, no data.
  Tensor empty(0);
  empty.dl.data = nullptr;
  EXPECT_NO_THROW(check_promised(&empty.dl, "x"));
}

TEST(Strict, OutputsArePoisonedButNotAStateInPlace) {
  Tensor y(2), state(2), dparam(2), workspace(4);
  state.buffer.values[0] = 5;
  DLTensor* states[] = {&state.dl};
  const DLTensor* states_in[] = {&state.dl};
  graft_mixer_forward call{};
  call.y = &y.dl;
  call.n_state = 1;
  call.state_in = states_in;
  call.state_out = states;
  graft_exec exec{};
  exec.device_type = kDLCPU;
  exec.workspace = workspace.buffer.values;
  exec.workspace_bytes = 16;
  poison_outputs(exec, call);
  EXPECT_TRUE(std::isnan(y.buffer.values[1]));
  EXPECT_TRUE(std::isnan(workspace.buffer.values[3]));
  EXPECT_EQ(workspace.buffer.values[4], 0);
  EXPECT_EQ(state.buffer.values[0], 5);
  call.state_in = nullptr;
  poison_outputs(exec, call);
  EXPECT_TRUE(std::isnan(state.buffer.values[0]));

  DLTensor* dparams[] = {&dparam.dl};
  call.n_params = 1;
  graft_mixer_backward backward{};
  backward.fwd = &call;
  backward.dparams = dparams;
  exec.flags = GRAFT_X_ACCUMULATE;
  poison_outputs(exec, backward);
  EXPECT_EQ(dparam.buffer.values[0], 0);
  exec.flags = 0;
  poison_outputs(exec, backward);
  EXPECT_TRUE(std::isnan(dparam.buffer.values[0]));
}

// An initializer whose run() calls itself through the host: two calls at once.
std::unique_ptr<Initializer>* running = nullptr;

TEST(Strict, TwoCallsAtOnceIntoOneInstance) {
  static graft_initializer_vtbl table{};
  table.struct_size = sizeof table;
  table.destroy = [](graft_initializer*) {};
  table.run = [](graft_initializer*, const graft_exec* exec, const graft_init_args* args,
                 graft_error*) {
    std::string text;
    std::thread other([&] {
      try {
        (*running)->run(*exec, *args);
      } catch (const Error& error) {
        text = error.what();
      }
    });
    other.join();
    EXPECT_EQ(text, "initializer 'x', run: the host calls one instance from two threads at once");
    return graft_status{GRAFT_OK};
  };
  static graft_initializer instance{&table, nullptr};
  static graft_desc desc{};
  desc.struct_size = sizeof desc;
  desc.id = desc.alias = "x";
  static const graft_desc* const descs[] = {&desc};
  static const graft_initializer_factory factory{
      sizeof factory, 1, descs,
      [](const char*, const graft_config*, graft_initializer** out, graft_error*) {
        *out = &instance;
        return graft_status{GRAFT_OK};
      }};
  static graft_plugin plugin{};
  plugin.struct_size = sizeof plugin;
  plugin.id = "org.example.x";
  plugin.get_extension = [](const char* id) -> const void* {
    return std::string(id) == GRAFT_EXT_INITIALIZER_FACTORY ? &factory : nullptr;
  };
  HostServices host;
  const auto library = PluginLibrary::negotiate(
      [](const graft_negotiate_in* in, graft_negotiate_out* out, graft_error*) {
        out->abi = in->max_abi;
        out->plugin = &plugin;
        return graft_status{GRAFT_OK};
      },
      "/x.so", host);
  auto initializer = library->create_initializer(library->components()[0], {});
  running = &initializer;
  graft_exec exec{};
  exec.struct_size = sizeof exec;
  graft_init_args args{};
  args.struct_size = sizeof args;
  initializer->run(exec, args);
  // Free again afterwards.
  EXPECT_NO_THROW(initializer->run(exec, args));
}

}  // namespace
}  // namespace graft
