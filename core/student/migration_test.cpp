// Stored parameters that do not fit the plugin at hand: refused with both values, or brought
// forward by the plugin itself. GRAFT_SCHEMA_DIR holds one plugin in two versions.
#include <functional>

#include "core/student/student_io.h"
#include "core/student/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class MigrationTest : public testing::Test {
 protected:
  MigrationTest() {
    make_tiny_teacher(folder_ / "teacher");
    backbone_ = std::make_shared<const Backbone>(Backbone::load(folder_ / "teacher"));
  }

  std::shared_ptr<TokenMixer> mixer(PluginRegistry& registry,
                                    const std::map<std::string, OptionValue>& options = {}) {
    const LayerInfo info = backbone_->layer_info(1);
    return std::make_shared<TokenMixer>(registry.create_mixer("migrating", info.c_info(), options),
                                        std::uint64_t{1});
  }
  // A student of which layer 1 is converted; its parameters are 3, the optional one too.
  void store(PluginRegistry& registry, const std::map<std::string, OptionValue>& options = {}) {
    const auto converted = mixer(registry, options);
    for (const MixerParameter& parameter : converted->parameters()) parameter.tensor.fill_(3);
    write_student(student_, true, Model(backbone_, {{1, converted}}), folder_ / "teacher", {});
  }
  std::map<std::string, at::Tensor> load(PluginRegistry& registry) {
    const Model model = load_model(student_, registry);
    std::map<std::string, at::Tensor> tensors;
    for (const MixerParameter& parameter : model.mixers().at(1)->parameters())
      tensors[parameter.name] = parameter.tensor;
    return tensors;
  }
  void expect_refused(PluginRegistry& registry, ErrorKind kind,
                      const testing::Matcher<const std::string&>& message) {
    EXPECT_GRAFT_ERROR(load(registry), kind, message);
  }

  void edit_config(const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json config = nlohmann::json::parse(read_text(student_ / "config.json"));
    change(config["graft"]["mixer"]);
    write_file_atomically(student_ / "config.json", config.dump());
  }
  using Metadata = std::map<std::string, std::string>;
  // `change` gets the layer's tensors, under their parameter's names, and the file's metadata.
  void edit_weights(
      const std::function<void(std::map<std::string, TensorView>&, Metadata&)>& change) {
    const SafetensorsFile file = SafetensorsFile::open(student_ / "model.safetensors");
    Metadata metadata = file.metadata();
    std::map<std::string, TensorView> own;
    std::vector<TensorView> views;
    for (const TensorView& view : file.tensors())
      if (view.name.starts_with(kPrefix))
        own[view.name.substr(kPrefix.size())] = view;
      else
        views.push_back(view);
    change(own, metadata);
    for (auto& [name, view] : own) {
      view.name = kPrefix + name;
      views.push_back(view);
    }
    write_safetensors(student_ / "model.safetensors", views, metadata);
  }

  inline static const std::string kPrefix = "model.layers.1.mixer.";
  TempFolder folder_;
  std::filesystem::path student_ = folder_ / "student";
  std::shared_ptr<const Backbone> backbone_;
  HostServices services_{torch_host_settings()};
  PluginRegistry first_{{GRAFT_SCHEMA_DIR "1"}, services_},
      second_{{GRAFT_SCHEMA_DIR "2"}, services_};
};

bool all_are(const at::Tensor& tensor, double value) { return tensor.eq(value).all().item<bool>(); }

TEST_F(MigrationTest, OlderParametersAreBroughtForwardByThePlugin) {
  store(first_);
  testing::internal::CaptureStdout();
  const auto tensors = load(second_);
  EXPECT_THAT(testing::internal::GetCapturedStdout(),
              HasSubstr("config.json: mixer 'migrating' brought its parameters from param_schema 1 "
                        "to 2"));
  EXPECT_TRUE(all_are(tensors.at("weight"), 3));
  EXPECT_TRUE(all_are(tensors.at("table"), 3));
  EXPECT_TRUE(all_are(tensors.at("bias"), 0.5)) << "new in schema 2: its default";
  // Written again it is of the plugin's own schema.
  write_student(student_, true, load_model(student_, second_), folder_ / "teacher", {});
  testing::internal::CaptureStdout();
  EXPECT_TRUE(all_are(load(second_).at("weight"), 3));
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST_F(MigrationTest, ASchemaThatThePluginCannotReadIsRefusedWithBothNumbers) {
  store(second_);
  expect_refused(first_, ErrorKind::plugin,
                 AllOf(HasSubstr("config.json"), HasSubstr("follow param_schema 2"),
                       HasSubstr("(version 2.0.0)"), HasSubstr("has param_schema 1"),
                       HasSubstr("(version 1.0.0); a newer plugin is needed")));
  store(first_, {{"unreadable", true}});
  expect_refused(second_, ErrorKind::plugin,
                 AllOf(HasSubstr("follow param_schema 1"), HasSubstr("has param_schema 2"),
                       HasSubstr("which cannot read the older one")));
  store(first_);
  edit_weights([](auto& tensors, auto&) { tensors.erase("w"); });
  expect_refused(
      second_, ErrorKind::plugin,
      AllOf(HasSubstr("student: layer 1: mixer 'migrating', reading parameters of schema "
                      "1: param:w: is missing")));
}

TEST_F(MigrationTest, AParameterThatIsMissingOrTooManyOrMisshapenIsNamed) {
  store(first_);
  edit_weights([](auto& tensors, auto&) { tensors.erase("table"); });
  expect_refused(first_, ErrorKind::input,
                 AllOf(HasSubstr("student: layer 1: mixer 'migrating' has a parameter 'table' of "
                                 "shape [2]"),
                       HasSubstr("there is no tensor 'model.layers.1.mixer.table'")));
  store(first_);
  edit_weights([](auto& tensors, auto&) {
    tensors["exrta"] = tensors.at("extra");
    tensors.erase("extra");
  });
  expect_refused(first_, ErrorKind::input,
                 AllOf(HasSubstr("model.safetensors: layer 1: tensor 'model.layers.1.mixer.exrta' "
                                 "of shape [1] belongs to no parameter of mixer 'migrating'"),
                       HasSubstr("did you mean 'extra'")));
  store(first_);
  edit_weights([](auto& tensors, auto&) { tensors.at("w").shape = {8, 8}; });
  expect_refused(first_, ErrorKind::input,
                 AllOf(HasSubstr("model.safetensors: layer 1: parameter 'w' of mixer 'migrating': "
                                 "expected shape [64], got [8,8]")));
}

TEST_F(MigrationTest, AnOptionalParameterKeepsItsDefault) {
  store(first_);
  EXPECT_TRUE(all_are(load(first_).at("extra"), 3));
  edit_weights([](auto& tensors, auto&) { tensors.erase("extra"); });
  EXPECT_TRUE(all_are(load(first_).at("extra"), 0.25));
}

TEST_F(MigrationTest, WhatTheWeightsWereNotWrittenWithIsRefusedWithBothValues) {
  store(first_);
  edit_config([](auto& mixer) { mixer["options"]["width"] = 3; });
  expect_refused(first_, ErrorKind::input,
                 AllOf(HasSubstr("config.json: graft.mixer.options.width is 3"),
                       HasSubstr("model.safetensors was written with 2: set it back")));
  // Weights that some other program has written again do not say; their shapes do.
  edit_weights([](auto&, Metadata& metadata) { metadata.erase("graft.mixer"); });
  expect_refused(
      first_, ErrorKind::input,
      HasSubstr("layer 1: parameter 'table' of mixer 'migrating': expected shape [3], got "
                "[2]"));
  store(first_);
  edit_config([](auto& mixer) { mixer["param_schema"] = 2; });
  expect_refused(
      second_, ErrorKind::input,
      AllOf(HasSubstr("graft.mixer.param_schema is 2"), HasSubstr("was written with 1")));
  store(first_);
  edit_config([](auto& mixer) { mixer["options"]["scale"] = 2.0; });
  EXPECT_NO_THROW(load(first_)) << "an option that changes no shape may be set anew";
}

// ---- a mixer without the capabilities that first-party mixers have

TEST_F(MigrationTest, AMaskNeedsTheCapabilityUnlessAllTokensAreReal) {
  at::NoGradGuard no_grad;
  const auto plain = mixer(second_);
  const at::Tensor x = at::ones({2, 3, 64});
  at::Tensor mask = at::ones({2, 3}, at::kByte);
  EXPECT_TRUE(all_are(plain->forward(x, {}, mask).y, 1.5));
  mask[1][0] = 0;
  EXPECT_GRAFT_ERROR(
      plain->forward(x, {}, mask), ErrorKind::plugin,
      AllOf(HasSubstr("mixer 'migrating' takes no pad mask"), HasSubstr("GRAFT_CAP_PAD_MASK")));
  MixerState state;
  EXPECT_GRAFT_ERROR(plain->advance(x, {}, {}, state), ErrorKind::plugin,
                     AllOf(HasSubstr("mixer 'migrating' cannot go on from a state"),
                           HasSubstr("GRAFT_CAP_STATE_IO")));
}

}  // namespace
}  // namespace graft
