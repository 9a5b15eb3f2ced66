#include "core/train/train_state.h"

#include <set>

#include "core/base/error.h"

namespace graft {

using nlohmann::json;
using nlohmann::ordered_json;

ordered_json to_json(const TrainState& state) {
  return {{"stage", state.stage},
          {"stage_step", state.stage_step},
          {"step", state.step},
          {"tokens", state.tokens},
          {"sampler", {{"rows", state.sampler.rows}, {"taken", state.sampler.taken}}},
          {"seconds", state.seconds},
          {"best", std::isfinite(state.best) ? ordered_json(state.best) : ordered_json()},
          {"best_step", state.best_step}};
}

TrainState train_state_from_json(const json& from, const std::string& file) {
  try {
    TrainState state;
    from.at("stage").get_to(state.stage);
    from.at("stage_step").get_to(state.stage_step);
    from.at("step").get_to(state.step);
    from.at("tokens").get_to(state.tokens);
    from.at("sampler").at("rows").get_to(state.sampler.rows);
    from.at("sampler").at("taken").get_to(state.sampler.taken);
    from.at("seconds").get_to(state.seconds);
    if (!from.at("best").is_null()) from.at("best").get_to(state.best);
    from.at("best_step").get_to(state.best_step);
    return state;
  } catch (const json::exception& error) {
    fail(ErrorKind::input, file + ": not a run's state as graft writes it: " + error.what());
  }
}

std::string difference(const json& saved, const json& now) {
  std::string text;
  const auto value = [](const json& all, const std::string& part, const std::string& key) {
    if (!all.contains(part) || !all.at(part).contains(key)) return std::string();
    return all.at(part).at(key).get<std::string>();
  };
  for (const auto& [part, unused] : now.items()) {
    std::set<std::string> keys;
    for (const json* all : {&saved, &now})
      if (all->contains(part))
        for (const auto& [key, ignored] : all->at(part).items()) keys.insert(key);
    for (const std::string& key : keys) {
      const std::string was = value(saved, part, key), is = value(now, part, key);
      if (was == is) continue;
      text += "\n  " + part + " " + key + ": " +
              (was.empty()  ? "is new: " + is
               : is.empty() ? "is gone, was " + was
                            : "was " + was + ", is now " + is);
    }
  }
  return text;
}

}  // namespace graft
