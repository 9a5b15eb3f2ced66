// A host whose structs are shorter or longer than the plugin's: what a host of another minor
// version passes.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/abi/support.h"

namespace graft {
namespace {

using testing::CpuTensor;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::fixture;
using testing::small_layer;

// What lies behind the fields we know: never zero, so that a reader or writer who goes too far
// shows.
constexpr unsigned char kTail = 0xDB;
constexpr std::size_t kGrowth = 64, kGuard = 64;

// A struct of `bytes` bytes at an address of its own, with a guard behind it.
template <class Struct>
class Resized {
 public:
  Resized(const Struct& full, std::size_t bytes)
      : bytes_(bytes), memory_(new (std::align_val_t{64}) unsigned char[bytes + kGuard]) {
    std::memset(memory_.get(), kTail, bytes + kGuard);
    std::memcpy(memory_.get(), &full, std::min(bytes, sizeof full));
    get()->struct_size = static_cast<std::uint32_t>(bytes);
  }
  Struct* get() const { return reinterpret_cast<Struct*>(memory_.get()); }
  // What the callee may not touch: the guard, and what is longer than its own struct.
  std::vector<unsigned char> untouched() const {
    const unsigned char* const begin = memory_.get();
    return {begin + std::min(bytes_, sizeof(Struct)), begin + bytes_ + kGuard};
  }

 private:
  struct Free {
    void operator()(unsigned char* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

#define UP_TO(type, field) (offsetof(type, field) + sizeof(type::field))

struct Case {
  const char* library;
  bool grown;
};

// A host without Component and its copies: what the plugin itself makes of the sizes is seen.
class OtherHost : public ::testing::TestWithParam<Case> {
 protected:
  template <class Struct>
  Resized<Struct> resized(const Struct& full, std::size_t shrunk = sizeof(Struct)) const {
    return {full, GetParam().grown ? sizeof(Struct) + kGrowth : shrunk};
  }

  OtherHost() {
    void* const library = ::dlopen(fixture(GetParam().library).c_str(), RTLD_NOW | RTLD_LOCAL);
    negotiate_ = reinterpret_cast<graft_plugin_negotiate_fn>(::dlsym(library, GRAFT_ENTRY_SYMBOL));
    auto in = resized(
        graft_negotiate_in{0, DLPACK_MAJOR_VERSION, GRAFT_ABI(1, 0), GRAFT_ABI(1, 9), "test", "1"},
        UP_TO(graft_negotiate_in, max_abi));
    auto out = resized(graft_negotiate_out{});
    auto error = resized(graft_error{}, UP_TO(graft_error, where));
    EXPECT_EQ(negotiate_(in.get(), out.get(), error.get()), GRAFT_OK) << error.get()->message;
    EXPECT_THAT(out.untouched(), Each(kTail));
    EXPECT_EQ(out.get()->abi, GRAFT_ABI(1, 0));
    plugin_ = out.get()->plugin;
    if (plugin_->init != nullptr) {
      EXPECT_EQ(plugin_->init(host_.get(), "plugin.so", error.get()), GRAFT_OK);
    }
  }
  ~OtherHost() override {
    if (mixer_ != nullptr) mixer_->v->destroy(mixer_);
    if (plugin_->deinit != nullptr) plugin_->deinit();
  }

  graft_status create(const graft_value& value, const char* key, graft_error* error) {
    const auto* const factory =
        static_cast<const graft_mixer_factory*>(plugin_->get_extension(GRAFT_EXT_MIXER_FACTORY));
    std::vector<const char*> keys;
    std::vector<graft_value> values;
    const graft_desc& desc = *factory->descs[0];
    for (std::uint32_t i = 0; i < desc.n_options; ++i) {
      const bool given = std::string_view(desc.options[i]->key) == key;
      keys.push_back(desc.options[i]->key);
      values.push_back(given ? value : desc.options[i]->def);
    }
    auto layer = resized(small_layer(2), UP_TO(graft_layer_info, max_positions));
    auto config = resized(
        graft_config{0, static_cast<std::uint32_t>(keys.size()), keys.data(), values.data()});
    return factory->create(desc.id, layer.get(), config.get(), &mixer_, error);
  }

  Resized<graft_host> host_ = resized(graft_host{
      0, GRAFT_ABI(1, 0), "test", "1", nullptr, [](const graft_host*, std::int32_t, const char*) {},
      [](const graft_host*) { return 0; },
      [](const graft_host*, const char*) -> const void* { return nullptr; }});
  graft_plugin_negotiate_fn negotiate_ = nullptr;
  const graft_plugin* plugin_ = nullptr;
  graft_mixer* mixer_ = nullptr;
};

TEST_P(OtherHost, RunsTheMixer) {
  auto error = resized(graft_error{}, UP_TO(graft_error, where));
  ASSERT_EQ(create({}, "", error.get()), GRAFT_OK);
  const graft_param_spec* const* specs = nullptr;
  std::uint32_t n_params = 0;
  ASSERT_EQ(mixer_->v->param_specs(mixer_, &specs, &n_params, error.get()), GRAFT_OK);

  auto in = resized(testing::plan_for(1, 2, GRAFT_X_TRAINING));
  auto plan = resized(graft_plan_out{}, UP_TO(graft_plan_out, workspace_step));
  ASSERT_EQ(mixer_->v->plan(mixer_, in.get(), plan.get(), error.get()), GRAFT_OK);
  EXPECT_THAT(plan.untouched(), Each(kTail));

  std::vector<float> workspace(64);
  graft_exec full_exec = testing::cpu_exec(GRAFT_X_TRAINING);
  full_exec.workspace = workspace.data();
  full_exec.workspace_bytes = workspace.size() * sizeof(float);
  auto exec = resized(full_exec, UP_TO(graft_exec, workspace_bytes));

  // A parameter of zeros: leaky's factor is 1/2 then. One of ones for the plugin of 1.0.
  const bool leaky = std::string_view(GetParam().library) == "test_leaky";
  CpuTensor param({leaky ? 1 : 2}, leaky ? 0.0f : 1.0f), x({1, 2, 2}, {4, 2, 4, 0});
  CpuTensor y({1, 2, 2}, NAN), saved({1, 2, 2}), dy({1, 2, 2}, {1, 1, 1, 1}), dx({1, 2, 2}, NAN);
  const DLTensor* params[] = {param.dl()};
  DLTensor* saved_list[] = {saved.dl()};
  graft_mixer_forward full_call{};
  full_call.n_params = n_params;
  full_call.n_saved = plan.get()->n_saved;
  full_call.n_state = plan.get()->n_state;
  full_call.n_taps = plan.get()->n_taps;
  full_call.x = x.dl();
  full_call.y = y.dl();
  full_call.params = params;
  full_call.saved = saved_list;
  auto call = resized(full_call, UP_TO(graft_mixer_forward, saved));
  ASSERT_EQ(mixer_->v->forward(mixer_, exec.get(), call.get(), error.get()), GRAFT_OK);
  graft_mixer_backward full_backward{};
  full_backward.fwd = call.get();
  full_backward.dy = dy.dl();
  full_backward.dx = dx.dl();
  auto backward = resized(full_backward, UP_TO(graft_mixer_backward, dx));
  ASSERT_EQ(mixer_->v->backward(mixer_, exec.get(), backward.get(), error.get()), GRAFT_OK);
  const std::string_view library = GetParam().library;
  if (library == "test_identity") {
    EXPECT_THAT(y.copy(), ElementsAre(4, 2, 4, 0));
    EXPECT_THAT(dx.copy(), Each(1));
  } else if (leaky) {
    EXPECT_THAT(y.copy(), ElementsAre(2, 1, 3, 0.5f));
    EXPECT_THAT(dx.copy(), ElementsAre(0.75f, 0.75f, 0.5f, 0.5f));
  } else {
    EXPECT_THAT(y.copy(), ElementsAre(4, 2, 6, 1));
    EXPECT_THAT(dx.copy(), ElementsAre(1.5f, 1.5f, 1, 1));
  }
  for (const auto& rest : {error.untouched(), call.untouched(), backward.untouched()})
    EXPECT_THAT(rest, Each(kTail));
}

TEST_P(OtherHost, OfAnotherAbiOrDlpackIsRefusedWithAReason) {
  const std::uint32_t first = GRAFT_ABI(1, 0);
  struct Offer {
    std::uint32_t dlpack, min, max;
    const char *where, *text;
  };
  for (const auto& [dlpack, min, max, where, text] :
       {Offer{1, GRAFT_ABI(1, 1), GRAFT_ABI(1, 9), "abi", "this plugin speaks graft ABI 1.0"},
        Offer{1, GRAFT_ABI(0, 1), GRAFT_ABI(0, 9), "abi", "this plugin speaks graft ABI 1.0"},
        Offer{2, first, first, "dlpack_major", "this plugin speaks DLPack 1"}}) {
    const auto in = resized(graft_negotiate_in{0, dlpack, min, max, "test", "1"});
    const auto out = resized(graft_negotiate_out{});
    const auto error = resized(graft_error{});
    EXPECT_EQ(negotiate_(in.get(), out.get(), error.get()), GRAFT_ABI_MISMATCH);
    EXPECT_EQ(out.get()->plugin, nullptr);
    EXPECT_STREQ(error.get()->where, where);
    EXPECT_THAT(error.get()->message, ::testing::StartsWith(text));
    EXPECT_EQ(negotiate_(in.get(), out.get(), nullptr), GRAFT_ABI_MISMATCH);
  }
}

// A longer error takes the message, a shorter one stays as it is; neither is written past its end.
TEST_P(OtherHost, ErrorsFitTheCallersStruct) {
  auto in = resized(testing::plan_for(1, 1));
  in.get()->dtype = {kDLInt, 8, 1};
  auto plan = resized(graft_plan_out{});
  auto error = resized(graft_error{}, UP_TO(graft_error, where));
  ASSERT_EQ(create({}, "", error.get()), GRAFT_OK);
  EXPECT_EQ(mixer_->v->plan(mixer_, in.get(), plan.get(), error.get()), GRAFT_UNIMPLEMENTED);
  EXPECT_THAT(error.untouched(), Each(kTail));
  if (!GetParam().grown) {
    EXPECT_EQ(error.get()->code, GRAFT_OK);
    return;
  }
  EXPECT_EQ(error.get()->code, GRAFT_UNIMPLEMENTED);
  EXPECT_NE(error.get()->message[0], '\0');
  EXPECT_EQ(error.get()->struct_size, sizeof(graft_error) + kGrowth);
  EXPECT_EQ(mixer_->v->plan(mixer_, in.get(), plan.get(), nullptr), GRAFT_UNIMPLEMENTED);
}

// All fields of 1.0 are there for a plugin in plain C, which need not ask; the SDK does with less.
INSTANTIATE_TEST_SUITE_P(All, OtherHost,
                         ::testing::Values(Case{"test_leaky", true}, Case{"test_leaky", false},
                                           Case{"test_identity", true}, Case{"v1_0", true}),
                         [](const auto& info) {
                           return std::string(info.param.library) +
                                  (info.param.grown ? "Grown" : "Shrunk");
                         });

}  // namespace
}  // namespace graft
