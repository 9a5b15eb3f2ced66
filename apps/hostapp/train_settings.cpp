#include "apps/hostapp/train_settings.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "apps/hostapp/eval_settings.h"
#include "apps/hostapp/settings.h"
#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/config/layer_set.h"
#include "core/config/train_keys.h"
#include "core/loader/registry.h"
#include "core/student/student_io.h"

namespace graft {
namespace {

using Strings = std::vector<std::string>;

[[noreturn]] void reject(const Config& config, const std::string& key, const std::string& what) {
  fail(ErrorKind::usage, config.at(key).origin.where + ": " + key + ": " + what);
}

std::int64_t integer(const Config& row, const char* key) { return row.get<std::int64_t>(key); }
double number(const Config& row, const char* key) { return row.get<double>(key); }

// The plugin that a key names; an error says where the key stands.
const Component& find_plugin(const Config& row, PluginRegistry& registry, ComponentKind kind,
                             const std::string& key) {
  try {
    return registry.find(kind, row.text(key));
  } catch (const Error& error) {
    throw Error(error.kind(), row.at(key).origin.where + ": " + key + ": " + error.what());
  }
}

// Where each key was given.
std::map<std::string, std::string> places_of(const Config& row) {
  std::map<std::string, std::string> places;
  for (const Key& key : row.schema().keys)
    if (row.given(key.name)) places[key.name] = row.at(key.name).origin.where;
  return places;
}

// A plugin by the keys NAME.name and NAME.options of a row; nothing when the name is empty.
std::optional<PluginChoice> plugin(const Config& row, PluginRegistry& registry, ComponentKind kind,
                                   const std::string& table) {
  const std::string& name = row.text(table + ".name");
  if (name.empty()) {
    if (const auto options = row.table(table + ".options"); !options.empty())
      fail(ErrorKind::usage, options.begin()->second.origin.where + ": " + table +
                                 ".options need " + table + ".name");
    return std::nullopt;
  }
  const Component& component = find_plugin(row, registry, kind, table + ".name");
  return PluginChoice{component.id, plugin_options(row, table + ".options", component)};
}

std::vector<ObjectiveChoice> objectives(const Config& row, PluginRegistry& registry) {
  std::vector<ObjectiveChoice> list;
  for (const Config& objective : row.rows("objective")) {
    const Component& component = find_plugin(objective, registry, ComponentKind::objective, "name");
    list.push_back({{component.id, plugin_options(objective, "options", component)},
                    number(objective, "weight"),
                    objective.at("name").origin.where});
  }
  return list;
}

// Steps as they are given, or as many as the tokens pay for.
std::int64_t steps_of(const Config& config, const Config& row, const Stage& stage) {
  const std::int64_t steps = integer(row, "steps");
  std::int64_t tokens = integer(row, "tokens");
  const double share = number(row, "share");
  const int given = (steps > 0) + (tokens > 0) + (share >= 0);
  if (given > 1) reject(row, "steps", "give one of steps, tokens and share");
  if (given == 0)
    fail(ErrorKind::usage,
         row.origin().where + ": stage " + quoted(stage.name) + " needs steps, tokens or share");
  if (steps > 0) return steps;
  if (share == 0) return 0;
  if (share > 0) {
    const std::int64_t budget = integer(config, "budget");
    if (budget == 0) reject(row, "share", "a share of what? Set budget, the tokens of the run");
    tokens = std::llround(share * static_cast<double>(budget));
  }
  if (tokens < stage.tokens_per_step())
    reject(row, share > 0 ? "share" : "tokens",
           std::to_string(tokens) +
               " tokens are not one step of batch x "
               "accumulate x context = " +
               std::to_string(stage.tokens_per_step()));
  return tokens / stage.tokens_per_step();
}

void read_length(const Config& config, const Config& row, Stage& stage) {
  stage.batch = integer(row, "batch");
  stage.context = integer(row, "context");
  stage.accumulate = integer(row, "accumulate");
  stage.pool = integer(row, "pool");
  stage.steps = steps_of(config, row, stage);
  stage.eval_every = integer(row, "eval_every");
  const std::int64_t own = integer(row, "checkpoint_every");
  stage.checkpoint_every = own >= 0 ? own : integer(config, "checkpoint.every");
}

void read_training(const Config& row, Stage& stage) {
  stage.train = row.get<Strings>("train");
  for (const Config& group : row.rows("group"))
    stage.groups.push_back({group.get<Strings>("match"), number(group, "lr"),
                            number(group, "weight_decay"), group.origin().where});
  stage.lr = number(row, "lr");
  const auto& betas = row.get<std::vector<double>>("betas");
  if (betas.size() != 2 || betas[0] >= 1 || betas[1] >= 1)
    reject(row, "betas", "expected two numbers of at least 0 and below 1, got " + to_toml(betas));
  stage.beta1 = betas[0];
  stage.beta2 = betas[1];
  stage.weight_decay = number(row, "weight_decay");
  stage.clip = number(row, "clip");
  stage.schedule = {row.text("schedule"), stage.steps, integer(row, "warmup"),
                    integer(row, "decay_steps"), number(row, "min_lr_ratio")};
  stage.compute = row.text("dtype") == "bf16" ? Compute::bfloat16 : Compute::float32;
  stage.recompute = row.get<bool>("recompute");
  stage.keep_best = row.get<bool>("keep_best");
  stage.token_weight = row.text("token_weight");
  stage.position0_weight = number(row, "position0_weight");
  stage.position0_layers = integer(row, "position0_layers");
}

Stage read_stage(const Config& config, const Config& row, PluginRegistry& registry) {
  Stage stage;
  stage.name = row.text("name");
  stage.where = row.origin().where;
  stage.places = places_of(row);
  stage.scope = row.text("scope") == "layer" ? StageScope::layer : StageScope::model;
  stage.mixer = plugin(row, registry, ComponentKind::mixer, "mixer");
  stage.init = plugin(row, registry, ComponentKind::initializer, "init");
  stage.init_from_student = row.text("init.source") == "student";
  stage.init_tokens = integer(row, "init.tokens");
  stage.init_window = integer(row, "init.window");
  stage.objectives = objectives(row, registry);
  read_length(config, row, stage);
  read_training(row, stage);
  return stage;
}

// What does not change a run's result, or is told apart by its content.
bool decides(const std::string& key) {
  static const std::set<std::string> others = {"teacher",
                                               "student",
                                               "keep_attention",
                                               "text",
                                               "eval_text",
                                               "out",
                                               "force",
                                               "threads",
                                               "plugin_path",
                                               "scale",
                                               "path",
                                               "checkpoint_every",
                                               "checkpoint.every",
                                               "checkpoint.keep"};
  return !others.contains(key);
}

void flatten(const Config& config, const std::string& prefix,
             std::map<std::string, std::string>& out) {
  const Schema& schema = config.schema();
  for (const Key& key : schema.keys)
    if (decides(key.name)) out[prefix + key.name] = to_toml(config.at(key.name).value);
  for (const FreeTable& table : schema.tables)
    for (const auto& [key, entry] : config.table(table.name))
      out[prefix + table.name + "." + key] = to_toml(entry.value);
  for (const RowTable& rows : schema.rows) {
    std::size_t i = 0;
    for (const Config& row : config.rows(rows.name)) {
      const bool named = rows.name == "stage";
      flatten(row, prefix + rows.name + "." + (named ? row.text("name") : std::to_string(i)) + ".",
              out);
      ++i;
    }
  }
}

// A recipe's corpora yield to text from the command line.
bool text_overrides_corpora(const Config& config) {
  return !config.get<Strings>("text").empty() && config.at("text").origin.layer == Layer::flag;
}

std::vector<CorpusChoice> corpora(const Config& config) {
  const auto paths = [](const Strings& names) {
    return std::vector<std::filesystem::path>(names.begin(), names.end());
  };
  const Strings& text = config.get<Strings>("text");
  const auto& rows = config.rows("corpus");
  if (!text.empty() && (rows.empty() || text_overrides_corpora(config)))
    return {{paths(text), 1, config.text("text_field")}};
  if (!text.empty()) reject(config, "text", "give text or [[corpus]] rows, not both");
  std::vector<CorpusChoice> list;
  for (const Config& row : rows)
    list.push_back({paths(row.get<Strings>("path")), number(row, "weight"), row.text("field")});
  return list;
}

// Where a run goes on from a student, that one says which layers are converted and to what.
void read_student(const Config& config, PluginRegistry& registry, TrainJob& job) {
  if (config.text("student").empty()) return;
  job.student = config.text("student");
  // "none" is the default, which the stored recipe of a run spells out.
  if (config.text("keep_attention") != "none")
    reject(config, "keep_attention",
           "the student says which layers keep their attention: leave it out");
  const StudentSection section = read_student_section(job.student);
  const std::int64_t n_layers = load_model_config(job.student).n_layers;
  std::string kept;
  for (std::int64_t layer = 0; layer < n_layers; ++layer)
    if (!section.layers.contains(layer))
      kept.append(kept.empty() ? "" : ",").append(std::to_string(layer));
  if (!kept.empty()) job.keep_attention = kept;
  job.student_mixer =
      PluginChoice{registry.find(ComponentKind::mixer, section.mixer_id).id, section.options};
}

// A budget is spent once; shares such as 0.1 and 0.9 need not add up to the last bit.
void check_shares(const Config& config) {
  double sum = 0;
  for (const Config& row : config.rows("stage")) {
    sum += std::max(number(row, "share"), 0.0);
    if (sum > 1 + 1e-9)
      reject(row, "share",
             "with the stages before it the shares sum to " + to_toml(sum) +
                 ", more than the budget: make them 1 or less");
  }
}

void check_kept_layers(const Config& config) {
  const ConfigEntry& kept = config.at("keep_attention");
  try {
    check_attention_layers(std::get<std::string>(kept.value));
  } catch (const Error& error) {
    throw Error(error.kind(), kept.origin.where + ": " + error.what());
  }
}

void require_the_job(const Config& config) {
  std::string missing, hints;
  const auto want = [&](bool there, const std::string& flag, const std::string& hint) {
    if (there) return;
    missing += (missing.empty() ? "" : ", ") + flag;
    hints += "\n  " + flag + std::string(16 - std::min<std::size_t>(flag.size(), 15), ' ') + hint;
  };
  want(!config.text("teacher").empty(), "--teacher DIR",
       "a model in Hugging Face format; a small one: .deps/venv/bin/python scripts/get_teacher.py "
       "DIR");
  want(!config.get<Strings>("text").empty() || !config.rows("corpus").empty(), "--text FILE...",
       "text to train on; six novels: .deps/venv/bin/python scripts/get_text.py DIR");
  want(!config.text("out").empty(), "--out DIR", "where the run and the student go");
  if (!missing.empty()) fail(ErrorKind::usage, "missing: " + missing + hints);
}

// A file, or the name of a recipe that comes with graft.
std::filesystem::path recipe_file(const std::string& given) {
  const std::filesystem::path shipped =
      executable_folder().parent_path() / "share/graft/recipes/train" / (given + ".toml");
  const bool is_name = given.find_first_of("/.") == std::string::npos;
  return is_name && !std::filesystem::exists(given) && std::filesystem::exists(shipped)
             ? shipped
             : std::filesystem::path(given);
}

}  // namespace

Config read_train_configuration(const CommandLine& line) {
  Config config(train_schema());
  if (!line.subject.empty()) config.read_file(recipe_file(line.subject), Layer::file);
  for (const std::filesystem::path& file : line.config_files) config.read_file(file, Layer::file);
  for (const FlagValue& value : line.flags)
    if (value.key == "scale") config.set_flag(value.key, value.words, value.flag);
  apply_scale(config);
  for (const FlagValue& value : line.flags)
    if (value.key != "scale") config.set_flag(value.key, value.words, value.flag);
  return config;
}

Config resolved_train_configuration(Config config, PluginRegistry& registry) {
  if (text_overrides_corpora(config)) config.clear_rows("corpus");
  const auto add = [&](Config& row, ComponentKind kind, const std::string& name,
                       const std::string& options) {
    if (!row.text(name).empty())
      add_plugin_defaults(row, options, find_plugin(row, registry, kind, name));
  };
  for (Config& stage : config.rows("stage")) {
    add(stage, ComponentKind::mixer, "mixer.name", "mixer.options");
    add(stage, ComponentKind::initializer, "init.name", "init.options");
    for (Config& objective : stage.rows("objective"))
      add(objective, ComponentKind::objective, "name", "options");
  }
  return config;
}

TrainJob make_train_job(const Config& config, PluginRegistry& registry) {
  require_the_job(config);
  check_kept_layers(config);
  check_shares(config);
  TrainJob job;
  job.places = places_of(config);
  job.teacher = config.text("teacher");
  job.corpora = corpora(config);
  for (const std::string& name : config.get<Strings>("eval_text")) job.eval_text.emplace_back(name);
  job.held_out = config.get<double>("held_out");
  job.out = config.text("out");
  job.force = config.get<bool>("force");
  job.keep_attention = config.text("keep_attention");
  read_student(config, registry, job);
  job.seed = static_cast<std::uint64_t>(config.get<std::int64_t>("seed"));
  job.eval = perplexity_options(config);
  job.checkpoint_keep = config.get<std::int64_t>("checkpoint.keep");
  for (const Config& row : config.rows("stage"))
    job.stages.push_back(read_stage(config, row, registry));
  // The stored recipe, run again, is the same recipe: both are taken with everything filled in.
  const Config resolved = resolved_train_configuration(config, registry);
  job.config_toml = resolved.to_toml();
  flatten(resolved, "", job.recipe);
  return job;
}

}  // namespace graft
