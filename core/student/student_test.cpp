#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "core/student/student_io.h"
#include "core/student/testing.h"
#include "core/teacher/lanes.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::shared_ptr<const Backbone> tiny_backbone() {
  static TempFolder folder;
  static const auto backbone =
      std::make_shared<const Backbone>(Backbone::load(make_tiny_teacher(folder / "teacher")));
  return backbone;
}

std::shared_ptr<TokenMixer> make_mixer(PluginRegistry& registry, std::int64_t layer,
                                       const std::map<std::string, OptionValue>& options = {}) {
  const LayerInfo info = tiny_backbone()->layer_info(layer);
  return std::make_shared<TokenMixer>(registry.create_mixer("gdn", info.c_info(), options),
                                      static_cast<std::uint64_t>(layer) + 1);
}

at::Tensor some_ids(std::int64_t batch, std::int64_t tokens, std::uint64_t seed = 3) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randint(0, 320, {batch, tokens}, generator, at::kLong);
}

class StudentTest : public testing::Test {
 protected:
  Model student(const std::vector<std::int64_t>& layers,
                const std::map<std::string, OptionValue>& options = {}) {
    Model::Mixers mixers;
    for (const std::int64_t layer : layers)
      mixers[layer] = make_mixer(plugins_.registry(), layer, options);
    return Model(tiny_backbone(), std::move(mixers));
  }
  BuiltPlugins plugins_;
};

TEST_F(StudentTest, ParametersStartAsTheirSpecsSayAndFromTheSeedAlone) {
  const auto a = make_mixer(plugins_.registry(), 0), b = make_mixer(plugins_.registry(), 0),
             c = make_mixer(plugins_.registry(), 1);
  bool differs = false;
  for (std::size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(a->parameters()[i].tensor, b->parameters()[i].tensor))
        << a->parameters()[i].name;
    differs = differs || !at::equal(a->parameters()[i].tensor, c->parameters()[i].tensor);
  }
  EXPECT_TRUE(differs) << "another seed gave the same parameters";
}

TEST_F(StudentTest, ReplicasRunSideBySideOnTheSameWeights) {
  c10::InferenceMode inference;
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  const Model model = student({0, 1}, {{"write_gate_bias", true}, {"short_conv", std::int64_t{2}}});
  const Model replica = model.replica();
  const auto run = [&](std::vector<at::Tensor>& out) {
    in_lanes(8, [&](std::int64_t i, std::int64_t lane) {
      out[static_cast<std::size_t>(i)] =
          (lane == 0 ? model : replica).hidden(some_ids(2, 70, static_cast<std::uint64_t>(i)));
    });
  };
  std::vector<at::Tensor> once(8), again(8);
  run(once);
  for (std::size_t i = 0; i < once.size(); ++i)
    EXPECT_TRUE(at::equal(once[i], replica.hidden(some_ids(2, 70, i)))) << i;
  model.mixers().at(1)->parameters().at(0).tensor.mul_(2);
  run(again);
  for (std::size_t i = 0; i < once.size(); ++i) {
    EXPECT_FALSE(at::equal(once[i], again[i])) << i;
    EXPECT_TRUE(at::equal(again[i], model.hidden(some_ids(2, 70, i)))) << i;
  }
  at::set_num_threads(threads);
}

TEST_F(StudentTest, UnknownTapAndParameterAreNamedWithTheKnown) {
  const auto mixer = make_mixer(plugins_.registry(), 0);
  EXPECT_GRAFT_ERROR(mixer->forward(at::zeros({1, 2, 64}), {}, {}, {"head_outputs"}),
                     ErrorKind::plugin, AllOf(HasSubstr("head_outputs"), HasSubstr("head_output")));
  EXPECT_GRAFT_ERROR(mixer->load_parameter("q_proj.wieght", at::zeros({64, 64})), ErrorKind::input,
                     AllOf(HasSubstr("q_proj.wieght"), HasSubstr("did you mean 'q_proj.weight'")));
  EXPECT_GRAFT_ERROR(mixer->load_parameter("q_proj.weight", at::zeros({64, 63})), ErrorKind::input,
                     AllOf(HasSubstr("expected shape [64,64]"), HasSubstr("got [64,63]")));
}

// The host's autograd node around the plugin: directional derivatives of <y, c> by finite
// differences.
TEST_F(StudentTest, GradientsThroughTheHostMatchFiniteDifferences) {
  const auto mixer = make_mixer(plugins_.registry(), 0);
  at::manual_seed(5);
  at::Tensor x = at::randn({2, 9, 64}).set_requires_grad(true);
  const at::Tensor c = at::randn({2, 9, 64}), direction = at::randn_like(x);
  for (const MixerParameter& parameter : mixer->parameters()) {
    at::Tensor tensor = parameter.tensor;
    tensor.set_requires_grad(true);
  }
  (mixer->forward(x).y * c).sum().backward();

  const auto value = [&](const at::Tensor& at_x) {
    at::NoGradGuard no_grad;
    return (mixer->forward(at_x).y * c).sum(at::kDouble).item<double>();
  };
  const double step = 3e-4;
  const double numeric =
      (value(x.detach() + step * direction) - value(x.detach() - step * direction)) / (2 * step);
  EXPECT_NEAR((x.grad() * direction).sum().item<double>(), numeric,
              2e-2 * std::max(1.0, std::abs(numeric)));
  for (const MixerParameter& parameter : mixer->parameters()) {
    ASSERT_TRUE(parameter.tensor.grad().defined()) << parameter.name;
    at::Tensor tensor = parameter.tensor.detach();
    const at::Tensor along = at::randn_like(tensor), before = tensor.clone();
    tensor.add_(along, step);
    const double up = value(x.detach());
    tensor.copy_(before).sub_(along, step);
    const double down = value(x.detach());
    tensor.copy_(before);
    const double expected = (up - down) / (2 * step);
    EXPECT_NEAR((parameter.tensor.grad() * along).sum().item<double>(), expected,
                3e-2 * std::max(1.0, std::abs(expected)))
        << parameter.name;
  }
}

TEST_F(StudentTest, AFrozenParameterGetsNoGradient) {
  const auto mixer = make_mixer(plugins_.registry(), 0);
  at::Tensor first = mixer->parameters()[0].tensor;
  first.set_requires_grad(true);
  mixer->forward(at::randn({1, 4, 64})).y.sum().backward();
  EXPECT_TRUE(first.grad().defined());
  for (std::size_t i = 1; i < mixer->parameters().size(); ++i)
    EXPECT_FALSE(mixer->parameters()[i].tensor.grad().defined()) << mixer->parameters()[i].name;
}

TEST_F(StudentTest, TapsAloneAreThoseOfTheWholeForward) {
  at::NoGradGuard no_grad;
  const auto mixer = make_mixer(plugins_.registry(), 0);
  ASSERT_TRUE(mixer->plugin().component().has(GRAFT_CAP_TAPS_ONLY));
  const at::Tensor x = at::randn({2, 9, 64});
  const std::vector<std::string> names = {GRAFT_TAP_PRE_OUTPUT, GRAFT_TAP_HEAD_OUTPUT};
  const MixerOutput whole = mixer->forward(x, {}, {}, names);
  EXPECT_TRUE(whole.y.defined());
  const std::vector<at::Tensor> both = mixer->taps(x, names), one = mixer->taps(x, {names[1]});
  ASSERT_EQ(both.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(both[i], whole.taps[i])) << names[i];
  ASSERT_EQ(one.size(), 1u);
  EXPECT_TRUE(at::equal(one[0], whole.taps[1]));
  EXPECT_GRAFT_ERROR(mixer->taps(x, {"head_outptu"}), ErrorKind::plugin, HasSubstr("head_output"));
}

struct DecodeCase {
  std::vector<std::int64_t> layers;
  std::int64_t prefill;
  std::map<std::string, OptionValue> options;
};

class DecoderTest : public StudentTest, public testing::WithParamInterface<DecodeCase> {};

TEST_P(DecoderTest, PrefillThenStepsEqualTheFullForward) {
  at::NoGradGuard no_grad;
  const Model model = student(GetParam().layers, GetParam().options);
  const at::Tensor ids = some_ids(2, 40);
  const at::Tensor full = model.logits(model.hidden(ids));
  Decoder decoder(model, 2);
  const std::int64_t prefill = GetParam().prefill;
  at::Tensor logits = decoder.feed(ids.narrow(1, 0, prefill));
  for (std::int64_t t = prefill;; ++t) {
    EXPECT_TRUE(at::allclose(logits, full.select(1, t - 1), 1e-4, 1e-4)) << "token " << t - 1;
    if (t == ids.size(1)) break;
    logits = decoder.feed(ids.narrow(1, t, 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Students, DecoderTest,
                         testing::Values(DecodeCase{{}, 7, {}}, DecodeCase{{0}, 1, {}},
                                         DecodeCase{{1}, 16, {}}, DecodeCase{{0, 1}, 33, {}},
                                         DecodeCase{{0, 1},
                                                    5,
                                                    {{"rope", true},
                                                     {"write_gate_bias", true},
                                                     {"output_gate_bias", true}}},
                                         DecodeCase{{0, 1}, 2, {{"short_conv", std::int64_t{4}}}}));

TEST_F(StudentTest, LeftPaddedRowsDecodeAsIfAlone) {
  at::NoGradGuard no_grad;
  const Model model = student({1}, {{"rope", true}});
  const at::Tensor a = some_ids(1, 12, 1), b = some_ids(1, 5, 2);
  at::Tensor batch = at::zeros({2, 12}, at::kLong), mask = at::ones({2, 12}, at::kByte);
  batch[0].copy_(a[0]);
  batch[1].narrow(0, 7, 5).copy_(b[0]);
  mask[1].narrow(0, 0, 7).zero_();
  Decoder both(model, 2), only_a(model, 1), only_b(model, 1);
  at::Tensor logits = both.feed(batch, mask), logits_a = only_a.feed(a), logits_b = only_b.feed(b);
  for (int step = 0; step < 6; ++step) {
    EXPECT_TRUE(at::allclose(logits[0], logits_a[0], 1e-4, 1e-4)) << step;
    EXPECT_TRUE(at::allclose(logits[1], logits_b[0], 1e-4, 1e-4)) << step;
    const at::Tensor next = logits.argmax(-1, true);
    logits = both.feed(next);
    logits_a = only_a.feed(next.narrow(0, 0, 1));
    logits_b = only_b.feed(next.narrow(0, 1, 1));
  }
  // A batch of one row that is padded too.
  Decoder padded(model, 1);
  EXPECT_TRUE(at::allclose(padded.feed(batch.narrow(0, 1, 1), mask.narrow(0, 1, 1))[0],
                           Decoder(model, 1).feed(b)[0], 1e-4, 1e-4));
}

// Keys, values and states: what one of them reads behind the fork is not seen by the other.
TEST_F(StudentTest, AForkedDecoderGoesItsOwnWay) {
  const Model model = student({1}, {{"short_conv", std::int64_t{4}}});
  const at::Tensor prompt = some_ids(2, 9, 1), one = some_ids(2, 5, 2), other = some_ids(2, 5, 3);
  const auto whole = [&](const at::Tensor& rest) {
    return model.hidden(at::cat({prompt, rest}, 1)).narrow(1, 9, 5);
  };
  Decoder decoder(model, 2);
  decoder.feed(prompt);
  Decoder fork = decoder.fork();
  std::vector<at::Tensor> rows;
  for (std::int64_t t = 0; t < 5; ++t) rows.push_back(decoder.feed_rows(one.narrow(1, t, 1)));
  EXPECT_TRUE(at::allclose(at::cat(rows, 1), whole(one), 1e-4, 1e-4));
  EXPECT_TRUE(at::allclose(fork.feed_rows(other), whole(other), 1e-4, 1e-4));
  EXPECT_EQ(decoder.length(), 14);
}

TEST_F(StudentTest, AStateDoesNotGrowAndAnEmptyPromptIsRefused) {
  const Model model = student({0, 1});
  Decoder decoder(model, 1);
  EXPECT_GRAFT_ERROR(decoder.feed(at::zeros({1, 0}, at::kLong)), ErrorKind::usage,
                     HasSubstr("at least one token"));
  decoder.feed(some_ids(1, 8));
  const std::uint64_t bytes = decoder.bytes();
  for (int i = 0; i < 20; ++i) decoder.feed(some_ids(1, 1));
  EXPECT_EQ(decoder.bytes(), bytes);
  EXPECT_GT(bytes, 0u);
}

// ---- as a folder

class StudentFolderTest : public StudentTest {
 protected:
  StudentFolderTest() { make_tiny_teacher(folder_ / "teacher"); }
  nlohmann::json read_config() {
    return nlohmann::json::parse(read_text(folder_ / "student/config.json"));
  }
  void write_config(const nlohmann::json& config) {
    write_file_atomically(folder_ / "student/config.json", config.dump());
  }
  Model load() { return load_model(folder_ / "student", plugins_.registry()); }
  TempFolder folder_;
};

TEST_F(StudentFolderTest, ReadBackEqualToTheBit) {
  at::NoGradGuard no_grad;
  const Model model = student({1}, {{"rope", true}, {"silu_v", false}, {"write_gate_bias", true}});
  write_student(folder_ / "student", false, model, folder_ / "teacher", {{"init", "test"}});
  EXPECT_TRUE(is_student(folder_ / "student"));
  EXPECT_FALSE(is_student(folder_ / "teacher"));
  const Model back = load();
  ASSERT_EQ(back.mixers().size(), 1u);
  EXPECT_EQ(back.mixers().at(1)->plugin().options().values(),
            model.mixers().at(1)->plugin().options().values());
  const at::Tensor ids = some_ids(2, 19);
  EXPECT_TRUE(at::equal(model.logits(model.hidden(ids)), back.logits(back.hidden(ids))));

  const auto checkpoint = Checkpoint::open(folder_ / "student");
  EXPECT_EQ(checkpoint.find("model.layers.1.self_attn.q_proj.weight"), nullptr)
      << "a replaced block must not be stored";
  EXPECT_NE(checkpoint.find("model.layers.1.mixer.q_proj.weight"), nullptr);
  EXPECT_EQ(checkpoint.files()[0].metadata().at("format"), "pt");
  EXPECT_TRUE(std::filesystem::exists(folder_ / "student/tokenizer.json"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "student/generation_config.json"));
}

TEST_F(StudentFolderTest, TheSameStudentGivesTheSameBytes) {
  const Model model = student({0, 1});
  write_student(folder_ / "a", false, model, folder_ / "teacher", {});
  write_student(folder_ / "b", false, model, folder_ / "teacher", {});
  EXPECT_EQ(read_text(folder_ / "a/model.safetensors"), read_text(folder_ / "b/model.safetensors"));
}

TEST_F(StudentFolderTest, ANonEmptyFolderIsKeptUnlessReplaced) {
  write_file_atomically(folder_ / "note.txt", "mine");
  std::filesystem::create_directory(folder_ / "student");
  write_file_atomically(folder_ / "student/note.txt", "mine");
  EXPECT_GRAFT_ERROR(
      write_student(folder_ / "student", false, student({0}), folder_ / "teacher", {}),
      ErrorKind::usage, HasSubstr("student"));
  EXPECT_EQ(read_text(folder_ / "student/note.txt"), "mine");
  write_student(folder_ / "student", true, student({0}), folder_ / "teacher", {});
  EXPECT_TRUE(is_student(folder_ / "student"));
}

TEST_F(StudentFolderTest, AMixerThatIsNotThereOrHasAnotherSchemaIsRefused) {
  write_student(folder_ / "student", false, student({0}), folder_ / "teacher", {});
  nlohmann::json config = read_config();
  config["graft"]["mixer"]["id"] = "org.example.absent";
  write_config(config);
  EXPECT_GRAFT_ERROR(load(), ErrorKind::usage,
                     AllOf(HasSubstr("org.example.absent"), HasSubstr("gdn")));

  config = read_config();
  config["graft"]["mixer"]["id"] = "org.graft.gdn";
  config["graft"]["mixer"]["param_schema"] = 77;
  write_config(config);
  EXPECT_GRAFT_ERROR(load(), ErrorKind::plugin,
                     AllOf(HasSubstr("param_schema 77"), HasSubstr("has param_schema 1")));
}

TEST_F(StudentFolderTest, ChangedTensorsOfABfloat16TeacherAreWrittenInFull) {
  at::NoGradGuard no_grad;
  make_tiny_teacher(folder_ / "bf16", "llama_bf16");
  const Backbone teacher = Backbone::load(folder_ / "bf16");
  const std::string name = "model.layers.1.mlp.down_proj.weight", other = "model.norm.weight";
  const at::Tensor changed = teacher.parameters().at(name).value * 1.001;
  const LayerInfo info = teacher.layer_info(1);
  Model::Mixers mixers;
  mixers[1] = std::make_shared<TokenMixer>(
      plugins_.registry().create_mixer("gdn", info.c_info(), {}), std::uint64_t{1});
  const Model model(std::make_shared<const Backbone>(teacher.with({{name, changed}})), mixers);
  write_student(folder_ / "student", false, model, folder_ / "bf16", {});

  const Checkpoint written = Checkpoint::open(folder_ / "student");
  EXPECT_EQ(written.at(name).dtype, DType::F32);
  EXPECT_EQ(written.at(other).dtype, DType::BF16);
  const Model back = load();
  EXPECT_TRUE(at::equal(back.backbone().parameters().at(name).value, changed));
  const at::Tensor ids = some_ids(2, 19);
  EXPECT_TRUE(at::equal(model.logits(model.hidden(ids)), back.logits(back.hidden(ids))));
}

TEST_F(StudentFolderTest, WhatIsNoFileAtTheTeacherIsNotCopied) {
  std::filesystem::create_directory(folder_ / "teacher/LICENSE");
  std::filesystem::create_symlink("merges.txt", folder_ / "teacher/merges.txt");  // to itself
  write_student(folder_ / "student", false, student({0}), folder_ / "teacher", {});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "student/LICENSE"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "student/tokenizer.json"));
}

TEST_F(StudentFolderTest, AFolderThatCannotBeReadIsNamed) {
  std::filesystem::remove(folder_ / "teacher/config.json");
  std::filesystem::create_symlink("config.json", folder_ / "teacher/config.json");  // to itself
  EXPECT_GRAFT_ERROR(
      is_student(folder_ / "teacher"), ErrorKind::input,
      HasSubstr("cannot read '" + (folder_ / "teacher/config.json").string() + "': "));
}

TEST_F(StudentFolderTest, ASectionThatIsNotAsWrittenIsNamedByItsKey) {
  write_student(folder_ / "student", false, student({0}), folder_ / "teacher", {});
  const nlohmann::json config = read_config();
  const auto refused = [&](const std::string& pointer, const nlohmann::json& value,
                           const std::string& message) {
    nlohmann::json changed = config;
    changed[nlohmann::json::json_pointer(pointer)] = value;
    write_config(changed);
    EXPECT_GRAFT_ERROR(load(), ErrorKind::input,
                       AllOf(HasSubstr("config.json: graft" + message),
                             testing::Not(HasSubstr("json.exception"))));
  };
  refused("/graft", nullptr, " is null, not an object of keys and values");
  refused("/graft/layers", {0.7}, ".layers: an entry is 0.7; an integer is needed");
  refused("/graft/layers", {1, 1}, ".layers names layer 1 twice");
  refused("/graft/layers", {5}, ".layers names layer 5; the model has layers 0 to 1");
  refused("/graft/layers", "all", ".layers is \"all\"; a list of layers is needed");
  refused("/graft/mixer/param_schema", "1", ".mixer.param_schema is \"1\"; an integer is needed");
  refused("/graft/mixer/version", 1, ".mixer.version is 1; a string is needed");
  refused("/graft/mixer/options", {1}, ".mixer.options is [1], not an object");
  // gdn's options, another mixer
  refused("/graft/mixer/id", "org.graft.hedgehog", ".mixer.options.");
  nlohmann::json changed = config;
  changed["graft"].erase("layers");
  write_config(changed);
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input,
                     HasSubstr("config.json: graft: the key 'layers' is missing"));
}

TEST_F(StudentFolderTest, AChangedOptionOrLayerListIsAnErrorThatNamesIt) {
  write_student(folder_ / "student", false, student({0}), folder_ / "teacher", {});
  const nlohmann::json config = read_config();
  nlohmann::json changed = config;
  changed["graft"]["mixer"]["options"]["write_gate_bias"] = true;
  write_config(changed);
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input,
                     AllOf(HasSubstr("graft.mixer.options.write_gate_bias is true"),
                           HasSubstr("model.safetensors was written with false")));
  changed = config;
  changed["graft"]["layers"] = {0, 1};
  write_config(changed);
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input, HasSubstr("model.layers.1"));
  changed = config;
  changed["graft"]["layers"] = {0, 9};
  write_config(changed);
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input,
                     AllOf(HasSubstr("config.json"), HasSubstr("layer 9")));
  changed = config;
  changed["graft"].erase("mixer");
  write_config(changed);
  EXPECT_GRAFT_ERROR(load(), ErrorKind::input, AllOf(HasSubstr("config.json"), HasSubstr("mixer")));
}

}  // namespace
}  // namespace graft
