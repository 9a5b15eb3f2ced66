#include "core/job/train_plan.h"

#include <algorithm>

#include "core/abi/library.h"
#include "core/base/error.h"
#include "core/base/hash.h"
#include "core/base/suggest.h"
#include "core/config/layer_set.h"
#include "core/loader/registry.h"
#include "core/train/init_run.h"
#include "core/train/stage_trainer.h"

namespace graft {
namespace {

// An error of something that knows nothing of recipes, with the place of what asked for it.
template <typename Work>
auto at_place(const std::string& place, Work&& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw Error(error.kind(), (place.empty() ? "" : place + ": ") + error.what());
  }
}

class Planner {
 public:
  Planner(const TrainJob& job, const ModelConfig& teacher, PluginRegistry& registry)
      : job_(job), teacher_(teacher), registry_(registry) {}

  TrainPlan run() {
    const auto kept = at_place(place("keep_attention"), [&] {
      return attention_layers(job_.keep_attention, static_cast<int>(teacher_.n_layers));
    });
    for (int layer = 0; layer < teacher_.n_layers; ++layer)
      if (!std::binary_search(kept.begin(), kept.end(), layer)) plan_.layers.push_back(layer);
    if (job_.student_mixer) mixer_ = *job_.student_mixer;
    if (job_.stages.empty()) fail(ErrorKind::usage, "the recipe has no [[stage]]");
    check_evaluation();
    for (const Stage& stage : job_.stages) add(stage);
    return std::move(plan_);
  }

 private:
  [[noreturn]] void reject(const Stage& stage, const std::string& key,
                           const std::string& what) const {
    fail(ErrorKind::usage, stage.place(key) + ": stage " + quoted(stage.name) + ": " + what);
  }

  std::string place(const std::string& key) const {
    const auto found = job_.places.find(key);
    return found == job_.places.end() ? "" : found->second;
  }

  std::string beyond_positions(std::int64_t tokens) const {
    return std::to_string(tokens) + " tokens, the teacher was trained on " +
           std::to_string(teacher_.max_positions) +
           " (max_position_embeddings): beyond that it is no teacher";
  }
  bool is_beyond_positions(std::int64_t tokens) const {
    return teacher_.max_positions > 0 && tokens > teacher_.max_positions;
  }

  bool measures() const { return !job_.eval_text.empty() || job_.held_out > 0; }

  void check_evaluation() const {
    if (!measures() || !is_beyond_positions(job_.eval.context)) return;
    at_place(place("eval.context"), [&] {
      fail(ErrorKind::usage, "eval.context is " + beyond_positions(job_.eval.context) +
                                 "; set eval.context to " + std::to_string(teacher_.max_positions) +
                                 " or less");
    });
  }

  void add(const Stage& stage) {
    check_names(stage);
    check_start(stage);
    if (stage.steps == 0 && !stage.init) reject(stage, "share", "it has neither steps nor a start");
    StagePlan plan;
    plan.mixer = mixer_;
    const std::unique_ptr<Mixer> mixer = add_parameters(stage, plan);
    if (stage.steps > 0) add_training(stage, *mixer, plan);
    plan.memory = estimate_memory(teacher_, stage, plan.parameters, plan.trained, *mixer,
                                  measures() ? job_.eval.context : 0);
    plan_.stages.push_back(std::move(plan));
  }

  // What a stage that is its start alone has no need of.
  void add_training(const Stage& stage, const Mixer& mixer, StagePlan& plan) {
    check_text(stage);
    const StageObjectives objectives(registry_, stage);
    for (const StageObjectives::Item& item : objectives.items())
      record(item.objective->component(), "");
    if (!mixer.has_backward())
      fail(ErrorKind::plugin, stage.place("mixer.name") + ": stage " + quoted(stage.name) +
                                  ": mixer '" + mixer.label() +
                                  "' has no backward, it cannot be trained");
    select(stage, plan);
    check_best(stage);
  }

  void check_names(const Stage& stage) const {
    for (const Stage& other : job_.stages)
      if (&other != &stage && other.name == stage.name)
        reject(stage, "name", "two stages have this name");
  }

  // A new mixer and its initializer, both or neither, and the roles between them.
  void check_start(const Stage& stage) {
    if (!stage.mixer && !stage.init) {
      if (mixer_.name.empty())
        reject(
            stage, "mixer.name",
            "the first stage needs a mixer: mixer.name = ... and init.name = ..., or a student to "
            "go on from (--student DIR)");
      return;
    }
    if (!stage.init)
      reject(stage, "mixer.name", "a new mixer needs an initializer: init.name = ...");
    if (!stage.mixer && mixer_.name.empty())
      reject(stage, "init.name", "an initializer needs a mixer: mixer.name = ...");
    if (stage.init_from_student && mixer_.name.empty())
      reject(stage, "init.source", "init.source is \"student\", but there is no stage before it");
    const PluginChoice source = mixer_;
    if (stage.mixer) mixer_ = *stage.mixer;
    record(registry_.find(ComponentKind::initializer, stage.init->name), "");
    if (!stage.init_from_student) {
      Recipe recipe;
      recipe.mixer = mixer_;
      recipe.init = *stage.init;
      recipe.calibrate = false;
      check_window(stage);
      const LayerInfo info(teacher_, 0);
      at_place(stage.place("mixer.name"),
               [&] { registry_.create_mixer(mixer_.name, info.c_info(), mixer_.options); });
      at_place(stage.place("init.name"), [&] { check_recipe(registry_, recipe, teacher_); });
    } else {
      check_source_roles(stage, source);
    }
  }

  // check_recipe() for an initializer that reads the mixer of the stage before.
  void check_source_roles(const Stage& stage, const PluginChoice& source) const {
    const LayerInfo info(teacher_, 0);
    const auto from = registry_.create_mixer(source.name, info.c_info(), source.options);
    const auto to = registry_.create_mixer(mixer_.name, info.c_info(), mixer_.options);
    const auto init = registry_.create_initializer(stage.init->name, stage.init->options);
    for (const graft_role_need& need : init->needs()) {
      const Mixer& mixer = (need.flags & GRAFT_NEED_TEACHER) != 0 ? *from : *to;
      const auto& specs = mixer.param_specs();
      const auto has = [&](const graft_param_spec* spec) {
        return spec->role != nullptr && std::string(need.role) == spec->role;
      };
      if ((need.flags & GRAFT_NEED_REQUIRED) != 0 && std::none_of(specs.begin(), specs.end(), has))
        fail(ErrorKind::plugin, stage.place("init.name") + ": stage " + quoted(stage.name) +
                                    ": initializer '" + init->label() + "' needs role " +
                                    need.role + ", which mixer '" + mixer.label() +
                                    "' does not have");
    }
    for (const graft_calibration_need& need : init->calibration())
      if ((need.flags & GRAFT_NEED_REQUIRED) != 0)
        reject(stage, "init.source",
               "initializer '" + init->label() + "' needs the calibration signal " + need.name +
                   ", which only a stage with init.source = \"teacher\" gives");
  }

  void check_text(const Stage& stage) const {
    if (is_beyond_positions(stage.context))
      reject(stage, "context", "context is " + beyond_positions(stage.context));
    if (stage.tokens() > kMostTokens)
      reject(stage, "steps",
             "steps x batch x accumulate x context = " + std::to_string(stage.steps) + " x " +
                 std::to_string(stage.batch) + " x " + std::to_string(stage.accumulate) + " x " +
                 std::to_string(stage.context) + " is more than " + std::to_string(kMostTokens) +
                 " tokens, the most a stage can have");
  }

  // Only an initializer that asks for signals runs the teacher on text.
  void check_window(const Stage& stage) const {
    const auto init = registry_.create_initializer(stage.init->name, stage.init->options);
    if (wants_calibration(*init) && is_beyond_positions(stage.init_window))
      reject(stage, "init.window", "init.window is " + beyond_positions(stage.init_window));
  }

  std::unique_ptr<Mixer> add_parameters(const Stage& stage, StagePlan& plan) {
    std::unique_ptr<Mixer> mixer;
    for (const std::int64_t layer : plan_.layers) {
      const LayerInfo info(teacher_, layer);
      mixer = registry_.create_mixer(mixer_.name, info.c_info(), mixer_.options);
      const auto list = mixer_parameters(teacher_, layer, *mixer);
      plan.parameters.insert(plan.parameters.end(), list.begin(), list.end());
    }
    record(mixer->component(), ", schema " + std::to_string(mixer->param_schema()));
    if (stage.scope == StageScope::model) {
      const std::set<std::int64_t> replaced(plan_.layers.begin(), plan_.layers.end());
      const auto list = backbone_parameters(teacher_, replaced);
      plan.parameters.insert(plan.parameters.end(), list.begin(), list.end());
    }
    return mixer;
  }

  void select(const Stage& stage, StagePlan& plan) {
    const std::string where = stage.place("train") + ": stage " + quoted(stage.name);
    plan.trained = select_parameters(
        plan.parameters, stage.train,
        where + ": train" +
            (stage.scope == StageScope::layer ? " (scope \"layer\" reaches the mixers only)" : ""));
    if (plan.trained.empty())
      reject(stage, "train",
             "train selects no parameter that can train: the stage would train nothing");
    plan.lr.assign(plan.trained.size(), stage.lr);
    plan.weight_decay.assign(plan.trained.size(), stage.weight_decay);
    std::set<std::size_t> taken;
    for (const GroupChoice& group : stage.groups) {
      const auto chosen = select_parameters(plan.parameters, group.match, group.where + ": match");
      bool matched = false;
      for (std::size_t i = 0; i < plan.trained.size(); ++i) {
        if (!std::binary_search(chosen.begin(), chosen.end(), plan.trained[i])) continue;
        matched = true;
        if (!taken.insert(i).second) continue;
        if (group.lr >= 0) plan.lr[i] = group.lr;
        if (group.weight_decay >= 0) plan.weight_decay[i] = group.weight_decay;
      }
      if (!matched)
        fail(ErrorKind::usage,
             group.where + ": stage " + quoted(stage.name) +
                 ": match selects no parameter that the stage trains; widen train, or leave the "
                 "group out");
    }
    if (std::all_of(plan.lr.begin(), plan.lr.end(), [](double lr) { return lr == 0; }))
      reject(stage, "lr",
             "the learning rate of everything it trains is 0: the stage would train nothing");
    for (std::size_t i = 0; i < plan.trained.size(); ++i) {
      const ParameterInfo& parameter = plan.parameters[plan.trained[i]];
      if (!parameter.decays) plan.weight_decay[i] = 0;
      if (parameter.module != "mixers") plan_.trained_backbone.insert(parameter.name);
    }
  }

  void check_best(const Stage& stage) const {
    if (!stage.keep_best) return;
    if (stage.scope != StageScope::layer)
      reject(stage, "keep_best", "keep_best is for scope \"layer\"");
    const std::int64_t rows = stage.pool / stage.context;
    if (rows == 0 || (stage.batch * stage.accumulate) % rows != 0 || job_.corpora.size() != 1)
      reject(stage, "keep_best",
             "keep_best compares losses of steps, which only means something when each step sees "
             "the same text: set pool = batch * accumulate * context (" +
                 std::to_string(stage.tokens_per_step()) + "), and give one corpus");
  }

  void record(const Component& component, const std::string& more) {
    std::string& entry =
        plan_.plugins[std::string(name_of(component.kind)) + " " + component.alias];
    if (!entry.empty()) return;
    entry = component.id + " " + component.version + more + ", sha256 " +
            sha256_hex_of_file(component.library->file());
  }

  const TrainJob& job_;
  const ModelConfig& teacher_;
  PluginRegistry& registry_;
  TrainPlan plan_;
  PluginChoice mixer_;  // in force so far
};

}  // namespace

std::uint64_t TrainPlan::memory() const {
  std::uint64_t most = 0;
  for (const StagePlan& stage : stages) most = std::max(most, stage.memory.total());
  return most;
}

TrainPlan make_train_plan(const TrainJob& job, const ModelConfig& teacher,
                          PluginRegistry& registry) {
  return Planner(job, teacher, registry).run();
}

}  // namespace graft
