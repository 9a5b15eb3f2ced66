#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/eval/perplexity.h"
#include "core/train/stage.h"

namespace graft {

class PluginRegistry;

struct CorpusChoice {
  std::vector<std::filesystem::path> paths;
  double weight = 1;
  std::string field = "text";  // of .jsonl lines
};

// A run of `hostapp train`: the stages of a recipe, one after the other, with checkpoints between.
struct TrainJob {
  std::filesystem::path teacher;
  std::vector<CorpusChoice> corpora;
  // Empty: `held_out` of each corpus. With neither, nothing is measured.
  std::vector<std::filesystem::path> eval_text;
  double held_out = 0.1;
  std::filesystem::path out;
  std::filesystem::path student;              // the run goes on from it; empty: stage 1 makes one
  std::optional<PluginChoice> student_mixer;  // its mixer
  bool force = false, resume = false;
  bool allow_change = false;  // resume although recipe, text, teacher or plugins changed
  std::string keep_attention = "none";
  std::uint64_t seed = 1;
  std::vector<Stage> stages;
  PerplexityOptions eval;
  std::int64_t checkpoint_keep = 2;
  std::string config_toml;                    // the resolved configuration, stored
  std::string scale;                          // the recipe's scale in use, stored
  std::map<std::string, std::string> recipe;  // what of it decides on the result: key -> value
  std::map<std::string, std::string> places;  // key -> where it was given, for messages
};

struct TrainHooks {
  // A phase starts; `units` of it (0 = not known) will be reported through advance(), `done` were
  // done by earlier processes.
  std::function<void(const std::string& phase, std::int64_t units, const std::string& unit,
                     std::int64_t done)>
      begin;
  std::function<void(std::int64_t units, const std::string& note)> advance;
  std::function<void(const std::string& message)> say;
  std::function<void(const std::string& message)> warn;
  std::function<bool()> should_stop;
};

struct TrainResult {
  std::filesystem::path student;
  double teacher_perplexity = 0;       // 0 where nothing was measured
  std::vector<double> perplexity;      // at the end of each stage that this process ended
  std::int64_t steps = 0, tokens = 0;  // of the whole run
  double seconds = 0;
  std::uint64_t memory_estimate = 0, memory_peak = 0;
};

// Runs what is left of the job and writes the student. Whatever can be refused without reading a
// weight is refused first. When should_stop says so the step at work is finished, the run saved,
// and Error(interrupted) thrown; the same bytes result as without. Throws Error; one that stops a
// step (a loss that is not finite) names where the state before it was saved.
TrainResult run_train_job(const TrainJob& job, PluginRegistry& registry, const TrainHooks& hooks);

}  // namespace graft
