#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/loader/registry.h"
#include "core/train/stage_trainer.h"

namespace graft {
namespace {

const char* name_of(StageScope scope) { return scope == StageScope::layer ? "layer" : "model"; }

const std::vector<std::string>& signals_of(StageScope scope) {
  static const std::vector<std::string> layer = {GRAFT_SIGNAL_STUDENT_HIDDEN,
                                                 GRAFT_SIGNAL_TEACHER_HIDDEN,
                                                 GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT};
  static const std::vector<std::string> model = {GRAFT_SIGNAL_STUDENT_LOGITS,
                                                 GRAFT_SIGNAL_TEACHER_LOGITS, GRAFT_SIGNAL_LABELS,
                                                 GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT};
  return scope == StageScope::layer ? layer : model;
}

bool provides(StageScope scope, const std::string& signal) {
  const auto& signals = signals_of(scope);
  return std::find(signals.begin(), signals.end(), signal) != signals.end();
}

void check_signals(const Stage& stage, const ObjectiveChoice& choice, const Objective& objective) {
  for (const graft_signal_need& need : objective.needs()) {
    if ((need.flags & GRAFT_NEED_REQUIRED) == 0 || provides(stage.scope, need.name)) continue;
    const StageScope other =
        stage.scope == StageScope::layer ? StageScope::model : StageScope::layer;
    std::string have;
    for (const std::string& signal : signals_of(stage.scope))
      have += (have.empty() ? "" : ", ") + signal;
    fail(
        ErrorKind::usage,
        (choice.where.empty() ? stage.where : choice.where) + ": stage " + quoted(stage.name) +
            ": objective '" + objective.label() + "' needs signal " + need.name +
            ", which scope \"" + name_of(stage.scope) + "\" does not have (it has " + have + ")" +
            (provides(other, need.name) ? std::string("; scope = \"") + name_of(other) + "\" has it"
                                        : std::string("; no scope has it")));
  }
}

}  // namespace

StageObjectives::StageObjectives(PluginRegistry& registry, const Stage& stage) {
  std::map<std::string, int> count;
  for (const ObjectiveChoice& choice : stage.objectives) {
    auto objective = registry.create_objective(choice.plugin.name, choice.plugin.options);
    check_signals(stage, choice, *objective);
    const int seen = ++count[objective->label()];
    std::string name = objective->label();
    if (seen > 1) name.append("-").append(std::to_string(seen));
    items_.push_back({name, choice.weight, std::move(objective)});
  }
  const auto trains = [](const Item& item) { return item.weight > 0; };
  if (std::none_of(items_.begin(), items_.end(), trains))
    fail(ErrorKind::usage, stage.where + ": stage " + quoted(stage.name) +
                               " has no objective of a weight above 0: add [[stage.objective]] "
                               "with a name");
}

bool StageObjectives::need(const std::string& signal) const {
  for (const Item& item : items_)
    for (const graft_signal_need& need : item.objective->needs())
      if (signal == need.name) return true;
  return false;
}

at::Tensor run_mixer(TokenMixer& mixer, const at::Tensor& x, Compute compute) {
  const bool low = compute == Compute::bfloat16 &&
                   mixer.plugin().component().supports(dl_dtype(at::kBFloat16), kDLCPU);
  return low ? mixer.forward(x.to(at::kBFloat16)).y.to(at::kFloat) : mixer.forward(x).y;
}

}  // namespace graft
