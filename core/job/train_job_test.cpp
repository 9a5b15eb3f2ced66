#include "core/job/train_job.h"

#include <ATen/Parallel.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "core/student/student_io.h"
#include "core/student/testing.h"
#include "core/train/checkpoint_store.h"

namespace graft {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

Stage layer_stage(const std::string& name, std::int64_t steps) {
  Stage stage;
  stage.name = name;
  stage.where = "r.toml:1:1";
  stage.steps = steps;
  stage.batch = 2;
  stage.context = 24;
  stage.init_tokens = 128;
  stage.init_window = 32;
  stage.schedule = {"cosine", steps, 2, 0, 0.1};
  stage.lr = 3e-3;
  stage.objectives = {{{"layer_alignment", {{"loss", std::string("l2")}}}, 1}};
  return stage;
}

class TrainJobTest : public testing::Test {
 protected:
  TrainJobTest() {
    ::setenv("GRAFT_CACHE_DIR", (folder_ / "cache").c_str(), 1);
    job_.teacher = make_tiny_teacher(folder_ / "teacher");
    fs::create_directory(folder_ / "texts");
    // Short documents beside long ones: rows cross borders.
    for (int i = 0; i < 12; ++i)
      write_file_atomically(
          folder_ / "texts" / (std::to_string(i) + ".txt"),
          made_up_prose(static_cast<std::uint64_t>(i + 1), i % 3 == 0 ? 120 : 41));
    job_.corpora = {{{folder_ / "texts"}, 1, "text"}};
    job_.out = folder_ / "out";
    job_.eval = {32, 3, 0, false};
    Stage first = layer_stage("align", 9);
    first.mixer = PluginChoice{"gdn", {{"rope", true}}};
    first.init = PluginChoice{"projection_copy", {}};
    first.accumulate = 2;
    first.eval_every = 4;
    first.checkpoint_every = 3;
    Stage second = layer_stage("calibrate", 5);
    second.token_weight = "residual";
    second.checkpoint_every = 2;
    job_.stages = {first, second};
    hooks_.say = [this](const std::string& message) { said_.push_back(message); };
    hooks_.warn = [this](const std::string& message) { warned_.push_back(message); };
    hooks_.begin = [this](const std::string& phase, std::int64_t, const std::string& unit,
                          std::int64_t) {
      phase_ = phase;
      steps_count_ = unit == "tokens";
    };
    hooks_.advance = [this](std::int64_t, const std::string&) { steps_ += steps_count_ ? 1 : 0; };
    hooks_.should_stop = [this] { return stop_after_ >= 0 && steps_ >= stop_after_; };
  }

  TrainResult run() {
    steps_ = 0;
    said_.clear();
    warned_.clear();
    return run_train_job(job_, plugins_.registry(), hooks_);
  }
  // Runs `steps` steps and is interrupted.
  void run_part(std::int64_t steps) {
    stop_after_ = steps;
    EXPECT_GRAFT_ERROR(run(), ErrorKind::interrupted, HasSubstr("--resume"));
    stop_after_ = -1;
    job_.resume = true;
  }

  std::vector<json> metrics(const fs::path& out) const {
    std::vector<json> lines;
    std::ifstream file(out / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
    return lines;
  }
  // Everything a run leaves that must not depend on interruptions.
  std::map<std::string, std::string> result_of(const fs::path& out) const {
    std::map<std::string, std::string> result;
    for (json line : metrics(out)) {
      line.erase("seconds");
      line.erase("tok_per_s");
      result["metrics"] += line.dump() + "\n";
    }
    result["student"] = read_text(out / "student/model.safetensors");
    const CheckpointStore store(out / "checkpoints", 9);
    const fs::path last = store.folder_of(store.steps().back());
    result["weights"] = read_text(last / "weights.safetensors");
    result["optimizer"] = read_text(last / "optimizer.safetensors");
    json state = json::parse(read_text(last / "state.json")).at("run");
    state.erase("seconds");
    result["state"] = state.dump();
    return result;
  }
  void expect_refused(ErrorKind kind, const testing::Matcher<const std::string&>& message) {
    EXPECT_GRAFT_ERROR(run(), kind, message);
    EXPECT_FALSE(fs::exists(job_.out)) << "nothing may be made before the job is checked";
  }
  fs::path checkpoint(std::int64_t step) const {
    return job_.out / "checkpoints" / ("step-" + std::to_string(step));
  }

  TempFolder folder_;
  BuiltPlugins plugins_;
  TrainJob job_;
  TrainHooks hooks_;
  std::vector<std::string> said_, warned_;
  std::string phase_;
  std::int64_t steps_ = 0, stop_after_ = -1;
  bool steps_count_ = false;
};

TEST_F(TrainJobTest, LeavesARunThatCanBeRead) {
  const TrainResult result = run();
  EXPECT_EQ(result.steps, 14);
  EXPECT_EQ(result.tokens, (9 * 2 + 5) * 2 * 24);
  EXPECT_EQ(result.perplexity.size(), 2u);
  const auto lines = metrics(job_.out);
  std::vector<json> steps, evals;
  json gates;
  for (const json& line : lines) {
    if (line.at("kind") == "gates")
      gates = line.at("layers");
    else
      (line.at("kind") == "step" ? steps : evals).push_back(line);
  }
  ASSERT_EQ(steps.size(), 14u);
  // Behind the start, steps 4, 8 and 9, and at the end of the second stage.
  ASSERT_EQ(evals.size(), 5u);
  ASSERT_EQ(gates.size(), 2u);
  for (const json& layer : gates) {
    EXPECT_EQ(layer.at("half_life").size(), 4u);
    for (const json& life : layer.at("half_life")) EXPECT_GT(life.get<double>(), 0);
    for (const json& gate : layer.at("write_gate")) EXPECT_LT(gate.get<double>(), 1);
  }
  EXPECT_EQ(evals[0].at("step"), 0);
  EXPECT_EQ(evals.back().at("perplexity"), result.perplexity.back());
  EXPECT_EQ(steps[8].at("tokens"), 9 * 2 * 2 * 24);
  EXPECT_EQ(steps[8].at("stage"), "align");
  EXPECT_EQ(steps[9].at("stage"), "calibrate");
  EXPECT_EQ(steps[9].at("stage_step"), 1);
  EXPECT_EQ(steps[0].at("layer_loss").size(), 2u);
  EXPECT_DOUBLE_EQ(steps[0].at("lr").get<double>(), 1.5e-3);
  EXPECT_DOUBLE_EQ(steps[0].at("loss").get<double>(),
                   steps[0].at("parts").at("layer_alignment").get<double>());
  EXPECT_LT(steps[8].at("loss").get<double>(), steps[0].at("loss").get<double>());
  const json record = json::parse(read_text(job_.out / "run.json"));
  EXPECT_EQ(record.at("stages").size(), 2u);
  EXPECT_THAT(record.at("stages")[0].at("trained").get<std::vector<std::string>>(),
              Contains("model.layers.1.mixer.q_proj.weight"));
  EXPECT_THAT(record.at("fingerprint").at("plugin").at("mixer gdn").get<std::string>(),
              AllOf(HasSubstr("org.graft.gdn"), HasSubstr("sha256")));
  EXPECT_GT(record.at("memory_peak").get<double>(), 0);
  EXPECT_THAT(said_, Contains(AllOf(HasSubstr("token budget"), HasSubstr("memory: about"))));
  EXPECT_THAT(said_, Contains(AllOf(HasSubstr("stage 1/2 align"), HasSubstr("q_proj.weight x2"))));
  const Model student = load_model(job_.out / "student", plugins_.registry());
  EXPECT_EQ(student.mixers().size(), 2u);
}

// Behind step 1; in the middle; at a checkpoint; at the border of the stages, one before and one
// behind it; near the end. Rows come in epochs of about thirty, so the border of one is crossed.
TEST_F(TrainJobTest, InterruptedAndResumedEqualsUninterrupted) {
  run();
  const auto expected = result_of(job_.out);
  for (const auto& parts : std::vector<std::vector<std::int64_t>>{
           {1}, {4}, {6}, {8}, {9}, {10}, {13}, {2, 3, 5, 1}, {9, 2}}) {
    job_.out = folder_ / "again";
    job_.resume = false;
    for (const std::int64_t steps : parts) run_part(steps);
    run();
    EXPECT_EQ(result_of(job_.out), expected) << "interrupted behind " << parts[0];
    fs::remove_all(job_.out);
  }
}

Stage model_stage(const std::string& name, std::int64_t steps) {
  Stage stage = layer_stage(name, steps);
  stage.scope = StageScope::model;
  stage.train = {"all"};
  stage.objectives = {{{"kl", {}}, 1}};
  return stage;
}

// Mixers and the parts of the backbone that were trained before both are where they were.
TEST_F(TrainJobTest, GoesOnFromAStudent) {
  job_.stages[1] = model_stage("distil", 4);
  const double before = run().perplexity.back();
  job_.student = folder_ / "first";
  fs::rename(job_.out / "student", job_.student);
  job_.student_mixer = PluginChoice{"gdn", {{"rope", true}}};
  job_.stages = {model_stage("more", 5)};
  job_.stages[0].train = {"mixers", "norms"};
  job_.stages[0].checkpoint_every = 2;
  job_.out = folder_ / "on";
  run();
  const auto expected = result_of(job_.out);
  const json first = metrics(job_.out).front();
  EXPECT_EQ(first.at("kind"), "eval");
  EXPECT_NEAR(first.at("perplexity").get<double>(), before, 1e-4 * before);

  job_.out = folder_ / "again";
  run_part(3);
  run();
  EXPECT_EQ(result_of(job_.out), expected);

  const fs::path config = job_.student / "config.json";
  write_file_atomically(config, read_text(config) + " ");
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage, HasSubstr("student config.json: was "));
}

TEST_F(TrainJobTest, AStudentOfAnotherTeacherIsRefused) {
  run();
  job_.student = job_.out / "student";
  job_.student_mixer = PluginChoice{"gdn", {{"rope", true}}};
  job_.stages = {model_stage("more", 2)};
  job_.out = folder_ / "on";
  ModelFiles files = ModelFiles::golden("llama");
  files.tensors["model.layers.1.mlp.up_proj.weight"] = at::ones({100, 64});
  files.tensors["model.layers.1.mlp.gate_proj.weight"] = at::ones({100, 64});
  files.tensors["model.layers.1.mlp.down_proj.weight"] = at::ones({64, 100});
  files.tensors["model.layers.0.mlp.up_proj.weight"] = at::ones({100, 64});
  files.tensors["model.layers.0.mlp.gate_proj.weight"] = at::ones({100, 64});
  files.tensors["model.layers.0.mlp.down_proj.weight"] = at::ones({64, 100});
  files.config["intermediate_size"] = 100;
  files.write(folder_ / "other");
  fs::copy_file(job_.teacher / "tokenizer.json", folder_ / "other/tokenizer.json");
  job_.teacher = folder_ / "other";
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("student"), HasSubstr("is not one of"), HasSubstr("other'"),
                           HasSubstr("another shape")));
}

// A killed process leaves checkpoints and, behind them, lines and half-written files.
TEST_F(TrainJobTest, WhatAKilledProcessLeftIsTakenBack) {
  run();
  const auto expected = result_of(job_.out);
  job_.out = folder_ / "killed";
  run_part(7);
  // Killed behind step 7, of which only the checkpoint of step 6 is there.
  fs::remove_all(checkpoint(7));
  std::ofstream(job_.out / "metrics.jsonl", std::ios::app) << R"({"kind":"step","stage_in)";
  fs::create_directory(job_.out / "checkpoints/step-7.partial-123-0");
  fs::create_directory(job_.out / "student.partial-123-0");
  run();
  EXPECT_THAT(said_, Contains(HasSubstr("resumed at step 6")));
  EXPECT_EQ(result_of(job_.out), expected);
  for (const auto& entry : fs::recursive_directory_iterator(job_.out))
    EXPECT_THAT(entry.path().string(), Not(HasSubstr("partial")));
}

TEST_F(TrainJobTest, ADamagedCheckpointIsNamedAndTheOneBeforeItUsed) {
  run();
  const auto expected = result_of(job_.out);
  job_.out = folder_ / "damaged";
  run_part(8);
  const fs::path file = checkpoint(8) / "weights.safetensors";
  std::string bytes = read_text(file);
  bytes[bytes.size() / 2] ^= 1;
  write_file_atomically(file, bytes);
  run();
  EXPECT_THAT(said_, Contains(AllOf(HasSubstr("step 8"), HasSubstr("weights.safetensors"),
                                    HasSubstr("damaged"), HasSubstr("of step 6"))));
  EXPECT_THAT(said_, Contains(HasSubstr("step-8.damaged")));
  EXPECT_EQ(result_of(job_.out), expected);
}

TEST_F(TrainJobTest, HalfACheckpointIsNoneAndWithoutAnyThereIsAnError) {
  run_part(4);
  fs::remove(checkpoint(4) / "manifest.json");
  fs::remove(checkpoint(3) / "optimizer.safetensors");
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("no checkpoint"), HasSubstr("half a checkpoint"),
                           HasSubstr("optimizer.safetensors")));
}

TEST_F(TrainJobTest, TheLastCheckpointsAndTheBestStay) {
  for (Stage& stage : job_.stages) stage.eval_every = 1;
  job_.stages[0].lr = 1e-9;  // the first measurement stays the best or nearly so
  job_.stages[0].checkpoint_every = 1;
  job_.stages.resize(1);
  job_.checkpoint_keep = 3;
  run();
  const CheckpointStore store(job_.out / "checkpoints", 3);
  const auto steps = store.steps();
  const auto best = read_checkpoint(checkpoint(9)).state.at("run").at("best_step");
  EXPECT_EQ(std::set<std::int64_t>(steps.begin(), steps.end()),
            (std::set<std::int64_t>{best.get<std::int64_t>(), 7, 8, 9}));
}

TEST_F(TrainJobTest, AChangedRunIsRefusedWithTheDifference) {
  job_.recipe = {{"stage.align.lr", "0.003"}};
  run_part(4);
  job_.recipe["stage.align.lr"] = "0.001";
  job_.stages[0].lr = 1e-3;
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage,
                     AllOf(HasSubstr("recipe stage.align.lr: was 0.003, is now 0.001"),
                           HasSubstr("--allow-change")));
  write_file_atomically(folder_ / "texts/0.txt", made_up_prose(99, 300));
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage, HasSubstr("text corpus 0: was "));
  job_.allow_change = true;
  run();
  EXPECT_THAT(said_, Contains(HasSubstr("going on although this changed")));
}

TEST_F(TrainJobTest, ACheckpointThatDoesNotFitTheMixerIsRefusedWhateverIsAllowed) {
  run_part(4);
  job_.allow_change = true;
  const TrainCheckpoint saved = read_checkpoint(checkpoint(4));
  CheckpointStore store(job_.out / "checkpoints", 9);
  TrainCheckpoint changed = saved;
  changed.state["mixer"]["param_schema"] = 77;
  store.write(changed, -1);
  EXPECT_GRAFT_ERROR(
      run(), ErrorKind::plugin,
      AllOf(HasSubstr("step-4/state.json"), HasSubstr("saved with param_schema 77 of mixer"),
            HasSubstr("the plugin at hand has param_schema 1 of mixer \"org.graft.gdn\"")));
  const std::string first = "model.layers.0.mixer.q_proj.weight";
  changed = saved;
  changed.weights["model.layers.0.mixer.old_proj.weight"] = at::ones({2});
  store.write(changed, -1);
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("step-4"), HasSubstr("'model.layers.0.mixer.old_proj.weight', "
                                                          "which this recipe's student")));
  changed = saved;
  changed.weights[first] = at::ones({2, 3});
  store.write(changed, -1);
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("step-4"), HasSubstr(first), HasSubstr("has shape [2, 3]"),
                           HasSubstr("expected [64, 64]")));
}

TEST_F(TrainJobTest, TheTeacherIsMeasuredAgainWhenItsMeasurementChanged) {
  const auto teacher = [this] {
    return json::parse(read_text(job_.out / "run.json")).at("teacher_perplexity").get<double>();
  };
  const auto was_measured = [] { return Contains(HasSubstr("teacher: perplexity")); };
  run_part(4);
  const double before = teacher();
  run_part(2);
  EXPECT_THAT(said_, Not(was_measured()));
  EXPECT_EQ(teacher(), before);
  job_.eval.context = 16;
  run_part(2);
  EXPECT_THAT(said_, was_measured());
  EXPECT_NE(teacher(), before);
  // Without a checkpoint it is another run.
  fs::remove_all(job_.out / "checkpoints");
  run_part(2);
  EXPECT_THAT(said_, was_measured());
}

TEST_F(TrainJobTest, ABrokenRecordIsWrittenAnew) {
  run();
  const auto expected = result_of(job_.out);
  job_.out = folder_ / "broken";
  run_part(4);
  for (const char* text : {"{\"graft\": \"0.", "[]"}) {
    write_file_atomically(job_.out / "run.json", std::string_view(text));
    run_part(2);
    EXPECT_THAT(warned_, Contains(AllOf(HasSubstr("run.json"), HasSubstr("written anew"))));
    EXPECT_TRUE(json::parse(read_text(job_.out / "run.json")).contains("teacher_perplexity"));
  }
  run();
  EXPECT_TRUE(warned_.empty());
  EXPECT_EQ(result_of(job_.out), expected);
}

TEST_F(TrainJobTest, OtherThreadsThanTheRunWasSavedWithAreSaid) {
  const int threads = at::get_num_threads();
  run_part(4);
  at::set_num_threads(threads + 1);
  run_part(2);
  at::set_num_threads(threads);
  EXPECT_THAT(warned_, Contains(AllOf(HasSubstr("threads = " + std::to_string(threads) + ","),
                                      HasSubstr("threads = " + std::to_string(threads + 1)),
                                      HasSubstr("not be the same to the byte"))));
}

TEST_F(TrainJobTest, MoreMemoryThanTheMachineHasIsSaid) {
  for (Stage& stage : job_.stages) {
    stage.batch = 1 << 20;
    stage.context = 200;
  }
  hooks_.should_stop = [this] { return !warned_.empty(); };
  EXPECT_GRAFT_ERROR(run(), ErrorKind::interrupted, HasSubstr("interrupted"));
  EXPECT_THAT(warned_, Contains(AllOf(HasSubstr("the machine has"), HasSubstr("set batch"))));
}

TEST_F(TrainJobTest, AnInterruptedRunHasAReport) {
  run_part(4);
  EXPECT_THAT(read_text(job_.out / "report.html"), HasSubstr("align"));
}

TEST_F(TrainJobTest, AFolderOfSomethingElseIsLeftAlone) {
  run_part(2);
  job_.resume = false;
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage,
                     AllOf(HasSubstr("holds a run"), HasSubstr("--resume"), HasSubstr("--force")));
  job_.force = true;
  EXPECT_EQ(run().steps, 14);
  job_.out = folder_ / "texts";
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage, HasSubstr("something that is no run"));
  EXPECT_TRUE(fs::exists(folder_ / "texts/0.txt"));
}

TEST_F(TrainJobTest, ResumeOfAFinishedRunGivesTheSameStudent) {
  run();
  const auto expected = result_of(job_.out);
  job_.resume = true;
  run();
  EXPECT_EQ(result_of(job_.out), expected);
}

TEST_F(TrainJobTest, ALossThatIsNotFiniteStopsWithTheStateSaved) {
  job_.stages[0].lr = 1e30;
  job_.stages[0].clip = 0;
  job_.stages[0].schedule = {"constant", 9, 0, 0, 0};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::internal,
                     AllOf(HasSubstr("stage 'align', step "), HasSubstr("layer "),
                           HasSubstr("is saved in"), HasSubstr("checkpoints/step-")));
  job_.resume = true;  // it is a checkpoint like any other
  EXPECT_GRAFT_ERROR(run(), ErrorKind::internal, HasSubstr("stage 'align', step "));
}

// Losses are sums over tokens over their number: how a step is cut into batches changes nothing.
TEST_F(TrainJobTest, AccumulationIsOneLargeBatch) {
  const auto steps_with = [&](std::int64_t batch, std::int64_t accumulate) {
    for (Stage& stage : job_.stages) {
      stage.batch = batch;
      stage.accumulate = accumulate;
    }
    job_.out = folder_ / ("batch-" + std::to_string(batch));
    run();
    std::vector<json> steps;
    for (const json& line : metrics(job_.out))
      if (line.at("kind") == "step") steps.push_back(line);
    return steps;
  };
  const auto whole = steps_with(4, 1), cut = steps_with(1, 4);
  ASSERT_EQ(whole.size(), cut.size());
  for (std::size_t i = 0; i < whole.size(); ++i)
    for (const char* key : {"loss", "grad_norm", "tokens"}) {
      // Sums are made in another order, and AdamW turns the rounding of a small gradient into a
      // step of full size: the two runs drift apart slowly.
      const double value = whole[i].at(key).get<double>(), tolerance = i < 3 ? 2e-3 : 5e-2;
      EXPECT_NEAR(cut[i].at(key).get<double>(), value, tolerance * value)
          << key << ", step " << i + 1;
    }
}

TEST_F(TrainJobTest, TextThatIsTrainedOnAndMeasuredIsSaid) {
  job_.stages.resize(1);
  write_file_atomically(folder_ / "copy.txt", "x" + read_text(folder_ / "texts/0.txt"));
  job_.eval_text = {folder_ / "copy.txt"};
  run();
  EXPECT_THAT(warned_, Contains(HasSubstr("share a run of 32 tokens")));
  write_file_atomically(folder_ / "copy.txt", std::string(200, 'q'));
  job_.out = folder_ / "clean";
  run();
  EXPECT_TRUE(warned_.empty());
}

// Distances divide by the sum of their weights' roots, not by the tokens.
TEST_F(TrainJobTest, WeightedDistancesDoNotDependOnHowAStepIsCut) {
  job_.stages.resize(1);
  Stage& stage = job_.stages[0];
  stage.steps = 1;
  stage.token_weight = "residual";
  for (const bool relative : {false, true}) {
    stage.objectives[0].plugin.options = {{"loss", std::string("l2")}, {"relative", relative}};
    std::vector<json> steps;
    for (const std::int64_t batch : {4, 1}) {
      stage.batch = batch;
      stage.accumulate = 4 / batch;
      job_.out = folder_ / (std::to_string(batch) + (relative ? "-relative" : ""));
      run();
      for (const json& line : metrics(job_.out))
        if (line.at("kind") == "step") steps.push_back(line);
    }
    ASSERT_EQ(steps.size(), 2u);
    for (const char* key : {"loss", "grad_norm"}) {
      const double whole = steps[0].at(key).get<double>();
      EXPECT_NEAR(steps[1].at(key).get<double>(), whole, 1e-4 * whole) << key << relative;
    }
  }
}

TEST_F(TrainJobTest, WeightsThatAreNotFiniteBehindTheLastStepAreNoStudent) {
  job_.stages.resize(1);
  job_.stages[0].steps = 1;
  job_.stages[0].lr = 1e39;
  job_.stages[0].schedule = {"constant", 1, 0, 0, 0};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::internal,
                     AllOf(HasSubstr("stage 'align', step 1, layer "),
                           HasSubstr(" is not finite behind this step")));
  EXPECT_FALSE(fs::exists(job_.out / "student"));
}

TEST_F(TrainJobTest, ALossOfTheWholeModelThatIsNotFiniteNamesTheLayer) {
  job_.stages = {job_.stages[0], model_stage("distil", 4)};
  job_.stages[0].steps = 1;
  job_.stages[1].lr = 1e30;
  job_.stages[1].clip = 0;
  job_.stages[1].schedule = {"constant", 4, 0, 0, 0};
  EXPECT_GRAFT_ERROR(
      run(), ErrorKind::internal,
      AllOf(HasSubstr("stage 'distil', step "), HasSubstr("layer "), HasSubstr("is saved in")));
}

TEST_F(TrainJobTest, TrainsWhatIsSelectedAndNothingElse) {
  job_.stages.resize(1);
  job_.stages[0].train = {"mixers", "-role:output", "-role:norm"};
  job_.stages[0].groups = {{{"role:query"}, 0.0, 0.0, "r.toml:9:1"}};
  run_part(1);
  const auto first = read_checkpoint(checkpoint(1)).weights;
  run();
  const auto last = read_checkpoint(checkpoint(9)).weights;
  const json record = json::parse(read_text(job_.out / "run.json"));
  const auto trained = record.at("stages")[0].at("trained").get<std::set<std::string>>();
  for (const auto& [name, tensor] : first) {
    const bool frozen = name.find(".o_") != std::string::npos;
    EXPECT_EQ(trained.contains(name), !frozen) << name;
    const bool still = frozen || name.ends_with("q_proj.weight");  // a learning rate of 0
    EXPECT_EQ(at::equal(tensor, last.at(name)), still) << name;
  }
}

TEST_F(TrainJobTest, KeepsTheBestOfEachLayer) {
  job_.stages.resize(1);
  Stage& stage = job_.stages[0];
  stage.pool = 4 * 24;
  stage.keep_best = true;
  stage.schedule = {"constant", 9, 0, 0, 0};
  stage.lr = 0.05;
  run();
  const auto expected = result_of(job_.out);
  job_.out = folder_ / "again";
  run_part(5);
  run();
  EXPECT_EQ(result_of(job_.out), expected);
  stage.pool = 0;
  job_.out = folder_ / "third";
  job_.resume = false;
  expect_refused(ErrorKind::usage, AllOf(HasSubstr("keep_best"), HasSubstr("pool")));
}

// A text of fewer rows than the pool: what counts is how many there are.
TEST_F(TrainJobTest, KeepsTheBestOnlyWhereEveryStepSeesTheWholeText) {
  job_.stages.resize(1);
  Stage& stage = job_.stages[0];
  stage.places["keep_best"] = "r.toml:7:1";
  stage.keep_best = true;
  stage.batch = 509;  // a prime: no number of rows divides it
  stage.accumulate = 1;
  stage.pool = 509 * 24;
  EXPECT_GRAFT_ERROR(
      run(), ErrorKind::usage,
      AllOf(testing::StartsWith("r.toml:7:1: stage 'align': keep_best"), HasSubstr("the text has "),
            HasSubstr("rows of 24 tokens"), HasSubstr("takes 509")));
}

TEST_F(TrainJobTest, Bfloat16KeepsItsMasterWeights) {
  for (Stage& stage : job_.stages) stage.compute = Compute::bfloat16;
  job_.stages[0].lr = 1e-5;
  run();
  for (const json& line : metrics(job_.out)) {
    if (line.at("kind") == "step") {
      EXPECT_TRUE(std::isfinite(line.at("loss").get<double>()));
    }
  }
  for (const auto& [name, tensor] : read_checkpoint(checkpoint(14)).weights)
    EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
}

// Both scopes, a trained backbone, a new mixer from the student before, and a stage that is a start
// alone: resumed at any border it is the same.
TEST_F(TrainJobTest, LinearAttentionThenMambaResumesExactly) {
  Stage linear = layer_stage("linearise", 3);
  linear.mixer = PluginChoice{"hedgehog", {}};
  linear.init = PluginChoice{"projection_copy", {}};
  linear.train = {"role:feature-map-*"};
  linear.objectives = {{{"layer_alignment", {{"loss", std::string("cosine")}}}, 1}};
  Stage start = layer_stage("convert", 0);
  start.mixer = PluginChoice{"hedgemamba", {}};
  start.init = PluginChoice{"attention_to_mamba", {}};
  start.init_from_student = true;
  Stage tune = layer_stage("tune", 4);
  tune.scope = StageScope::model;
  tune.train = {"all", "-embeddings"};
  tune.objectives = {{{"cross_entropy", {}}, 1}, {{"kl", {}}, 0.5}};
  tune.checkpoint_every = 2;
  tune.recompute = true;
  job_.stages = {linear, start, tune};
  run();
  const auto expected = result_of(job_.out);
  const Model student = load_model(job_.out / "student", plugins_.registry());
  EXPECT_EQ(student.mixers().at(0)->plugin().label(), "hedgemamba");
  const Backbone teacher = Backbone::load(job_.teacher);
  const auto same = [&](const std::string& name) {
    return at::equal(student.backbone().parameters().at(name).value,
                     teacher.parameters().at(name).value);
  };
  EXPECT_TRUE(same("model.embed_tokens.weight"));
  EXPECT_FALSE(same("model.norm.weight"));
  EXPECT_FALSE(same("model.layers.0.mlp.up_proj.weight"));
  for (const std::int64_t steps : {2, 3, 4, 6}) {
    job_.out = folder_ / "again";
    job_.resume = false;
    run_part(steps);
    run();
    // The last checkpoint of the first stage may be all there is: names of steps are the same.
    EXPECT_EQ(result_of(job_.out), expected) << "interrupted behind " << steps;
    fs::remove_all(job_.out);
  }
}

TEST_F(TrainJobTest, AMambaStudentStartsAsTheLinearOne) {
  Stage linear = layer_stage("linearise", 2);
  linear.mixer = PluginChoice{"hedgehog", {}};
  linear.init = PluginChoice{"projection_copy", {}};
  Stage start = layer_stage("convert", 0);
  start.mixer = PluginChoice{"hedgemamba", {}};
  start.init = PluginChoice{"attention_to_mamba", {}};
  start.init_from_student = true;
  start.objectives.clear();   // what trains nothing needs none, ...
  start.context = 1 << 20;    // ... reads no text, ...
  start.train = {"no such"};  // ... and selects no parameter
  job_.stages = {linear, start};
  const TrainResult result = run();
  const auto lines = metrics(job_.out);
  std::vector<double> perplexity;
  for (const json& line : lines)
    if (line.at("kind") == "eval") perplexity.push_back(line.at("perplexity").get<double>());
  ASSERT_EQ(perplexity.size(), 3u);
  EXPECT_EQ(result.perplexity, (std::vector<double>{perplexity[1], perplexity[2]}));
  EXPECT_NE(perplexity[0], perplexity[1]);
  EXPECT_NEAR(perplexity[2], perplexity[1], 1e-4 * perplexity[1]);
}

// ---- bad recipes, refused before a weight is read or a folder made

TEST_F(TrainJobTest, AStageThatTrainsNothing) {
  job_.stages[1].train = {"mixers", "-mixers"};
  expect_refused(ErrorKind::usage,
                 AllOf(HasSubstr("stage 'calibrate'"), HasSubstr("train nothing")));
  job_.stages[1].train = {"mlp"};
  expect_refused(ErrorKind::usage, AllOf(HasSubstr("'mlp'"), HasSubstr("reaches the mixers only")));
}

TEST_F(TrainJobTest, AStageWhoseLearningRatesAreAllZero) {
  Stage& stage = job_.stages[1];
  stage.places["lr"] = "r.toml:8:1";
  stage.lr = 0;
  expect_refused(ErrorKind::usage, AllOf(testing::StartsWith("r.toml:8:1: stage 'calibrate'"),
                                         HasSubstr("learning rate"), HasSubstr("train nothing")));
  stage.lr = 1e-3;
  stage.groups = {{{"mixers"}, 0.0, -1, "r.toml:9:1"}};
  expect_refused(ErrorKind::usage, HasSubstr("train nothing"));
  stage.train = {"mixers", "-role:query"};
  stage.groups = {{{"role:query"}, 1e-3, -1, "r.toml:9:1"}};
  expect_refused(ErrorKind::usage,
                 AllOf(testing::StartsWith("r.toml:9:1: stage 'calibrate': match selects no"),
                       HasSubstr("leave the group out")));
}

TEST_F(TrainJobTest, MoreTokensThanThereAreNumbersFor) {
  Stage& stage = job_.stages[1];
  stage.steps = 1'000'000'000'000;
  stage.batch = stage.accumulate = 1'000'000;
  EXPECT_GT(stage.tokens(), 0);
  expect_refused(ErrorKind::usage,
                 AllOf(HasSubstr("stage 'calibrate'"), HasSubstr("1000000000000 x 1000000 x"),
                       HasSubstr("the most a stage can have")));
}

// What knows nothing of recipes is named with the place that asked for it.
TEST_F(TrainJobTest, ErrorsStartWithThePlaceOfTheirKey) {
  job_.places["keep_attention"] = "r.toml:2:1";
  job_.keep_attention = "7";
  expect_refused(ErrorKind::usage, AllOf(testing::StartsWith("r.toml:2:1: keep_attention '7'"),
                                         HasSubstr("layers 0 to 1")));
  job_.keep_attention = "none";
  job_.stages[0].places["init.name"] = "r.toml:4:1";
  job_.stages[0].init = PluginChoice{"attention_to_mamba", {}};
  expect_refused(ErrorKind::plugin,
                 AllOf(testing::StartsWith("r.toml:4:1: initializer"), HasSubstr("needs role")));
}

TEST_F(TrainJobTest, AnObjectiveWhoseSignalTheScopeDoesNotHave) {
  job_.stages[1].scope = StageScope::model;
  expect_refused(
      ErrorKind::usage,
      AllOf(HasSubstr("layer_alignment"), HasSubstr("student.layer.hidden"),
            HasSubstr("scope \"model\" does not have"), HasSubstr("scope = \"layer\" has it")));
  job_.stages[1].objectives[0].where = "r.toml:9:1";
  expect_refused(ErrorKind::usage, testing::StartsWith("r.toml:9:1: stage 'calibrate': objective"));
  job_.stages[1].scope = StageScope::layer;
  job_.stages[1].objectives.clear();
  expect_refused(ErrorKind::usage, AllOf(HasSubstr("no objective"), HasSubstr("calibrate")));
}

TEST_F(TrainJobTest, AContextLongerThanTheTeachers) {
  job_.stages[0].context = 1 << 20;
  expect_refused(ErrorKind::usage,
                 AllOf(HasSubstr("context is 1048576"), HasSubstr("max_position_embeddings")));
  job_.stages[0].context = 24;
  job_.stages[0].init = PluginChoice{"taylor", {}};  // runs the teacher on text
  job_.stages[0].places["init.window"] = "r.toml:5:1";
  job_.stages[0].init_window = 1 << 20;
  expect_refused(ErrorKind::usage, AllOf(testing::StartsWith("r.toml:5:1: stage 'align'"),
                                         HasSubstr("init.window is 1048576")));
  job_.places["eval.context"] = "--set eval.context";
  job_.eval.context = 1 << 20;
  expect_refused(ErrorKind::usage, AllOf(testing::StartsWith("--set eval.context: eval.context is"),
                                         HasSubstr("set eval.context to 256 or less")));
}

TEST_F(TrainJobTest, AStartThatIsNone) {
  job_.stages[0].mixer.reset();
  job_.stages[0].init.reset();
  expect_refused(ErrorKind::usage, HasSubstr("the first stage needs a mixer"));
  job_.stages[0].mixer = PluginChoice{"gdn", {}};
  expect_refused(ErrorKind::usage, HasSubstr("a new mixer needs an initializer"));
  job_.stages[0].init = PluginChoice{"projection_copy", {}};
  job_.stages[0].init_from_student = true;
  expect_refused(ErrorKind::usage, HasSubstr("there is no stage before it"));
  job_.stages[0].init_from_student = false;
  job_.stages[1].name = "align";
  expect_refused(ErrorKind::usage, HasSubstr("two stages have this name"));
  job_.stages.clear();
  expect_refused(ErrorKind::usage, HasSubstr("no [[stage]]"));
}

TEST_F(TrainJobTest, AnInitializerThatNeedsSignalsDoesNotStartFromAStudent) {
  Stage start = layer_stage("again", 2);
  start.mixer = PluginChoice{"gdn", {{"rope", true}}};
  start.init = PluginChoice{"taylor", {}};
  start.init_from_student = true;
  job_.stages = {job_.stages[0], start};
  expect_refused(ErrorKind::usage, AllOf(HasSubstr("initializer 'taylor' needs the calibration"),
                                         HasSubstr("init.source = \"teacher\"")));
}

TEST_F(TrainJobTest, TooLittleTextAndTextUsedTwice) {
  job_.stages[0].context = 4000;
  job_.stages[0].steps = 1;
  EXPECT_GRAFT_ERROR(run(), ErrorKind::usage, HasSubstr("context"));
  job_.stages[0].context = 24;
  job_.eval_text = {folder_ / "texts/3.txt"};
  EXPECT_GRAFT_ERROR(run(), ErrorKind::input,
                     AllOf(HasSubstr("training text too"), HasSubstr("3.txt")));
}

}  // namespace
}  // namespace graft
