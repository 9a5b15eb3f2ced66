#include <cmath>

#include "core/student/testing.h"
#include "core/train/adamw.h"
#include "core/train/calibrate.h"
#include "core/train/convert.h"
#include "core/train/objective_function.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// ---- optimizer

TEST(AdamW, FollowsThePaperStepByStep) {
  at::Tensor parameter = at::tensor({1.0f, -2.0f, 0.5f});
  const AdamWOptions o{0.1, 0.9, 0.99, 1e-8, 0.05};
  AdamW optimizer;
  optimizer.add_group({parameter}, o);
  std::vector<double> p{1.0, -2.0, 0.5}, m(3), v(3);
  for (int step = 1; step <= 5; ++step) {
    parameter.mutable_grad() = at::tensor({0.3f * static_cast<float>(step), -1.0f, 0.0f});
    const double factor = 1.0 / step;
    optimizer.step(factor);
    for (std::size_t i = 0; i < 3; ++i) {
      const double g = parameter.grad()[static_cast<std::int64_t>(i)].item<double>(),
                   lr = o.lr * factor;
      p[i] *= 1 - lr * o.weight_decay;
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      p[i] -= lr * (m[i] / (1 - std::pow(o.beta1, step))) /
              (std::sqrt(v[i] / (1 - std::pow(o.beta2, step))) + o.eps);
      EXPECT_NEAR(parameter[static_cast<std::int64_t>(i)].item<double>(), p[i], 1e-5)
          << "step " << step << ", element " << i;
    }
  }
}

TEST(AdamW, LeavesAParameterWithoutGradientAlone) {
  at::Tensor with = at::ones({2}), without = at::ones({2});
  AdamW optimizer;
  optimizer.add_group({with, without}, {.lr = 0.1, .weight_decay = 0.5});
  with.mutable_grad() = at::ones({2});
  optimizer.step(1);
  EXPECT_FALSE(at::equal(with, at::ones({2})));
  EXPECT_TRUE(at::equal(without, at::ones({2})));
}

TEST(AdamW, ClipsTheJointNorm) {
  at::Tensor a = at::zeros({1}), b = at::zeros({1});
  AdamW optimizer;
  optimizer.add_group({a}, {});
  optimizer.add_group({b}, {});
  a.mutable_grad() = at::tensor({3.0f});
  b.mutable_grad() = at::tensor({4.0f});
  EXPECT_NEAR(optimizer.clip_gradients(0), 5, 1e-6);
  EXPECT_NEAR(optimizer.clip_gradients(1), 5, 1e-6);
  EXPECT_NEAR(a.grad().item<double>(), 0.6, 1e-5);
  EXPECT_NEAR(b.grad().item<double>(), 0.8, 1e-5);
}

TEST(Schedule, WarmsUpThenFallsToItsFloor) {
  EXPECT_DOUBLE_EQ(lr_factor("constant", 0, 100, 10, 0.05), 0.1);
  EXPECT_DOUBLE_EQ(lr_factor("constant", 50, 100, 10, 0.05), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor("cosine", 0, 100, 0, 0.05), 1.0);
  EXPECT_NEAR(lr_factor("cosine", 50, 100, 10, 0.05), 0.525, 1e-12);
  EXPECT_NEAR(lr_factor("cosine", 100, 100, 10, 0.05), 0.05, 1e-12);
  EXPECT_GRAFT_ERROR(lr_factor("cosin", 0, 1, 0, 0), ErrorKind::usage, HasSubstr("'cosin'"));
}

// ---- calibration windows

Document document(const std::string& name, const std::vector<std::int32_t>& tokens) {
  return {name, tokens};
}

TEST(CalibrationWindows, TakeDocumentsInTurnAtPlacesDrawnBySeed) {
  std::vector<std::int32_t> a(5000), b(3000);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::int32_t>(i);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<std::int32_t>(100000 + i);
  const at::Tensor windows = calibration_windows({document("a", a), document("b", b)}, 6, 64, 1);
  for (std::int64_t i = 0; i < 6; ++i) {
    const std::int64_t k = i / 2, length = i % 2 == 0 ? 5000 : 3000;
    const std::int64_t start = 500 + ((k * 2654435761 + 97531) % 4294967296) % (length - 500 - 64);
    EXPECT_EQ(windows[i][0].item<std::int64_t>(), start + (i % 2 == 0 ? 0 : 100000)) << i;
    EXPECT_EQ(windows[i][63].item<std::int64_t>(), windows[i][0].item<std::int64_t>() + 63);
  }
  EXPECT_TRUE(
      at::equal(windows, calibration_windows({document("a", a), document("b", b)}, 6, 64, 1)));
  EXPECT_FALSE(
      at::equal(windows, calibration_windows({document("a", a), document("b", b)}, 6, 64, 2)));
}

TEST(CalibrationWindows, ShortDocumentsAreLeftOut) {
  const std::vector<std::int32_t> a(100, 1), brief(63, 2), b(64, 3);
  const std::vector<Document> documents = {document("brief", brief), document("a", a),
                                           document("brief too", brief), document("b", b)};
  EXPECT_EQ(long_enough(documents, 64).size(), 2u);
  EXPECT_TRUE(at::equal(calibration_windows(documents, 6, 64, 1),
                        calibration_windows({document("a", a), document("b", b)}, 6, 64, 1)));
  EXPECT_GRAFT_ERROR(
      calibration_windows(documents, 1, 101, 1), ErrorKind::input,
      AllOf(HasSubstr("'a'"), HasSubstr("100 tokens, but 101 are needed"),
            HasSubstr("one calibration window, and it is the longest document; give longer")));
}

TEST(CalibrationWindows, OfManyDocumentsThoseReadAreSpreadOverAll) {
  std::vector<std::vector<std::int32_t>> tokens;
  std::vector<Document> documents;
  for (std::int32_t i = 0; i < 100; ++i) tokens.emplace_back(8, i);
  for (const auto& each : tokens) documents.push_back(document("d", each));
  for (const std::int64_t count : {4, 10, 50, 99}) {
    const at::Tensor read =
        std::get<0>(calibration_windows(documents, count, 8, 1).select(1, 0).sort());
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at_place = read[i].item<std::int64_t>();
      if (i > 0) {
        EXPECT_GT(at_place, read[i - 1].item<std::int64_t>()) << "read twice";
      }
      // At most thrice as far apart as if they were placed evenly.
      const std::int64_t before = i > 0 ? read[i - 1].item<std::int64_t>() : 0;
      EXPECT_LE(at_place - before, 300 / count + 1) << count;
    }
    EXPECT_GE(read[count - 1].item<std::int64_t>(), 99 - 300 / count) << count;
  }
  const at::Tensor in_turn = calibration_windows(documents, 100, 8, 1).select(1, 0);
  EXPECT_TRUE(at::equal(in_turn, at::arange(100, at::kLong)));
}

TEST(CalibrationWindows, AShortDocumentIsNamed) {
  const std::vector<std::int32_t> tokens(10);
  EXPECT_GRAFT_ERROR(calibration_windows({document("tiny.txt", tokens)}, 1, 64, 1),
                     ErrorKind::input, AllOf(HasSubstr("tiny.txt"), HasSubstr("64")));
  EXPECT_EQ(calibration_windows({document("exact", tokens)}, 3, 10, 1).size(0), 3);
}

// ---- calibration of one block

class CalibrateTest : public testing::Test {
 protected:
  CalibrateTest() : backbone_(Backbone::load(make_tiny_teacher(folder_ / "teacher"))) {
    at::NoGradGuard no_grad;
    const at::Tensor ids =
        at::randint(0, 320, {8, 32}, at::make_generator<at::CPUGeneratorImpl>(3), at::kLong);
    x_ = backbone_.block_input(0, backbone_.embed(ids));
    y_ = backbone_.attention(0, x_).y;
    options_.objective = "layer_alignment";
    options_.steps = 30;
    options_.batch = 4;
    options_.lr = 3e-3;
    options_.warmup = 3;
  }
  std::shared_ptr<TokenMixer> mixer() {
    const LayerInfo info = backbone_.layer_info(0);
    return std::make_shared<TokenMixer>(plugins_.registry().create_mixer("gdn", info.c_info()), 1);
  }
  CalibrateReport run(TokenMixer& mixer, const StopCheck& stop = {}) {
    const auto objective =
        plugins_.registry().create_objective(options_.objective, options_.objective_options);
    return calibrate(mixer, *objective, options_, x_, y_, {}, 1, stop);
  }
  TempFolder folder_;
  BuiltPlugins plugins_;
  Backbone backbone_;
  at::Tensor x_, y_;
  CalibrateOptions options_;
};

TEST_F(CalibrateTest, LowersTheLossAndMovesEveryTrainedParameterAlone) {
  options_.frozen_roles = {"output", "graft.role.norm"};
  options_.steps = 60;
  const auto trained = mixer();
  const auto before = trained->clone();
  const CalibrateReport report = run(*trained);
  EXPECT_LT(report.last_loss, 0.9 * report.first_loss);
  EXPECT_EQ(report.steps, 60);
  EXPECT_EQ(report.tokens, 60 * 4 * 32);
  for (std::size_t i = 0; i < trained->parameters().size(); ++i) {
    const MixerParameter& parameter = trained->parameters()[i];
    const bool frozen = parameter.name.starts_with("o_");
    EXPECT_EQ(at::equal(parameter.tensor, before->parameters()[i].tensor), frozen)
        << parameter.name;
    EXPECT_EQ(std::count(report.trained.begin(), report.trained.end(), parameter.name),
              frozen ? 0 : 1)
        << parameter.name;
    EXPECT_FALSE(parameter.tensor.requires_grad());
    EXPECT_FALSE(parameter.tensor.grad().defined());
  }
}

TEST_F(CalibrateTest, GivesTheSameBytesTwice) {
  const auto a = mixer(), b = mixer();
  run(*a);
  run(*b);
  for (std::size_t i = 0; i < a->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(a->parameters()[i].tensor, b->parameters()[i].tensor))
        << a->parameters()[i].name;
}

TEST_F(CalibrateTest, OneBatchCanBeOverfitted) {
  x_ = x_.narrow(0, 0, 1);
  y_ = y_.narrow(0, 0, 1);
  options_.steps = 50;
  options_.batch = 0;
  options_.keep_best = true;
  for (const char* loss : {"mse", "l2", "cosine", "nmse"}) {
    options_.objective_options = {{"loss", std::string(loss)}};
    const auto trained = mixer();
    const CalibrateReport report = run(*trained);
    EXPECT_LT(report.last_loss, 0.7 * report.first_loss) << loss;
  }
}

TEST_F(CalibrateTest, KeepBestNeedsFullBatches) {
  options_.keep_best = true;
  EXPECT_GRAFT_ERROR(run(*mixer()), ErrorKind::usage, HasSubstr("calibrate.batch = 0"));
}

TEST_F(CalibrateTest, AWrongRoleIsNamedWithTheNearest) {
  options_.frozen_roles = {"outptu"};
  EXPECT_GRAFT_ERROR(
      run(*mixer()), ErrorKind::usage,
      AllOf(HasSubstr("calibrate.frozen_roles"), HasSubstr("'outptu'"), HasSubstr("'output'")));
  options_.frozen_roles.clear();
  options_.lr_roles = {{"qurey", 1e-4}};
  EXPECT_GRAFT_ERROR(run(*mixer()), ErrorKind::usage,
                     AllOf(HasSubstr("calibrate.lr_roles"), HasSubstr("'query'")));
}

TEST_F(CalibrateTest, AStageThatTrainsNothingIsRefused) {
  const auto target = mixer();
  for (const MixerParameter& parameter : target->parameters())
    options_.frozen_roles.push_back(parameter.role);
  EXPECT_GRAFT_ERROR(run(*target), ErrorKind::usage, HasSubstr("nothing is left to train"));
}

TEST_F(CalibrateTest, ANotFiniteLossStopsWithTheStepAndKeepsTheParameters) {
  const auto target = mixer();
  const auto before = target->clone();
  y_ = y_.clone();
  y_[0][0][0] = NAN;
  options_.batch = 0;
  EXPECT_GRAFT_ERROR(run(*target), ErrorKind::internal,
                     AllOf(HasSubstr("nan"), HasSubstr("step 0"), HasSubstr("layer_alignment")));
  for (std::size_t i = 0; i < target->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(target->parameters()[i].tensor, before->parameters()[i].tensor));
}

TEST_F(CalibrateTest, StopsWhenAsked) {
  int asked = 0;
  EXPECT_GRAFT_ERROR(run(*mixer(), [&] { return ++asked > 3; }), ErrorKind::interrupted,
                     HasSubstr("step 3"));
}

TEST_F(CalibrateTest, AnObjectiveWhoseSignalIsMissingNamesIt) {
  const auto objective = plugins_.registry().create_objective("layer_alignment");
  EXPECT_GRAFT_ERROR(ObjectiveFunction(*objective).loss({{GRAFT_SIGNAL_STUDENT_HIDDEN, x_}}),
                     ErrorKind::plugin,
                     AllOf(HasSubstr("layer_alignment"), HasSubstr("teacher.layer.hidden"),
                           HasSubstr("student.layer.hidden")));
}

// ---- conversion of a whole teacher

class ConvertTest : public CalibrateTest {
 protected:
  ConvertTest() {
    std::uint64_t state = 5;
    for (int i = 0; i < 4000; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      tokens_.push_back(static_cast<std::int32_t>((state >> 33) % 256));
    }
    recipe_.label = "taylor";
    recipe_.mixer = {
        "gdn",
        {{"silu_v", false}, {"rope", true}, {"write_gate_bias", true}, {"output_gate_bias", true}}};
    recipe_.init = {"taylor", {}};
    recipe_.init_tokens = 512;
    recipe_.window = 32;
    recipe_.stage = options_;
    recipe_.stage.tokens = 768;
    recipe_.stage.steps = 8;
  }
  Conversion run_convert(const std::vector<int>& layers, const ConvertHooks& hooks = {}) {
    return convert(plugins_.registry(), backbone_, recipe_, layers, {document("text", tokens_)}, 1,
                   hooks);
  }
  // Relative error of a converted block on the text it was fitted to: a teacher of random weights
  // has nothing that would carry over to another.
  double block_error(TokenMixer& mixer, int layer) {
    at::NoGradGuard no_grad;
    at::Tensor h = backbone_.embed(calibration_windows({document("text", tokens_)}, 16, 32, 1));
    for (int i = 0; i < layer; ++i)
      h = backbone_.finish_block(i, h, backbone_.attention(i, backbone_.block_input(i, h)).y);
    const at::Tensor x = backbone_.block_input(layer, h), y = backbone_.attention(layer, x).y;
    return ((mixer.forward(x).y - y).square().sum() / y.square().sum()).item<double>();
  }
  std::vector<std::int32_t> tokens_;
  Recipe recipe_;
};

TEST_F(ConvertTest, InitialisesThenCalibratesEachLayerOnTheTeachersInputs) {
  std::vector<int> done;
  ConvertHooks hooks;
  hooks.layer_done = [&](int layer, const std::string& note) {
    done.push_back(layer);
    EXPECT_THAT(note, HasSubstr("loss"));
  };
  const Conversion result = run_convert({0, 1}, hooks);
  EXPECT_THAT(done, ElementsAre(0, 1));
  EXPECT_EQ(result.init_tokens, 512);
  EXPECT_EQ(result.calibrate_tokens, 768);
  for (const int layer : {0, 1}) {
    const ConvertedLayer& converted = result.layers.at(layer);
    ASSERT_NE(converted.initialised, nullptr);
    EXPECT_LT(block_error(*converted.initialised, layer), 0.9)
        << "little better than silence, which is 1";
    EXPECT_LT(converted.report.last_loss, converted.report.first_loss);
    EXPECT_GT(converted.seconds.init, 0);
  }
  EXPECT_GT(result.seconds(true, {0, 1}), result.seconds(false, {0, 1}));
  EXPECT_GT(result.seconds(true, {0, 1}), result.seconds(true, {1}));
}

// Layers are converted from the teacher's inputs, so a layer comes out the same whichever others
// are converted.
TEST_F(ConvertTest, ALayerDoesNotDependOnTheOthers) {
  const Conversion both = run_convert({0, 1}), one = run_convert({1});
  const auto& a = both.layers.at(1).mixer->parameters();
  const auto& b = one.layers.at(1).mixer->parameters();
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(at::equal(a[i].tensor, b[i].tensor)) << a[i].name;
}

// Relative error of a student's last hidden states on the text it was converted on.
double stream_error(const Backbone& teacher, const Conversion& conversion, const at::Tensor& ids) {
  at::NoGradGuard no_grad;
  Model::Mixers mixers;
  for (const auto& [layer, done] : conversion.layers) mixers[layer] = done.mixer;
  const Model student(std::make_shared<const Backbone>(teacher.with(conversion.backbone)), mixers);
  const at::Tensor expected = teacher.hidden(ids);
  return ((student.hidden(ids) - expected).square().sum() / expected.square().sum()).item<double>();
}

TEST_F(ConvertTest, OnTheStudentsStreamLaterLayersMakeGoodWhatEarlierOnesLost) {
  recipe_.calibrate = false;
  recipe_.init_tokens = 768;
  const at::Tensor ids = calibration_windows({document("text", tokens_)}, 24, 32, 1);
  const Conversion apart = run_convert({0, 1});
  recipe_.stream.student = true;
  recipe_.stream.lost = 10;  // nothing a tiny model of random weights does is too far off
  const Conversion behind = run_convert({0, 1});
  recipe_.stream.mlp_ridge = 0.01;
  const Conversion corrected = run_convert({0, 1});

  // Nothing is lost before the first converted layer.
  for (const Conversion* other : {&behind, &corrected})
    for (std::size_t i = 0; i < apart.layers.at(0).mixer->parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(apart.layers.at(0).mixer->parameters()[i].tensor,
                               other->layers.at(0).mixer->parameters()[i].tensor, 1e-4, 1e-6));
  EXPECT_TRUE(behind.backbone.empty());
  EXPECT_EQ(corrected.backbone.size(), 2u);
  const double e_apart = stream_error(backbone_, apart, ids),
               e_behind = stream_error(backbone_, behind, ids),
               e_corrected = stream_error(backbone_, corrected, ids);
  EXPECT_LT(e_behind, e_apart);
  EXPECT_LT(e_corrected, 0.9 * e_behind);

  // Nothing is asked of a layer where every token counts as lost, so all that is left is its input.
  recipe_.stream.lost = 0;
  EXPECT_TRUE(at::allclose(run_convert({0, 1}).backbone.at("model.layers.1.mlp.down_proj.weight"),
                           backbone_.parameters().at("model.layers.1.mlp.down_proj.weight").value));
}

// Corrections start behind the first converted layer and go on to the last layer of all.
TEST_F(ConvertTest, MlpsBeforeTheFirstConvertedLayerStayAsTheyAre) {
  recipe_.calibrate = false;
  recipe_.stream.student = true;
  recipe_.stream.mlp_ridge = 0.1;
  const auto names = [&](const std::vector<int>& layers) {
    std::vector<std::string> list;
    for (const auto& [name, tensor] : run_convert(layers).backbone) list.push_back(name);
    return list;
  };
  EXPECT_THAT(names({1}), ElementsAre("model.layers.1.mlp.down_proj.weight"));
  EXPECT_THAT(names({0}), ElementsAre("model.layers.0.mlp.down_proj.weight",
                                      "model.layers.1.mlp.down_proj.weight"));
}

TEST_F(ConvertTest, AnInitializerThatReadsNoTextReadsNone) {
  recipe_.init = {"projection_copy", {}};
  recipe_.mixer.options.clear();
  recipe_.calibrate = false;
  const Conversion result = convert(plugins_.registry(), backbone_, recipe_, {0}, {}, 1, {});
  EXPECT_EQ(result.init_tokens, 0);
  EXPECT_EQ(result.layers.at(0).initialised, nullptr);
  const auto roles = backbone_.layer_roles(0);
  const auto& parameters = result.layers.at(0).mixer->parameters();
  const auto query = std::find_if(parameters.begin(), parameters.end(),
                                  [](const auto& p) { return p.role == GRAFT_ROLE_QUERY; });
  const auto teachers = std::find_if(
      roles.begin(), roles.end(), [](const auto& r) { return r.layout.role == GRAFT_ROLE_QUERY; });
  EXPECT_TRUE(at::equal(query->tensor, teachers->tensor));
}

TEST_F(ConvertTest, IsInterruptedBetweenLayers) {
  ConvertHooks hooks;
  hooks.should_stop = [] { return true; };
  EXPECT_GRAFT_ERROR(run_convert({0, 1}, hooks), ErrorKind::interrupted, HasSubstr("layer 0"));
}

TEST_F(ConvertTest, AnUnknownPartIsNamedBeforeAnyWeightIsRead) {
  recipe_.init.name = "tailor";
  EXPECT_GRAFT_ERROR(
      check_recipe(plugins_.registry(), recipe_, backbone_.config()), ErrorKind::usage,
      AllOf(HasSubstr("'tailor'"), HasSubstr("taylor"), HasSubstr("projection_copy")));
  recipe_.init.name = "taylor";
  recipe_.stage.objective = "layer_alignmnt";
  EXPECT_GRAFT_ERROR(check_recipe(plugins_.registry(), recipe_, backbone_.config()),
                     ErrorKind::usage, HasSubstr("layer_alignment"));
}

// The plugins of this build tree, and those made for tests.
class CalibrationNeedsTest : public ConvertTest {
 protected:
  HostServices services_{torch_host_settings()};
  PluginRegistry registry_{
      {std::filesystem::path(GRAFT_BUILD_DIR) / "lib/graft/plugins", GRAFT_TEST_PLUGINS},
      services_};
};

TEST_F(CalibrationNeedsTest, ASignalThatNoHostHasIsRefusedBeforeAnyWeightIsRead) {
  recipe_.init = {"demanding", {}};
  EXPECT_GRAFT_ERROR(check_recipe(registry_, recipe_, backbone_.config()), ErrorKind::plugin,
                     AllOf(HasSubstr("initializer 'demanding' needs the calibration signal "
                                     "org.example.signal.unheard-of"),
                           HasSubstr("block.input"), Not(HasSubstr("nice-to-have"))));
}

// Sixteen sequences in four batches: the limit counts whole batches.
TEST_F(CalibrationNeedsTest, ALimitOfSequencesIsRoundedUpToBatches) {
  const auto seen_with = [&](std::int64_t limit) {
    recipe_.init = {"limited", {{"limit", limit}}};
    try {
      convert(registry_, backbone_, recipe_, {0}, {document("text", tokens_)}, 1, {});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(seen_with(1), HasSubstr("head.context in 1 of 4 batches"));
  EXPECT_THAT(seen_with(4), HasSubstr("head.context in 1 of 4 batches"));
  EXPECT_THAT(seen_with(5), HasSubstr("head.context in 2 of 4 batches"));
  EXPECT_THAT(seen_with(0), HasSubstr("head.context in 4 of 4 batches"));
}

}  // namespace
}  // namespace graft
