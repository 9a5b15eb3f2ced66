#include "core/abi/component.h"

#include <functional>

#include "core/abi/library.h"
#include "core/base/testing.h"

namespace graft {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;

template <class Struct>
Struct sized() {
  Struct s{};
  s.struct_size = sizeof s;
  return s;
}

// A plugin inside this program whose tables a test bends before it is negotiated.
struct Fake {
  graft_param_spec spec = sized<graft_param_spec>();
  const graft_param_spec* specs[2] = {&spec, &spec};
  std::uint32_t n_specs = 1;
  graft_plan_out plan = sized<graft_plan_out>();
  graft_mixer_vtbl mixer_table = sized<graft_mixer_vtbl>();
  graft_initializer_vtbl initializer_table = sized<graft_initializer_vtbl>();
  graft_objective_vtbl objective_table = sized<graft_objective_vtbl>();
  graft_mixer mixer{&mixer_table, this};
  graft_initializer initializer{&initializer_table, this};
  graft_objective objective{&objective_table, this};
  graft_mixer* made_mixer = &mixer;
  graft_desc desc = sized<graft_desc>();
  const graft_desc* descs[2] = {&desc, &desc};
  graft_mixer_factory mixers = sized<graft_mixer_factory>();
  graft_initializer_factory initializers = sized<graft_initializer_factory>();
  graft_objective_factory objectives = sized<graft_objective_factory>();
  graft_plugin plugin = sized<graft_plugin>();
  int destroyed = 0, inits = 0, deinits = 0;

  static Fake* current;

  Fake() {
    current = this;
    spec.name = "w";
    spec.axes = "a";
    spec.ndim = 1;
    spec.shape[0] = 3;
    desc.id = "org.example.fake";
    desc.alias = "fake";
    mixer_table.destroy = [](graft_mixer*) { ++current->destroyed; };
    mixer_table.param_specs = [](graft_mixer*, const graft_param_spec* const** out,
                                 std::uint32_t* n, graft_error*) {
      *out = current->n_specs == 0 ? nullptr : current->specs;
      *n = current->n_specs;
      return graft_status{GRAFT_OK};
    };
    mixer_table.plan = [](graft_mixer*, const graft_plan_in*, graft_plan_out* out, graft_error*) {
      *out = current->plan;
      return graft_status{GRAFT_OK};
    };
    mixer_table.forward = [](graft_mixer*, const graft_exec*, const graft_mixer_forward*,
                             graft_error*) { return graft_status{GRAFT_OK}; };
    initializer_table.destroy = [](graft_initializer*) { ++current->destroyed; };
    initializer_table.run = [](graft_initializer*, const graft_exec*, const graft_init_args*,
                               graft_error*) { return graft_status{GRAFT_OK}; };
    objective_table.destroy = [](graft_objective*) { ++current->destroyed; };
    objective_table.run = [](graft_objective*, const graft_exec*, const graft_objective_args*,
                             graft_error*) { return graft_status{GRAFT_OK}; };
    mixers.count = initializers.count = objectives.count = 1;
    mixers.descs = initializers.descs = objectives.descs = descs;
    mixers.create = [](const char*, const graft_layer_info*, const graft_config*, graft_mixer** out,
                       graft_error*) {
      *out = current->made_mixer;
      return graft_status{GRAFT_OK};
    };
    initializers.create = [](const char*, const graft_config*, graft_initializer** out,
                             graft_error*) {
      *out = &current->initializer;
      return graft_status{GRAFT_OK};
    };
    objectives.create = [](const char*, const graft_config*, graft_objective** out, graft_error*) {
      *out = &current->objective;
      return graft_status{GRAFT_OK};
    };
    plugin.id = "org.example.fake-pack";
    plugin.init = [](const graft_host*, const char*, graft_error*) {
      ++current->inits;
      return graft_status{GRAFT_OK};
    };
    plugin.deinit = [] { ++current->deinits; };
    plugin.get_extension = [](const char* id) -> const void* {
      const std::string name = id;
      if (name == GRAFT_EXT_MIXER_FACTORY) return &current->mixers;
      if (name == GRAFT_EXT_INITIALIZER_FACTORY) return &current->initializers;
      if (name == GRAFT_EXT_OBJECTIVE_FACTORY) return &current->objectives;
      return nullptr;
    };
  }

  static graft_status negotiate(const graft_negotiate_in* in, graft_negotiate_out* out,
                                graft_error*) {
    out->abi = in->max_abi;
    out->plugin = &current->plugin;
    return graft_status{GRAFT_OK};
  }

  std::shared_ptr<PluginLibrary> library(HostServices& host) {
    return PluginLibrary::negotiate(&negotiate, "/fake.so", host);
  }
};
Fake* Fake::current = nullptr;

class ComponentTest : public ::testing::Test {
 protected:
  std::unique_ptr<Mixer> mixer() {
    library_ = fake_.library(host_);
    return library_->create_mixer(library_->components()[0], sized<graft_layer_info>(), {});
  }
  std::unique_ptr<Initializer> initializer() {
    library_ = fake_.library(host_);
    return library_->create_initializer(library_->components()[1], {});
  }
  std::unique_ptr<Objective> objective() {
    library_ = fake_.library(host_);
    return library_->create_objective(library_->components()[2], {});
  }
  HostServices host_;
  Fake fake_;
  std::shared_ptr<PluginLibrary> library_;
};

TEST_F(ComponentTest, GapsAreFilled) {
  const auto m = mixer();
  const graft_param_spec& spec = *m->param_specs().at(0);
  for (const char* text : {spec.role, spec.domain, spec.doc}) EXPECT_STREQ(text, "");
  EXPECT_STREQ(spec.axes, "a");
  const auto call = sized<graft_mixer_forward>();
  auto backward = sized<graft_mixer_backward>();
  backward.fwd = &call;
  EXPECT_GRAFT_ERROR(m->backward(sized<graft_exec>(), backward), ErrorKind::plugin,
                     "mixer 'fake', backward: this mixer has no backward (GRAFT_CAP_BACKWARD)");
  DLTensor* const params[] = {nullptr};
  EXPECT_FALSE(m->set_natural("half-life", {}, params, {}));
  EXPECT_FALSE(m->migrate(1, {}, params));
  EXPECT_GRAFT_ERROR(m->set_natural("half-life", {}, {}, {}), ErrorKind::internal,
                     HasSubstr("not as many tensors as the mixer has parameters"));
  EXPECT_EQ(objective()->workspace(sized<graft_objective_args>()), 0u);
}

TEST_F(ComponentTest, WithoutAliasTheIdServes) {
  fake_.desc.alias = nullptr;
  EXPECT_EQ(mixer()->label(), "org.example.fake");
}

TEST_F(ComponentTest, NeitherInitNorDeinitIsNeeded) {
  fake_.plugin.init = nullptr;
  fake_.plugin.deinit = nullptr;
  EXPECT_NO_THROW(mixer());
}

TEST_F(ComponentTest, NoFactoryIsNoComponent) {
  fake_.plugin.get_extension = [](const char*) -> const void* { return nullptr; };
  EXPECT_TRUE(fake_.library(host_)->components().empty());
}

TEST_F(ComponentTest, ExceptionOutOfGetExtension) {
  fake_.plugin.get_extension = [](const char*) -> const void* { throw 1; };
  EXPECT_GRAFT_ERROR(fake_.library(host_), ErrorKind::plugin,
                     HasSubstr("plugin '/fake.so': get_extension: the plugin let"));
  EXPECT_EQ(fake_.deinits, 1);
}

TEST_F(ComponentTest, OneIdTwice) {
  fake_.initializers.count = 2;
  EXPECT_GRAFT_ERROR(fake_.library(host_), ErrorKind::plugin,
                     "plugin '/fake.so': it has two components of the id 'org.example.fake'");
  EXPECT_EQ(fake_.inits, 1);
  EXPECT_EQ(fake_.deinits, 1);
}

TEST_F(ComponentTest, ComponentWithoutId) {
  fake_.desc.id = nullptr;
  EXPECT_GRAFT_ERROR(fake_.library(host_), ErrorKind::plugin,
                     "plugin '/fake.so': mixer 0 has no id");
  fake_.descs[0] = nullptr;
  EXPECT_GRAFT_ERROR(fake_.library(host_), ErrorKind::plugin,
                     "plugin '/fake.so': mixer 0 has no id");
}

TEST_F(ComponentTest, CreateThatMakesNothing) {
  fake_.made_mixer = nullptr;
  EXPECT_GRAFT_ERROR(mixer(), ErrorKind::plugin,
                     "mixer 'fake': create() succeeded but made no instance");
  graft_mixer without_table{nullptr, nullptr};
  fake_.made_mixer = &without_table;
  EXPECT_GRAFT_ERROR(mixer(), ErrorKind::plugin,
                     "mixer 'fake': its instance has no function table");
}

TEST_F(ComponentTest, AnInstanceThatFailsItsChecksIsDestroyed) {
  fake_.mixer_table.plan = nullptr;
  EXPECT_GRAFT_ERROR(mixer(), ErrorKind::plugin, "mixer 'fake': its table has no function plan");
  EXPECT_EQ(fake_.destroyed, 1);
  fake_.initializer_table.run = nullptr;
  EXPECT_GRAFT_ERROR(initializer(), ErrorKind::plugin,
                     "initializer 'fake': its table has no function run");
  EXPECT_EQ(fake_.destroyed, 2);
  fake_.objective_table.run = nullptr;
  EXPECT_GRAFT_ERROR(objective(), ErrorKind::plugin,
                     "objective 'fake': its table has no function run");
  EXPECT_EQ(fake_.destroyed, 3);
}

struct BadSpec {
  const char* name;
  std::function<void(Fake&)> bend;
  const char* text;
};
class BadParameterSpec : public ComponentTest, public ::testing::WithParamInterface<BadSpec> {};

TEST_P(BadParameterSpec, IsRefused) {
  GetParam().bend(fake_);
  EXPECT_GRAFT_ERROR(mixer(), ErrorKind::plugin, std::string("mixer 'fake'") + GetParam().text);
  EXPECT_EQ(fake_.destroyed, 1);
}

INSTANTIATE_TEST_SUITE_P(
    All, BadParameterSpec,
    ::testing::Values(
        BadSpec{"TwiceTheName", [](Fake& f) { f.n_specs = 2; },
                ": two parameters have the name 'w'"},
        BadSpec{"NoName", [](Fake& f) { f.spec.name = nullptr; }, ": parameter 0 has no name"},
        BadSpec{"NullEntry", [](Fake& f) { f.specs[0] = nullptr; }, ": parameter 0 has no name"},
        BadSpec{"TooManyAxes", [](Fake& f) { f.spec.ndim = 7; },
                ", parameter 'w' has 7 axes; 0 to 6 are possible"},
        BadSpec{"NegativeAxes", [](Fake& f) { f.spec.ndim = -1; },
                ", parameter 'w' has -1 axes; 0 to 6 are possible"},
        BadSpec{"NegativeSize", [](Fake& f) { f.spec.shape[0] = -3; },
                ", parameter 'w' has the size -3 on axis 0"},
        BadSpec{"AxesAndShapeDisagree", [](Fake& f) { f.spec.axes = "heads,model"; },
                ", parameter 'w' has 1 axes, but labels 'heads,model'"},
        BadSpec{"UnknownInit", [](Fake& f) { f.spec.init = 17; },
                ", parameter 'w' asks for initialisation kind 17, which this host does not know"},
        BadSpec{"NullList",
                [](Fake& f) {
                  f.mixer_table.param_specs = [](graft_mixer*, const graft_param_spec* const** out,
                                                 std::uint32_t* n, graft_error*) {
                    *out = nullptr;
                    *n = 4;
                    return graft_status{GRAFT_OK};
                  };
                },
                ", param_specs: gave 4 parameters, but their list is NULL"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(ComponentTest, PlanIsCheckedAndCopied) {
  auto state = sized<graft_tensor_spec>();
  state.name = "S";
  state.ndim = 2;
  state.shape[0] = 4;
  state.shape[1] = 5;
  const graft_tensor_spec* list[] = {&state};
  fake_.plan.n_state = 1;
  fake_.plan.state = list;
  const auto m = mixer();
  const graft_plan_out out = m->plan(sized<graft_plan_in>());
  state.shape[0] = 99;
  EXPECT_EQ(out.state[0]->shape[0], 4);
  EXPECT_STREQ(out.state[0]->axes, "");
  state.shape[1] = -1;
  EXPECT_GRAFT_ERROR(m->plan(sized<graft_plan_in>()), ErrorKind::plugin,
                     "mixer 'fake', plan, state 'S' has the size -1 on axis 1");
  state.name = nullptr;
  EXPECT_GRAFT_ERROR(m->plan(sized<graft_plan_in>()), ErrorKind::plugin,
                     "mixer 'fake', plan, state 0 has no name");
  fake_.plan.state = nullptr;
  EXPECT_GRAFT_ERROR(m->plan(sized<graft_plan_in>()), ErrorKind::plugin,
                     "mixer 'fake', plan: gave 1 state tensors, but their list is NULL");
}

TEST_F(ComponentTest, NeedsAreChecked) {
  fake_.initializer_table.n_needs = 2;
  EXPECT_GRAFT_ERROR(initializer(), ErrorKind::plugin,
                     "initializer 'fake' declares 2 role needs, but their list is NULL");
  const graft_role_need nameless[] = {{nullptr, GRAFT_NEED_REQUIRED, 0}};
  fake_.initializer_table.n_needs = 1;
  fake_.initializer_table.needs = nameless;
  EXPECT_GRAFT_ERROR(initializer(), ErrorKind::plugin,
                     "initializer 'fake' needs a role of no name");
  fake_.objective_table.n_needs = 1;
  EXPECT_GRAFT_ERROR(objective(), ErrorKind::plugin,
                     "objective 'fake' declares 1 signals, but their list is NULL");
}

TEST_F(ComponentTest, ErrorWithoutAnEndIsCut) {
  fake_.mixer_table.forward = [](graft_mixer*, const graft_exec*, const graft_mixer_forward*,
                                 graft_error* error) {
    std::fill(std::begin(error->where), std::end(error->where), 'w');
    std::fill(std::begin(error->message), std::end(error->message), 'm');
    error->message[0] = '\033';
    return graft_status{GRAFT_DATA_LOSS};
  };
  EXPECT_GRAFT_ERROR(
      mixer()->forward(sized<graft_exec>(), sized<graft_mixer_forward>()), ErrorKind::plugin,
      "mixer 'fake', forward: " + std::string(127, 'w') + ": \\x1b" + std::string(886, 'm'));
}

TEST_F(ComponentTest, UnknownStatusAndCancellation) {
  fake_.mixer_table.forward = [](graft_mixer*, const graft_exec* exec, const graft_mixer_forward*,
                                 graft_error*) { return static_cast<graft_status>(exec->seed); };
  auto exec = sized<graft_exec>();
  exec.seed = 77;
  EXPECT_GRAFT_ERROR(mixer()->forward(exec, sized<graft_mixer_forward>()), ErrorKind::plugin,
                     "mixer 'fake', forward: failed with status 77 and no message");
  exec.seed = GRAFT_CANCELLED;
  EXPECT_GRAFT_ERROR(mixer()->forward(exec, sized<graft_mixer_forward>()), ErrorKind::interrupted,
                     EndsWith("failed with GRAFT_CANCELLED and no message"));
}

TEST_F(ComponentTest, TheLibraryLivesAsLongAsItsInstances) {
  auto m = mixer();
  library_.reset();
  EXPECT_EQ(fake_.deinits, 0);
  EXPECT_NO_THROW(m->plan(sized<graft_plan_in>()));
  m.reset();
  EXPECT_EQ(fake_.destroyed, 1);
  EXPECT_EQ(fake_.deinits, 1);
}

}  // namespace
}  // namespace graft
