#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "apps/hostapp/commands.h"
#include "apps/hostapp/console.h"
#include "apps/hostapp/eval_settings.h"
#include "apps/hostapp/interrupt.h"
#include "apps/hostapp/recipe_settings.h"
#include "apps/hostapp/settings.h"
#include "apps/hostapp/table.h"
#include "core/base/error.h"
#include "core/base/message.h"
#include "core/base/suggest.h"
#include "core/config/layer_set.h"
#include "core/job/main_job.h"
#include "core/loader/registry.h"

namespace graft {
namespace {

using Strings = std::vector<std::string>;

// What nothing works without, all at once, and where it comes from.
void require_the_job(const Config& config) {
  std::string missing, hints;
  const auto want = [&](const std::string& key, const std::string& flag, const std::string& hint) {
    const ConfigValue& value = config.at(key).value;
    const auto* list = std::get_if<Strings>(&value);
    if (list ? !list->empty() : !std::get<std::string>(value).empty()) return;
    missing += (missing.empty() ? "" : ", ") + flag;
    hints += "\n  " + flag + std::string(16 - std::min<std::size_t>(flag.size(), 15), ' ') + hint;
  };
  want("mixer.name", "--mixer NAME", "hostapp plugins list shows the mixers");
  want("init.name", "--init NAME", "... and the initializers");
  want("teacher", "--teacher DIR",
       "a model in Hugging Face format; a small one: .deps/venv/bin/python scripts/get_teacher.py "
       "DIR");
  want("text", "--text FILE...",
       "text to calibrate on; six novels: .deps/venv/bin/python scripts/get_text.py DIR");
  want("out", "--out DIR", "where the student and results.json go");
  if (!missing.empty()) fail(ErrorKind::usage, "missing: " + missing + hints);
}

[[noreturn]] void reject(const Config& config, const std::string& key, const std::string& what) {
  fail(ErrorKind::usage, config.at(key).origin.where + ": " + key + ": " + what);
}

void check_values(const Config& config, const std::filesystem::path& missing_recipe) {
  const Strings& keep = config.get<Strings>("keep_attention");
  if (keep.empty()) {
    reject(config, "keep_attention", "an empty list; for no layer write \"none\"");
  }
  for (const std::string& spec : keep) {
    check_attention_layers(spec);
    if (std::count(keep.begin(), keep.end(), spec) > 1) {
      reject(config, "keep_attention", quoted(spec) + " is given twice");
    }
  }
  if (!config.get<bool>("calibrate.enabled")) return;
  if (config.text("calibrate.objective.name").empty()) {
    fail(ErrorKind::usage,
         "calibration needs an objective: give --objective NAME, or --calibrate.enabled=false" +
             (missing_recipe.empty()
                  ? ""
                  : " (there is no default recipe " + missing_recipe.string() + ")"));
  }
  const auto& betas = config.get<std::vector<double>>("calibrate.betas");
  if (betas.size() != 2 || betas[0] >= 1 || betas[1] >= 1) {
    reject(config, "calibrate.betas",
           "expected two numbers of at least 0 and below 1, got " + to_toml(betas));
  }
  if (config.get<bool>("calibrate.keep_best") && !config.get<bool>("calibrate.full_batch")) {
    reject(config, "calibrate.keep_best",
           "losses of different batches cannot be compared; set calibrate.full_batch = true too");
  }
}

std::vector<std::filesystem::path> paths(const Strings& names) {
  return {names.begin(), names.end()};
}

MainJob make_job(const Config& config, PluginRegistry& registry) {
  MainJob job;
  job.teacher = config.text("teacher");
  job.text = paths(config.get<Strings>("text"));
  job.eval_text = paths(config.get<Strings>("eval_text"));
  job.text_field = config.text("text_field");
  job.out = config.text("out");
  job.force = config.get<bool>("force");
  job.keep = config.get<Strings>("keep_attention");
  job.compute = config.text("matmul") == "bf16" ? Compute::bfloat16 : Compute::float32;
  job.seed = static_cast<std::uint64_t>(config.get<std::int64_t>("seed"));
  const bool calibrate = config.get<bool>("calibrate.enabled");
  job.recipe = make_recipe(config, config, config.text("init.name"), "", calibrate, registry);
  for (const Config* row : compared_baselines(config)) {
    const bool calibrated = calibrate && row->text("stage") == "calibrate";
    job.baselines.push_back(
        make_recipe(config, *row, row->text("init.name"), row->text("name"), calibrated, registry));
  }
  job.eval = perplexity_options(config);
  job.prompts = config.get<std::int64_t>("agreement.prompts");
  job.prompt_length = config.get<std::int64_t>("agreement.prompt_length");
  job.continuation = config.get<std::int64_t>("agreement.tokens");
  job.extra_files["config.toml"] = config.to_toml();
  return job;
}

// The files named on the command line that say what to do.
std::vector<std::filesystem::path> settings_files(const CommandLine& line, const Config& config) {
  std::vector<std::filesystem::path> files(line.config_files.begin(), line.config_files.end());
  const std::string& recipe = config.text("recipe");
  if (recipe != "auto" && recipe != "none") files.emplace_back(recipe);
  for (const std::string& spec : config.get<Strings>("keep_attention"))
    if (spec.ends_with(".json")) files.emplace_back(spec);
  return files;
}

std::string result_table(const MainJob& job, const MainJobResult& result) {
  const bool agreed = job.prompts > 0;
  std::vector<Strings> rows = {
      {"start", "keeps attention", "perplexity", "agreement", "next token", "tokens", "seconds"}};
  rows.push_back({"teacher", "all", format_figure(result.teacher.value()), agreed ? "1.00" : "-",
                  agreed ? "1.00" : "-", "-", "-"});
  for (const ResultRow& row : result.rows) {
    rows.push_back({row.init + (row.stage == "calibrate" ? " + calibrate" : ""), row.keep,
                    format_figure(row.perplexity),
                    agreed ? format_figure(row.agreement.greedy) : "-",
                    agreed ? format_figure(row.agreement.forced) : "-", std::to_string(row.tokens),
                    format_figure(row.seconds)});
  }
  return format_table(rows);
}

// Most memory this process ever held, in GiB.
double peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1024.0 * 1024.0);
}

void print_result(const MainJob& job, const MainJobResult& result) {
  std::cout << result_table(job, result) << "\nperplexity: " << result.held_out << "; "
            << result.protocol << "\n";
  if (job.prompts > 0) {
    std::cout << "agreement with the teacher: " << result.agreement_protocol
              << "; \"next token\" is behind the teacher's own words\n";
  }
  if (result.calibrate_tokens_per_second > 0) {
    std::cout << "calibration: " << format_figure(result.calibrate_tokens_per_second)
              << " tokens/s through one layer's training step\n";
  }
  std::cout << "peak memory: " << format_figure(peak_memory()) << " GiB\n"
            << "student: " << result.student.string() << "\n"
            << "results: " << (job.out / "results.json").string() << "\n";
}

}  // namespace

void run_convert(const CommandLine& line, Config config, PluginRegistry& registry,
                 Console& console) {
  const std::filesystem::path missing_recipe = add_recipe(config, registry);
  if (!missing_recipe.empty()) log_info("no default recipe " + missing_recipe.string());
  require_the_job(config);
  check_values(config, missing_recipe);
  add_all_plugin_defaults(config, registry);
  MainJob job = make_job(config, registry);
  job.settings_files = settings_files(line, config);

  JobHooks hooks;
  hooks.begin = [&](const std::string& phase, std::int64_t units, const std::string& unit) {
    console.begin(phase, units, unit);
  };
  hooks.advance = [&](std::int64_t units, const std::string& note) {
    console.advance(units, note);
  };
  hooks.say = [](const std::string& message) { log_info(message); };
  hooks.row = [](const ResultRow& row) {
    log_info(row.init + " (" + row.stage + "), attention kept: " + row.keep + ": perplexity " +
             format_figure(row.perplexity));
  };
  hooks.should_stop = interrupted;
  const MainJobResult result = run_main_job(job, registry, hooks);
  console.finish();
  print_result(job, result);
}

}  // namespace graft
