#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/eval/agreement.h"
#include "core/eval/perplexity.h"
#include "core/train/convert.h"

namespace graft {

class PluginRegistry;

// The main job: convert a teacher, evaluate it beside its baselines on held-out text, write the
// student.
struct MainJob {
  std::filesystem::path teacher;
  std::vector<std::filesystem::path> text;  // calibration
  std::vector<std::filesystem::path>
      eval_text;  // empty: a tail of each calibration document is held out
  std::string text_field = "text";
  std::filesystem::path out;
  bool force = false;
  std::vector<std::string> keep{
      "none"};  // which layers keep their attention; the first is the student written
  Compute compute = Compute::float32;
  std::uint64_t seed = 1;
  Recipe recipe;
  std::vector<Recipe> baselines;
  PerplexityOptions eval;
  std::int64_t prompts = 16, prompt_length = 48, continuation = 32;
  // Files the settings came from, which OUT may not hold (but for its own config.toml).
  std::vector<std::filesystem::path> settings_files;
  std::map<std::string, std::string> extra_files;  // name -> content, written into OUT: config.toml
};

struct ResultRow {
  std::string init;   // the recipe's label
  std::string stage;  // "init" | "calibrate"
  std::string keep;   // as asked: "none", "uniform:4"
  double perplexity = 0;
  Agreement agreement;
  std::int64_t tokens = 0;  // calibration tokens read
  double seconds = 0;  // of converting these layers: teacher's passes, initializer, calibration
};

struct MainJobResult {
  Perplexity teacher;
  std::vector<ResultRow> rows;
  std::string protocol;                  // how every perplexity here was made
  std::vector<std::string> calibration;  // names of the files that were calibrated on
  std::string held_out;                  // which text it was made on
  std::string agreement_protocol;
  double calibrate_tokens_per_second =
      0;                          // tokens through one layer's training step, summed over layers
  std::filesystem::path student;  // empty when nothing was written
};

// What a caller may show. All may be empty.
struct JobHooks {
  // A phase starts; `units` of it will be reported through advance(), 0 = not known.
  std::function<void(const std::string& phase, std::int64_t units, const std::string& unit)> begin;
  std::function<void(std::int64_t units, const std::string& note)> advance;
  std::function<void(const ResultRow& row)> row;
  std::function<void(const std::string& message)> say;  // something a user should know
  StopCheck should_stop;
};

// Runs the job and writes OUT whole or not at all:
//   results.json, student/ (Hugging Face format), and extra_files.
// Everything that can be refused cheaply is, before a weight is read: paths, OUT, roles, layer
// sets. Throws Error.
MainJobResult run_main_job(const MainJob& job, PluginRegistry& registry, const JobHooks& hooks);

// results.json's content.
std::string results_json(const MainJob& job, const MainJobResult& result);

// The part of each document that calibration may read where no evaluation text is given: all but
// the tail that figures are made on.
std::vector<Document> without_held_out_tails(const std::vector<Document>& documents);

}  // namespace graft
