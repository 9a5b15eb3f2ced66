#include "apps/hostapp/recipe_settings.h"

#include "apps/hostapp/settings.h"
#include "core/loader/registry.h"

namespace graft {
namespace {

using Strings = std::vector<std::string>;

CalibrateOptions calibrate_options(const Config& config, PluginRegistry& registry) {
  CalibrateOptions stage;
  stage.tokens = config.get<std::int64_t>("calibrate.tokens");
  stage.steps = config.get<std::int64_t>("calibrate.steps");
  stage.batch =
      config.get<bool>("calibrate.full_batch") ? 0 : config.get<std::int64_t>("calibrate.batch");
  stage.lr = config.get<double>("calibrate.lr");
  for (const auto& [role, entry] : config.table("calibrate.lr_roles"))
    stage.lr_roles[role] = std::get<double>(entry.value);
  stage.frozen_roles = config.get<Strings>("calibrate.frozen_roles");
  stage.schedule = config.text("calibrate.schedule");
  stage.warmup = config.get<std::int64_t>("calibrate.warmup");
  stage.min_lr_ratio = config.get<double>("calibrate.min_lr_ratio");
  stage.beta1 = config.get<std::vector<double>>("calibrate.betas")[0];
  stage.beta2 = config.get<std::vector<double>>("calibrate.betas")[1];
  stage.weight_decay = config.get<double>("calibrate.weight_decay");
  stage.clip = config.get<double>("calibrate.clip");
  stage.keep_best = config.get<bool>("calibrate.keep_best");
  stage.token_weight = config.text("calibrate.token_weight");
  stage.position0_weight = config.get<double>("calibrate.position0_weight");
  stage.position0_layers = config.get<std::int64_t>("calibrate.position0_layers");
  stage.objective = config.text("calibrate.objective.name");
  stage.objective_options =
      plugin_options(config, "calibrate.objective.options",
                     registry.find(ComponentKind::objective, stage.objective));
  return stage;
}

}  // namespace

Recipe make_recipe(const Config& config, const Config& options, const std::string& init,
                   const std::string& label, bool calibrate, PluginRegistry& registry) {
  const Component& mixer = registry.find(ComponentKind::mixer, config.text("mixer.name"));
  const Component& initializer = registry.find(ComponentKind::initializer, init);
  Recipe recipe;
  recipe.label = label.empty() ? initializer.alias : label;
  recipe.mixer = {mixer.id, plugin_options(options, "mixer.options", mixer)};
  recipe.init = {initializer.id, plugin_options(options, "init.options", initializer)};
  recipe.init_tokens = config.get<std::int64_t>("init.tokens");
  recipe.window = config.get<std::int64_t>("window");
  recipe.stream = {config.text("convert.inputs") == "student",
                   config.get<double>("convert.correction"), config.get<double>("convert.lost"),
                   config.get<double>("convert.mlp_ridge")};
  recipe.calibrate = calibrate;
  if (calibrate) recipe.stage = calibrate_options(config, registry);
  return recipe;
}

}  // namespace graft
