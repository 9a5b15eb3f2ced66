#include "core/job/train_job.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/hash.h"
#include "core/base/json.h"
#include "core/base/suggest.h"
#include "core/eval/model_folder.h"
#include "core/job/run_folder.h"
#include "core/job/student_view.h"
#include "core/job/train_plan.h"
#include "core/job/train_texts.h"
#include "core/loader/registry.h"
#include "core/report/html_report.h"
#include "core/student/student_io.h"
#include "core/train/checkpoint_store.h"
#include "core/train/init_run.h"
#include "core/train/metrics_log.h"
#include "core/train/permutation.h"
#include "core/train/stage_trainer.h"
#include "core/train/train_state.h"
#include "graft/version.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

// 12345678 as "12,345,678".
std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  for (std::size_t i = text.size(); i > 3; i -= 3) text.insert(i - 3, 1, ',');
  return text;
}

std::string figure(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

std::uint64_t layer_seed(std::uint64_t seed, std::size_t stage, std::int64_t layer) {
  return mix_bits(mix_bits(seed + 1) ^ (static_cast<std::uint64_t>(stage) << 32) ^
                  static_cast<std::uint64_t>(layer));
}

RunFolder::Start start_of(const TrainJob& job) {
  return job.resume  ? RunFolder::Start::resume
         : job.force ? RunFolder::Start::replace
                     : RunFolder::Start::fresh;
}

class TrainRun {
 public:
  TrainRun(const TrainJob& job, PluginRegistry& registry, const TrainHooks& hooks)
      : job_(job), registry_(registry), hooks_(hooks) {}

  TrainResult run() {
    prepare();
    try {
      return run_prepared();
    } catch (const Error&) {
      report_so_far();
      throw;
    }
  }

 private:
  TrainResult run_prepared() {
    load();
    say_plan();
    std::optional<TensorsByName> optimizer = restore();
    const bool restored = optimizer.has_value();
    write_record(restored);
    measure_teacher();
    const auto first = static_cast<std::size_t>(state_.stage);
    for (std::size_t i = first; i < job_.stages.size(); ++i) {
      if (!restored || i > first) start_stage(i);
      train_stage(i, std::exchange(optimizer, std::nullopt));
    }
    return finish();
  }

  // The curves of a run that stops. What stopped it is the error to show, not that of its report.
  void report_so_far() const {
    try {
      if (fs::exists(folder_->metrics())) write_report(folder_->path());
    } catch (const std::exception& error) {
      if (hooks_.say) hooks_.say(std::string("there is no report: ") + error.what());
    }
  }

  // ---- before the first step

  void prepare() {
    config_ = load_model_config(job_.teacher);
    check_model_folder(job_.teacher);
    if (is_student(job_.teacher))
      fail(ErrorKind::input, quoted(job_.teacher.string()) +
                                 " is a student already; the teacher must be a model with "
                                 "attention");
    for (const std::string& note : config_.notes) say(note);
    plan_ = make_train_plan(job_, config_, registry_);
    folder_.emplace(job_.out, start_of(job_));
    store_.emplace(folder_->checkpoints(), job_.checkpoint_keep);
  }

  void load() {
    begin("reading text", 0, "", 0);
    const Tokenizer tokenizer = Tokenizer::from_file(job_.teacher / "tokenizer.json");
    for (const std::string& note : tokenizer.notes()) say(note);
    check_vocabulary(tokenizer, config_, job_.teacher);
    texts_ = load_train_texts(job_, tokenizer);
    if (texts_.held_out.size() < 2) texts_.held_out.clear();
    if (!job_.student.empty() && job_.eval_text.empty() && !texts_.held_out.empty())
      say("the student may have been made from the documents held out here: with eval_text the "
          "figures are of a text that is new to it");
    if (!texts_.leak.empty()) warn(texts_.leak);
    view_.emplace(tokenizer, texts_.held_out, texts_.held_out_name);
    for (std::size_t i = 0; i < job_.stages.size(); ++i)
      if (job_.stages[i].steps > 0) check_rows(job_.stages[i], sampler_for(i));
    before_weights_ = memory_now();
    begin("reading the teacher", 0, "", 0);
    teacher_ = std::make_shared<Backbone>(Backbone::load(job_.teacher));
    load_student_backbone();
    fingerprint_ = {{"recipe", job_.recipe},
                    {"layers", {{"converted", json(plan_.layers).dump()}}},
                    {"text", texts_.hashes},
                    {"teacher", model_hashes(job_.teacher)},
                    {"student", model_hashes(job_.student)},
                    {"plugin", plan_.plugins}};
  }

  // Making the sampler has checked that there is text enough for a row. The text may have fewer
  // rows than the pool that keep_best was planned with: its steps must see all of those there are.
  static void check_rows(const Stage& stage, const Sampler& sampler) {
    if (!stage.keep_best) return;
    const auto rows = static_cast<std::int64_t>(sampler.rows());
    if ((stage.batch * stage.accumulate) % rows == 0) return;
    fail(ErrorKind::usage,
         stage.place("keep_best") + ": stage " + quoted(stage.name) +
             ": keep_best compares losses of steps, which only means something when each step sees "
             "the same text: the text has " +
             std::to_string(rows) + " rows of " + std::to_string(stage.context) +
             " tokens, fewer than the pool, and a step takes " +
             std::to_string(stage.batch * stage.accumulate) +
             "; give more text, or a smaller pool, or set batch * accumulate to " +
             std::to_string(rows));
  }

  // The teacher's own tensors but for those that a stage trains, or that the student at hand has
  // trained before.
  void load_student_backbone() {
    std::map<std::string, at::Tensor> own;
    if (!job_.student.empty()) own = load_start();
    for (const std::string& name : plan_.trained_backbone)
      if (!own.contains(name)) own[name] = teacher_->parameters().at(name).value.clone();
    student_backbone_ = own.empty() ? teacher_ : std::make_shared<Backbone>(teacher_->with(own));
  }

  // The student to go on from: its mixers, and what in its backbone is not the teacher's.
  std::map<std::string, at::Tensor> load_start() {
    const Model start = load_model(job_.student, registry_);
    mixers_ = start.mixers();
    std::map<std::string, at::Tensor> own;
    for (const auto& [name, parameter] : start.backbone().parameters()) {
      const auto found = teacher_->parameters().find(name);
      const bool fits = found != teacher_->parameters().end() &&
                        found->second.value.sizes() == parameter.value.sizes();
      if (!fits)
        fail(ErrorKind::input,
             "student " + quoted(job_.student.string()) + " is not one of " +
                 quoted(job_.teacher.string()) + ": tensor " + quoted(name) +
                 (found == teacher_->parameters().end() ? " is not among the teacher's"
                                                        : " has another shape there"));
      if (!at::equal(found->second.value, parameter.value)) own[name] = parameter.value;
    }
    return own;
  }

  static std::map<std::string, std::string> model_hashes(const fs::path& folder) {
    std::map<std::string, std::string> hashes;
    if (folder.empty()) return hashes;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(".safetensors") || name == "config.json" || name == "tokenizer.json")
        hashes[name] = sha256_hex_of_file(entry.path());
    }
    return hashes;
  }

  void say_plan() {
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i < job_.stages.size(); ++i) {
      const Stage& stage = job_.stages[i];
      tokens += stage.tokens();
      if (stage.steps == 0) {
        say(label(i) + ": its start alone");
        continue;
      }
      say(label(i) + ": scope " + (stage.scope == StageScope::layer ? "layer" : "model") + ", " +
          grouped(stage.steps) + " steps x " + std::to_string(stage.batch * stage.accumulate) +
          " x " + std::to_string(stage.context) + " = " + grouped(stage.tokens()) +
          " tokens; trains " +
          describe_selection(plan_.stages[i].parameters, plan_.stages[i].trained));
    }
    estimate_ = before_weights_ + plan_.memory();
    say("token budget: " + grouped(tokens) + ", from " + grouped(texts_.training_tokens) +
        " of text; memory: about " + bytes_text(estimate_));
    if (const std::uint64_t machine = memory_of_machine(); estimate_ > machine)
      warn("the run will need about " + bytes_text(estimate_) + " of memory, the machine has " +
           bytes_text(machine) +
           ": set batch or context lower (accumulate makes up for it), or recompute = true");
    say("held out: " +
        (texts_.held_out.empty() ? "nothing, so nothing is measured" : texts_.held_out_name));
  }

  // ---- resuming

  // The optimizer's tensors; the rest is where it belongs, and not held a second time.
  std::optional<TensorsByName> restore() {
    if (!job_.resume) return std::nullopt;
    std::optional<TrainCheckpoint> found =
        store_->load_last([this](const std::string& message) { say(message); });
    if (!found) {
      truncate_metrics(folder_->metrics(), 0, -1);
      say("there is no checkpoint in " + quoted(job_.out.string()) + ": the run starts anew");
      return std::nullopt;
    }
    const std::string file = (found->folder / "state.json").string();
    refuse_change(*found, file);
    warn_of_other_hardware(found->state.value("hardware", json()));
    state_ = train_state_from_json(found->state.value("run", json()), file);
    if (state_.stage < 0 || state_.stage >= static_cast<std::int64_t>(job_.stages.size()))
      fail(ErrorKind::input, file + ": the run was in stage " + std::to_string(state_.stage + 1) +
                                 ", the recipe has " + std::to_string(job_.stages.size()));
    restore_weights(*found);
    truncate_metrics(folder_->metrics(), state_.stage, state_.step);
    say("resumed at step " + std::to_string(state_.step) + " (" +
        label(static_cast<std::size_t>(state_.stage)) + ", step " +
        std::to_string(state_.stage_step) + ") from " + found->folder.string());
    return std::move(found->optimizer);
  }

  static ordered_json hardware() {
    return {{"threads", at::get_num_threads()}, {"cpu", at::get_cpu_capability()}};
  }

  // Sums are made in another order there, so their last bits differ.
  void warn_of_other_hardware(const json& saved) {
    const json now(hardware());
    if (!saved.is_object() || saved == now) return;
    const auto text = [](const json& of) {
      return "threads = " + of.value("threads", json()).dump() +
             ", CPU capability = " + of.value("cpu", json()).dump();
    };
    warn("the run was saved with " + text(saved) + " and goes on with " + text(now) +
         ": its result will not be the same to the byte as without the interruption");
  }

  void refuse_change(const TrainCheckpoint& found, const std::string& file) {
    const std::string changes =
        difference(found.state.value("fingerprint", json::object()), json(fingerprint_));
    if (changes.empty()) return;
    if (!job_.allow_change)
      fail(ErrorKind::usage, "this is not the run that " + file + " saved:" + changes +
                                 "\nset it back, or go on all the same with --allow-change");
    say("going on although this changed:" + changes);
  }

  void restore_weights(const TrainCheckpoint& found) {
    const auto stage = static_cast<std::size_t>(state_.stage);
    make_mixers(stage);
    refuse_other_schema(found);
    const TensorsByName own = weights();
    try {
      for (const auto& [name, tensor] : own) load_tensor(found.weights, name, tensor);
      for (const auto& [name, tensor] : found.weights)
        if (!own.contains(name) && is_of_a_mixer(name))
          fail(ErrorKind::input, "the checkpoint has a tensor " + quoted(name) +
                                     ", which this recipe's student does not have");
    } catch (const Error& error) {
      throw Error(error.kind(), found.folder.string() + ": " + error.what());
    }
  }

  bool is_of_a_mixer(const std::string& tensor) const {
    return std::any_of(mixers_.begin(), mixers_.end(), [&](const auto& entry) {
      return tensor.starts_with(mixer_parameter_prefix(config_, entry.first));
    });
  }

  json mixer_record() const {
    const Mixer& mixer = mixers_.begin()->second->plugin();
    return {{"id", mixer.component().id},
            {"version", mixer.component().version},
            {"param_schema", mixer.param_schema()}};
  }

  // Names and shapes may be equal all the same. Not migrated: the optimizer's moments are of the
  // old parameters. Checkpoints of before do not say.
  void refuse_other_schema(const TrainCheckpoint& found) const {
    const json was = found.state.value("mixer", json()), is = mixer_record();
    if (!was.is_object() || was.value("param_schema", json()) == is.at("param_schema")) return;
    const auto text = [](const json& of) {
      return "param_schema " + of.value("param_schema", json()).dump() + " of mixer " +
             of.value("id", json()).dump() + " (version " + of.value("version", json()).dump() +
             ")";
    };
    fail(ErrorKind::plugin, (found.folder / "state.json").string() + ": the run was saved with " +
                                text(was) + ", the plugin at hand has " + text(is) +
                                ": resume it with the plugin of then, or give the student of an "
                                "earlier stage as student = ... of a new run");
  }

  // ---- one stage

  void make_mixers(std::size_t stage) {
    mixers_.clear();
    const PluginChoice& choice = plan_.stages[stage].mixer;
    for (const std::int64_t layer : plan_.layers) {
      const LayerInfo info = teacher_->layer_info(layer);
      mixers_[layer] = std::make_shared<TokenMixer>(
          registry_.create_mixer(choice.name, info.c_info(), choice.options),
          layer_seed(job_.seed, stage, layer));
    }
    student_.emplace(student_backbone_, mixers_);
  }

  void start_stage(std::size_t i) {
    const Stage& stage = job_.stages[i];
    const bool made_before = i == 0 && !job_.student.empty();
    if (made_before) student_.emplace(student_backbone_, mixers_);
    if (stage.init) {
      begin(label(i) + ": " + stage.init->name, static_cast<std::int64_t>(plan_.layers.size()),
            "layers", 0);
      stage.init_from_student ? init_from_student(i) : init_from_teacher(i);
    }
    state_.stage = static_cast<std::int64_t>(i);
    state_.stage_step = 0;
    state_.sampler = stage.steps > 0 ? sampler_for(i).position() : SamplerPosition();
    state_.best = INFINITY;
    state_.best_step = -1;
    if (stage.init || made_before) measure(i);
  }

  void init_from_teacher(std::size_t i) {
    const Stage& stage = job_.stages[i];
    Recipe recipe;
    recipe.label = stage.init->name;
    recipe.mixer = plan_.stages[i].mixer;
    recipe.init = *stage.init;
    recipe.init_tokens = stage.init_tokens;
    recipe.window = stage.init_window;
    recipe.calibrate = false;
    ConvertHooks hooks;
    hooks.layer_done = [this](int layer, const std::string&) {
      advance(1, "layer " + std::to_string(layer));
    };
    hooks.should_stop = hooks_.should_stop;
    const std::vector<int> layers(plan_.layers.begin(), plan_.layers.end());
    const Conversion done =
        convert(registry_, *teacher_, recipe, layers, texts_.calibration, job_.seed, hooks);
    mixers_.clear();
    for (const auto& [layer, converted] : done.layers) mixers_[layer] = converted.mixer;
    student_.emplace(student_backbone_, mixers_);
  }

  void init_from_student(std::size_t i) {
    const Stage& stage = job_.stages[i];
    const Model::Mixers before = mixers_;
    const auto initializer = registry_.create_initializer(stage.init->name, stage.init->options);
    make_mixers(i);
    for (const std::int64_t layer : plan_.layers) {
      stop_if_asked("in " + label(i));
      run_initializer(*initializer, *before.at(layer), teacher_->layer_info(layer),
                      *mixers_.at(layer), LayerSignals{}, layer_seed(job_.seed, i, layer));
      advance(1, "layer " + std::to_string(layer));
    }
  }

  Sampler sampler_for(std::size_t i) const {
    const Stage& stage = job_.stages[i];
    return Sampler(texts_.training, stage.context, mix_bits(job_.seed ^ mix_bits(i)), stage.pool);
  }

  std::vector<TrainedParameter> trained_parameters(std::size_t i) {
    const StagePlan& plan = plan_.stages[i];
    const TensorsByName tensors = all_parameters();
    std::vector<TrainedParameter> list;
    for (std::size_t k = 0; k < plan.trained.size(); ++k) {
      const ParameterInfo& info = plan.parameters[plan.trained[k]];
      list.push_back({info, tensors.at(info.name), plan.lr[k], plan.weight_decay[k]});
    }
    return list;
  }

  void train_stage(std::size_t i, std::optional<TensorsByName> optimizer) {
    const Stage& stage = job_.stages[i];
    if (stage.steps == 0) result_.perplexity.push_back(last_perplexity_);
    if (state_.stage_step >= stage.steps) return;
    const StageObjectives objectives(registry_, stage);
    Sampler sampler = sampler_for(i);
    sampler.seek(state_.sampler);
    set_compute(stage.compute);
    const auto trainer =
        stage.scope == StageScope::layer
            ? make_layer_trainer(stage, *teacher_, mixers_, objectives, trained_parameters(i))
            : make_model_trainer(stage, *teacher_, *student_, objectives, trained_parameters(i));
    if (optimizer) trainer->load(*optimizer);
    optimizer.reset();
    begin(label(i), stage.tokens(), "tokens", state_.stage_step * stage.tokens_per_step());
    MetricsLog log(folder_->metrics());
    while (state_.stage_step < stage.steps) {
      one_step(i, *trainer, sampler, log);
      const bool last = state_.stage_step == stage.steps;
      if (last) trainer->finish();
      if (last || stop_asked() || evaluation_due(stage) || due(stage.checkpoint_every))
        check_finite(i);
      const bool improved = evaluation_due(stage) && measure(i);
      const bool stopping = stop_asked();
      if (last || stopping || improved || due(stage.checkpoint_every)) save(*trainer, log, i);
      if (stopping && !(last && i + 1 == job_.stages.size()))
        fail(ErrorKind::interrupted, "interrupted behind step " + std::to_string(state_.step) +
                                         "; the run is saved and --resume goes on with it");
    }
    set_compute(Compute::float32);
    result_.perplexity.push_back(last_perplexity_);
  }

  // Of weights that are not finite neither a measurement nor a checkpoint is worth anything.
  void check_finite(std::size_t i) const {
    const StagePlan& plan = plan_.stages[i];
    const TensorsByName tensors = weights();
    for (const std::size_t k : plan.trained) {
      const ParameterInfo& info = plan.parameters[k];
      if (!at::isfinite(tensors.at(info.name)).all().item<bool>())
        fail_not_finite(i, (info.layer < 0 ? "" : ", layer " + std::to_string(info.layer)) + ": " +
                               info.name + " is not finite");
    }
  }

  [[noreturn]] void fail_not_finite(std::size_t i, const std::string& what) const {
    throw NotFinite("stage '" + job_.stages[i].name + "', step " +
                    std::to_string(state_.stage_step) + what +
                    " behind this step; a smaller lr may help. It is not saved: --resume goes on "
                    "from the checkpoint "
                    "before it, if there is one");
  }

  bool due(std::int64_t every) const { return every > 0 && state_.stage_step % every == 0; }
  bool evaluation_due(const Stage& stage) const {
    return due(stage.eval_every) || state_.stage_step == stage.steps;
  }

  void one_step(std::size_t i, StageTrainer& trainer, Sampler& sampler, MetricsLog& log) {
    const Stage& stage = job_.stages[i];
    const auto start = Clock::now();
    std::vector<Batch> batches;
    for (std::int64_t k = 0; k < stage.accumulate; ++k) {
      std::vector<std::vector<Piece>> rows;
      for (std::int64_t row = 0; row < stage.batch; ++row) rows.push_back(sampler.next());
      for (Batch& batch : make_batches(rows)) batches.push_back(std::move(batch));
    }
    const StepReport report = step_or_save(i, trainer, log, batches);
    const double seconds = seconds_since(start);
    ++state_.stage_step;
    ++state_.step;
    state_.tokens += report.tokens;
    state_.sampler = sampler.position();
    state_.seconds += seconds;
    log.append(step_line(i, report, seconds));
    advance(stage.tokens_per_step(), "loss " + figure(report.loss));
  }

  // A step that cannot be finished changes nothing: what there was before it is saved.
  StepReport step_or_save(std::size_t i, StageTrainer& trainer, MetricsLog& log,
                          const std::vector<Batch>& batches) {
    try {
      return trainer.step(state_.stage_step, batches);
    } catch (const Error& error) {
      save(trainer, log, i);
      throw Error(error.kind(), std::string(error.what()) +
                                    "; the run as it was before this step is saved in " +
                                    store_->folder_of(state_.step).string());
    }
  }

  ordered_json line_of(const char* kind, std::size_t i) const {
    return {{"kind", kind},        {"stage", job_.stages[i].name},    {"stage_index", i},
            {"step", state_.step}, {"stage_step", state_.stage_step}, {"tokens", state_.tokens}};
  }

  ordered_json step_line(std::size_t i, const StepReport& report, double seconds) const {
    ordered_json line = line_of("step", i);
    line["loss"] = report.loss;
    line["parts"] = report.parts;
    if (!report.layer_loss.empty()) {
      ordered_json layers = ordered_json::object();
      for (const auto& [layer, loss] : report.layer_loss) layers[std::to_string(layer)] = loss;
      line["layer_loss"] = layers;
    }
    line["lr"] = report.lr;
    line["grad_norm"] = report.grad_norm;
    line["tok_per_s"] = static_cast<double>(report.tokens) / std::max(seconds, 1e-9);
    line["seconds"] = state_.seconds;
    return line;
  }

  // Perplexity on the held-out text; true when it is the stage's best so far.
  bool measure(std::size_t i) {
    if (texts_.held_out.empty()) return false;
    const Compute compute = teacher_->compute();
    set_compute(Compute::float32);
    const Perplexity result =
        perplexity(*student_, texts_.held_out, job_.eval, texts_.held_out_name);
    const std::optional<Agreement> agreement = view_->agreement_with(Model(teacher_), *student_);
    set_compute(compute);
    last_perplexity_ = result.value();
    if (!std::isfinite(last_perplexity_))
      fail_not_finite(i, ": perplexity on the held-out text is " + figure(last_perplexity_));
    ordered_json line = line_of("eval", i);
    line["perplexity"] = last_perplexity_;
    line["scored"] = result.scored;
    if (agreement) {
      line["agreement"] = agreement->greedy;
      line["next_token"] = agreement->forced;
    }
    line["seconds"] = state_.seconds;
    MetricsLog log(folder_->metrics());
    log.append(line);
    if (const ordered_json gates = view_->gates(*student_); !gates.empty()) {
      ordered_json gates_line = line_of("gates", i);
      gates_line["layers"] = gates;
      log.append(gates_line);
    }
    say(label(i) + ", step " + std::to_string(state_.stage_step) + ": perplexity " +
        figure(last_perplexity_) +
        (agreement ? ", agreement with the teacher " + figure(agreement->greedy) + ", next token " +
                         figure(agreement->forced)
                   : ""));
    if (state_.stage_step == 0 || !(last_perplexity_ < state_.best)) return false;
    state_.best = last_perplexity_;
    state_.best_step = state_.step;
    return true;
  }

  // ---- what is kept

  // Every parameter of the student that is not the teacher's as it was.
  TensorsByName weights() const {
    TensorsByName tensors;
    for (const auto& [layer, mixer] : mixers_)
      for (const MixerParameter& parameter : mixer->parameters())
        tensors[mixer_parameter_prefix(config_, layer) + parameter.name] = parameter.tensor;
    for (const std::string& name : plan_.trained_backbone)
      tensors[name] = student_backbone_->parameters().at(name).value;
    return tensors;
  }

  TensorsByName all_parameters() const {
    TensorsByName tensors = weights();
    for (const auto& [name, parameter] : student_backbone_->parameters())
      tensors.emplace(name, parameter.value);
    return tensors;
  }

  void save(const StageTrainer& trainer, MetricsLog& log, std::size_t i) {
    log.sync();
    TrainCheckpoint checkpoint;
    checkpoint.step = state_.step;
    checkpoint.weights = weights();
    trainer.save(checkpoint.optimizer);
    checkpoint.state = {{"run", to_json(state_)},      {"stage", job_.stages[i].name},
                        {"seed", job_.seed},           {"graft", GRAFT_VERSION_STRING},
                        {"fingerprint", fingerprint_}, {"hardware", hardware()},
                        {"mixer", mixer_record()},     {"config", job_.config_toml}};
    store_->write(checkpoint, state_.best_step);
  }

  // What the teacher's perplexity depends on.
  std::string measured_on() const {
    Sha256 hash;
    hash.update(std::as_bytes(std::span(texts_.held_out)));
    return json{{"tokens", hash.hex()},         {"teacher", fingerprint_.at("teacher")},
                {"context", job_.eval.context}, {"windows", job_.eval.windows},
                {"stride", job_.eval.stride},   {"bos", job_.eval.bos}}
        .dump();
  }

  // The record of the process before. It can be made anew, so a broken one stops no run.
  json record_before() {
    if (!fs::exists(folder_->record())) return json::object();
    try {
      const json before = read_json(folder_->record());
      if (before.is_object()) return before;
      warn(quoted_path(folder_->record()) + " is no object of a run: it is written anew");
    } catch (const Error& error) {
      warn(std::string(error.what()) +
           "; the file is written anew, with the teacher measured again");
    }
    return json::object();
  }

  void write_record(bool restored) {
    if (!job_.config_toml.empty()) write_file_atomically(folder_->config(), job_.config_toml);
    ordered_json stages = ordered_json::array();
    for (std::size_t i = 0; i < job_.stages.size(); ++i) {
      ordered_json trained = ordered_json::array();
      for (const std::size_t k : plan_.stages[i].trained)
        trained.push_back(plan_.stages[i].parameters[k].name);
      stages.push_back({{"name", job_.stages[i].name},
                        {"tokens", job_.stages[i].tokens()},
                        {"mixer", plan_.stages[i].mixer.name},
                        {"trained", trained}});
    }
    const std::string measured = sha256_hex(measured_on());
    const json before = job_.resume ? record_before() : json::object();
    record_ = {{"graft", GRAFT_VERSION_STRING},
               {"teacher", job_.teacher.string()},
               {"seed", job_.seed},
               {"scale", job_.scale},
               {"layers", plan_.layers},
               {"stages", stages},
               {"fingerprint", fingerprint_},
               {"held_out", texts_.held_out_name},
               {"hardware", hardware()},
               {"teacher_measured_on", measured},
               {"memory_estimate", estimate_}};
    const bool holds = restored && before.contains("teacher_perplexity") &&
                       before.at("teacher_perplexity").is_number() &&
                       before.value("teacher_measured_on", json()) == json(measured);
    for (const char* key : {"teacher_perplexity", "protocol"})
      if (holds && before.contains(key)) record_[key] = before.at(key);
    write_file_atomically(folder_->record(), record_.dump(2) + "\n");
  }

  // Once for the run: the record of a resumed one has it.
  void measure_teacher() {
    if (texts_.held_out.empty()) return;
    if (record_.contains("teacher_perplexity")) {
      result_.teacher_perplexity = record_.at("teacher_perplexity").get<double>();
      return;
    }
    begin("measuring the teacher", 0, "", 0);
    const Perplexity result =
        perplexity(Model(teacher_), texts_.held_out, job_.eval, texts_.held_out_name);
    result_.teacher_perplexity = result.value();
    record_["teacher_perplexity"] = result.value();
    record_["protocol"] = protocol(job_.eval, result);
    write_file_atomically(folder_->record(), record_.dump(2) + "\n");
    say("teacher: perplexity " + figure(result.value()) + ", " + protocol(job_.eval, result));
  }

  TrainResult finish() {
    begin("writing the student", 0, "", 0);
    std::string objectives;
    for (const Stage& stage : job_.stages)
      for (const ObjectiveChoice& choice : stage.objectives)
        objectives += (objectives.empty() ? "" : ", ") + choice.plugin.name;
    write_student(folder_->student(), /*replace=*/true, *student_, job_.teacher,
                  {{"graft", GRAFT_VERSION_STRING},
                   {"teacher", job_.teacher.filename().string()},
                   {"objectives", objectives},
                   {"keep_attention", job_.keep_attention},
                   {"seed", std::to_string(job_.seed)},
                   {"tokens", std::to_string(state_.tokens)}});
    if (const ordered_json samples = view_->samples(Model(teacher_), *student_); !samples.empty())
      write_file_atomically(folder_->samples(), samples.dump(2) + "\n");
    result_.student = folder_->student();
    result_.steps = state_.step;
    result_.tokens = state_.tokens;
    result_.seconds = state_.seconds;
    result_.memory_estimate = estimate_;
    result_.memory_peak = memory_peak();
    record_["steps"] = state_.step;
    record_["tokens"] = state_.tokens;
    record_["seconds"] = state_.seconds;
    record_["memory_peak"] = result_.memory_peak;
    if (!texts_.held_out.empty()) record_["agreement_protocol"] = view_->protocol();
    write_file_atomically(folder_->record(), record_.dump(2) + "\n");
    write_report(folder_->path());
    return std::move(result_);
  }

  // ---- small things

  std::string label(std::size_t i) const {
    return "stage " + std::to_string(i + 1) + "/" + std::to_string(job_.stages.size()) + " " +
           job_.stages[i].name;
  }
  void set_compute(Compute compute) {
    teacher_->set_compute(compute);
    student_backbone_->set_compute(compute);
  }
  bool stop_asked() const { return hooks_.should_stop && hooks_.should_stop(); }
  void stop_if_asked(const std::string& where) const {
    if (stop_asked()) fail(ErrorKind::interrupted, "interrupted " + where);
  }
  void begin(const std::string& phase, std::int64_t units, const std::string& unit,
             std::int64_t done) {
    stop_if_asked("before " + phase + "; --resume goes on with the run");
    if (hooks_.begin) hooks_.begin(phase, units, unit, done);
  }
  void advance(std::int64_t units, const std::string& note) {
    if (hooks_.advance) hooks_.advance(units, note);
  }
  void say(const std::string& message) {
    if (hooks_.say) hooks_.say(message);
  }

  void warn(const std::string& message) { hooks_.warn ? hooks_.warn(message) : say(message); }

  const TrainJob& job_;
  PluginRegistry& registry_;
  const TrainHooks& hooks_;
  ModelConfig config_;
  TrainPlan plan_;
  std::optional<RunFolder> folder_;
  std::optional<CheckpointStore> store_;
  TrainTexts texts_;
  std::optional<StudentView> view_;
  std::shared_ptr<Backbone> teacher_, student_backbone_;
  Model::Mixers mixers_;
  std::optional<Model> student_;
  TrainState state_;
  ordered_json fingerprint_, record_;
  std::uint64_t before_weights_ = 0, estimate_ = 0;
  double last_perplexity_ = 0;
  TrainResult result_;
};

}  // namespace

TrainResult run_train_job(const TrainJob& job, PluginRegistry& registry, const TrainHooks& hooks) {
  return TrainRun(job, registry, hooks).run();
}

}  // namespace graft
