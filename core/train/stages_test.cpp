#include <numeric>

#include "core/student/testing.h"
#include "core/train/batch.h"
#include "core/train/logit_loss.h"
#include "core/train/recompute.h"
#include "core/train/stage_trainer.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::vector<std::int32_t> tokens_of(int seed, std::size_t count) {
  std::vector<std::int32_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i)
    tokens[i] = static_cast<std::int32_t>((static_cast<std::size_t>(seed) * 37 + i * i * 7) % 256);
  return tokens;
}

// ---- batches

TEST(MakeBatches, RowsWithoutABorderAreOneBatchWithoutPadding) {
  const auto a = tokens_of(1, 9), b = tokens_of(2, 9);
  const auto batches = make_batches({{{a, 77}}, {{b, -1}}});
  ASSERT_EQ(batches.size(), 1u);
  EXPECT_EQ(batches[0].ids.sizes(), (std::vector<std::int64_t>{2, 9}));
  EXPECT_FALSE(batches[0].mask.defined());
  EXPECT_EQ(batches[0].real, 18);
  EXPECT_EQ(batches[0].labelled, 17);
  EXPECT_EQ(batches[0].labels[0][7].item<std::int64_t>(), a[8]);
  EXPECT_EQ(batches[0].labels[0][8].item<std::int64_t>(), 77);
  EXPECT_EQ(batches[0].labels[1][8].item<std::int64_t>(), kNoLabel);
}

TEST(MakeBatches, PiecesAreSortedSoThatLittleIsPadded) {
  std::vector<std::vector<std::int32_t>> documents;
  for (const std::size_t length : {1u, 2u, 3u, 10u, 11u, 12u, 30u, 5u, 4u, 1u})
    documents.push_back(tokens_of(static_cast<int>(length), length));
  std::vector<Piece> row;
  for (const auto& document : documents) row.push_back({document, -1});
  std::int64_t real = 0, labelled = 0;
  for (const Batch& batch : make_batches({row})) {
    real += batch.real;
    labelled += batch.labelled;
    EXPECT_LE(3 * (batch.ids.numel() - batch.real), batch.ids.numel());
    if (!batch.mask.defined()) continue;
    EXPECT_EQ(batch.mask.sum().item<std::int64_t>(), batch.real);
    EXPECT_TRUE(batch.labels.masked_select(batch.mask.eq(0)).eq(kNoLabel).all().item<bool>());
  }
  EXPECT_EQ(real, 79);
  EXPECT_EQ(labelled, 79 - 10);
}

// ---- trainers, on the tiny teacher

class TrainerTest : public testing::Test {
 protected:
  TrainerTest()
      : teacher_(std::make_shared<Backbone>(Backbone::load(make_tiny_teacher(folder_ / "t")))) {
    stage_.name = "test";
    stage_.where = "r.toml:1:1";
    stage_.steps = 50;
    stage_.schedule = {"constant", 50, 0, 0, 0};
    stage_.clip = 0;
    stage_.objectives = {{{"layer_alignment", {}}, 1}};
  }

  // Mixers of their own, the same each time.
  Model::Mixers mixers(const std::vector<std::int64_t>& layers) {
    Model::Mixers made;
    for (const std::int64_t layer : layers)
      made[layer] = std::make_shared<TokenMixer>(
          plugins_.registry().create_mixer("gdn", teacher_->layer_info(layer).c_info(),
                                           {{"rope", true}}),
          static_cast<std::uint64_t>(layer) + 5);
    return made;
  }

  std::vector<TrainedParameter> parameters(const Model& model, bool backbone = false) {
    std::vector<TrainedParameter> list;
    for (const auto& [layer, mixer] : model.mixers()) {
      const auto infos = mixer_parameters(model.config(), layer, mixer->plugin());
      for (std::size_t i = 0; i < infos.size(); ++i)
        list.push_back({infos[i], mixer->parameters()[i].tensor, stage_.lr, 0});
    }
    if (!backbone) return list;
    for (const ParameterInfo& info : backbone_parameters(model.config(), {0, 1}))
      list.push_back({info, model.backbone().parameters().at(info.name).value, stage_.lr, 0});
    return list;
  }

  static TensorsByName values(const std::vector<TrainedParameter>& parameters) {
    TensorsByName out;
    for (const TrainedParameter& p : parameters) out[p.info.name] = p.tensor.detach().clone();
    return out;
  }

  // One step with plain gradients: what the parameters moved by.
  TensorsByName moved_by_one_step(StageScope scope, const std::vector<Batch>& batches,
                                  bool backbone = false) {
    stage_.scope = scope;
    const auto student_backbone =
        backbone ? std::make_shared<Backbone>(Backbone::load(folder_ / "t")) : teacher_;
    const Model student(student_backbone, mixers({0, 1}));
    const StageObjectives objectives(plugins_.registry(), stage_);
    const auto trained = parameters(student, backbone);
    const TensorsByName before = values(trained);
    const auto trainer =
        scope == StageScope::layer
            ? make_layer_trainer(stage_, *teacher_, student.mixers(), objectives, trained)
            : make_model_trainer(stage_, *teacher_, student, objectives, trained);
    report_ = trainer->step(0, batches);
    TensorsByName state;
    trainer->save(state);
    TensorsByName gradients;  // after one step exp_avg is (1 - beta1) times the gradient
    for (const auto& [name, value] : before)
      gradients[name] = state.at("exp_avg/" + name) / (1 - stage_.beta1);
    return gradients;
  }

  static void expect_near(const TensorsByName& a, const TensorsByName& b, double tolerance) {
    for (const auto& [name, tensor] : a) {
      const double scale = std::max(tensor.abs().max().item<double>(), 1e-6);
      EXPECT_LT(max_difference(tensor, b.at(name)), tolerance * scale) << name;
    }
  }

  TempFolder folder_;
  BuiltPlugins plugins_;
  std::shared_ptr<Backbone> teacher_;
  Stage stage_;
  StepReport report_;
};

// Documents packed into rows: loss and gradients are those of the documents one by one.
TEST_F(TrainerTest, PackedDocumentsDoNotLeak) {
  const auto a = tokens_of(1, 13), b = tokens_of(2, 5), c = tokens_of(3, 1), d = tokens_of(4, 9);
  const std::vector<std::vector<Piece>> packed = {{{a, -1}, {c, -1}}, {{b, -1}, {d, 3}}};
  std::vector<Batch> alone;
  for (const Piece& piece : {Piece{a, -1}, Piece{b, -1}, Piece{c, -1}, Piece{d, 3}})
    for (Batch& batch : make_batches({{piece}})) alone.push_back(std::move(batch));
  for (const char* weight : {"none", "residual"}) {
    stage_.token_weight = weight;
    const auto together = moved_by_one_step(StageScope::layer, make_batches(packed));
    const StepReport report = report_;
    expect_near(together, moved_by_one_step(StageScope::layer, alone), 1e-4);
    EXPECT_EQ(report.tokens, 28);
    EXPECT_NEAR(report.loss, report_.loss, 1e-5 * report.loss);
    EXPECT_NEAR(report.grad_norm, report_.grad_norm, 1e-4 * report.grad_norm);
  }
}

TEST_F(TrainerTest, StepsOfEveryLossLowerIt) {
  const auto text = tokens_of(1, 64);
  const auto batches = make_batches({{{text, -1}}});
  for (const char* loss : {"mse", "l2", "cosine", "nmse"}) {
    stage_.objectives = {{{"layer_alignment", {{"loss", std::string(loss)}}}, 1},
                         {{"layer_alignment", {}}, 0.5}};
    const Model student(teacher_, mixers({0, 1}));
    const StageObjectives objectives(plugins_.registry(), stage_);
    const auto trainer =
        make_layer_trainer(stage_, *teacher_, student.mixers(), objectives, parameters(student));
    const StepReport first = trainer->step(0, batches);
    EXPECT_NEAR(first.loss,
                first.parts.at("layer_alignment") + 0.5 * first.parts.at("layer_alignment-2"),
                1e-5 * first.loss);
    StepReport last;
    for (int step = 1; step < 30; ++step) last = trainer->step(step, batches);
    EXPECT_LT(last.loss, first.loss) << loss;
  }
}

// ---- model scope

class ModelTrainerTest : public TrainerTest {
 protected:
  ModelTrainerTest() {
    stage_.scope = StageScope::model;
    stage_.objectives = {{{"kl", {}}, 1}, {{"cross_entropy", {}}, 0.3}};
    for (int i = 0; i < 4; ++i) texts_.push_back(tokens_of(i, i == 2 ? 9 : 21));
  }
  std::vector<Batch> batches() const {
    return make_batches({{{texts_[0], -1}, {texts_[2], -1}}, {{texts_[1], 5}, {texts_[3], -1}}});
  }
  std::vector<std::vector<std::int32_t>> texts_;
};

TEST_F(ModelTrainerTest, PackedDocumentsDoNotLeak) {
  std::vector<Batch> alone;
  for (std::size_t i = 0; i < texts_.size(); ++i)
    for (Batch& batch : make_batches({{{texts_[i], i == 1 ? 5 : -1}}}))
      alone.push_back(std::move(batch));
  const auto together = moved_by_one_step(StageScope::model, batches(), /*backbone=*/true);
  const StepReport report = report_;
  const auto one_by_one = moved_by_one_step(StageScope::model, alone, /*backbone=*/true);
  expect_near(together, one_by_one, 1e-3);
  EXPECT_NEAR(report.loss, report_.loss, 1e-5 * report.loss);
  EXPECT_NEAR(report.loss, report.parts.at("kl") + 0.3 * report.parts.at("cross_entropy"),
              1e-5 * report.loss);
  EXPECT_EQ(report.tokens, 72);
  // Everything that trains gets a gradient: embeddings, norms, MLP and every mixer parameter.
  for (const auto& [name, gradient] : together)
    EXPECT_GT(gradient.abs().max().item<double>(), 0) << name;
}

TEST_F(ModelTrainerTest, RecomputingChangesNothing) {
  const auto plain = moved_by_one_step(StageScope::model, batches(), /*backbone=*/true);
  const double loss = report_.loss;
  stage_.recompute = true;
  const auto again = moved_by_one_step(StageScope::model, batches(), /*backbone=*/true);
  EXPECT_EQ(report_.loss, loss);
  for (const auto& [name, gradient] : plain)
    EXPECT_TRUE(at::equal(gradient, again.at(name))) << name;
}

TEST_F(ModelTrainerTest, StepsLowerTheLossAndLeaveTheTeacherAlone) {
  const auto before = teacher_->parameters().at("model.embed_tokens.weight").value.clone();
  stage_.lr = 3e-3;
  const auto own = std::make_shared<Backbone>(Backbone::load(folder_ / "t"));
  const Model student(own, mixers({0, 1}));
  const StageObjectives objectives(plugins_.registry(), stage_);
  const auto trainer =
      make_model_trainer(stage_, *teacher_, student, objectives, parameters(student, true));
  const StepReport first = trainer->step(0, batches());
  StepReport last;
  for (int step = 1; step < 15; ++step) last = trainer->step(step, batches());
  EXPECT_LT(last.loss, 0.9 * first.loss);
  EXPECT_TRUE(at::equal(teacher_->parameters().at("model.embed_tokens.weight").value, before));
  EXPECT_FALSE(at::equal(own->parameters().at("model.embed_tokens.weight").value, before));
}

TEST_F(ModelTrainerTest, AFrozenBackboneStays) {
  const Model student(teacher_, mixers({0, 1}));
  const StageObjectives objectives(plugins_.registry(), stage_);
  const auto trainer =
      make_model_trainer(stage_, *teacher_, student, objectives, parameters(student));
  for (const auto& [name, parameter] : teacher_->parameters())
    EXPECT_FALSE(parameter.value.requires_grad()) << name;
  const StepReport first = trainer->step(0, batches());
  StepReport last;
  for (int step = 1; step < 15; ++step) last = trainer->step(step, batches());
  EXPECT_LT(last.loss, first.loss);
}

TEST_F(TrainerTest, AnObjectiveOfNoWeightIsNone) {
  stage_.objectives = {{{"layer_alignment", {}}, 0}};
  EXPECT_GRAFT_ERROR(StageObjectives(plugins_.registry(), stage_), ErrorKind::usage,
                     AllOf(HasSubstr("r.toml:1:1"), HasSubstr("weight above 0")));
}

TEST_F(TrainerTest, StateOfTheOptimizerIsCheckedOnLoad) {
  const Model student(teacher_, mixers({0}));
  const StageObjectives objectives(plugins_.registry(), stage_);
  const auto trainer =
      make_layer_trainer(stage_, *teacher_, student.mixers(), objectives, parameters(student));
  TensorsByName state;
  trainer->save(state);
  TensorsByName damaged = state;
  const std::string name = "exp_avg/model.layers.0.mixer.q_proj.weight";
  damaged.at(name) = at::zeros({3});
  EXPECT_GRAFT_ERROR(trainer->load(damaged), ErrorKind::input,
                     AllOf(HasSubstr(name), HasSubstr("shape [3]")));
  damaged.erase(name);
  EXPECT_GRAFT_ERROR(trainer->load(damaged), ErrorKind::input,
                     AllOf(HasSubstr(name), HasSubstr("has no tensor")));
}

// ---- recompute

TEST(Recompute, GivesTheSameGradients) {
  at::Tensor w = at::randn({4, 4}).set_requires_grad(true);
  const at::Tensor x = at::randn({3, 4});
  for (const bool input_too : {false, true}) {
    at::Tensor plain = x.clone().set_requires_grad(input_too);
    at::Tensor again = x.clone().set_requires_grad(input_too);
    const auto fn = [&](const at::Tensor& in) { return at::matmul(in, w).tanh(); };
    w.mutable_grad().reset();
    fn(fn(plain)).square().sum().backward();
    const at::Tensor expected = w.grad().clone();
    w.mutable_grad().reset();
    recompute(fn, recompute(fn, again)).square().sum().backward();
    EXPECT_TRUE(at::allclose(w.grad(), expected, 1e-6, 1e-6));
    if (input_too) {
      EXPECT_TRUE(at::allclose(again.grad(), plain.grad(), 1e-6, 1e-6));
    }
  }
}

}  // namespace
}  // namespace graft
