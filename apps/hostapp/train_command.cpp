#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>

#include "apps/hostapp/commands.h"
#include "apps/hostapp/console.h"
#include "apps/hostapp/interrupt.h"
#include "apps/hostapp/table.h"
#include "apps/hostapp/train_settings.h"
#include "core/base/error.h"
#include "core/base/message.h"
#include "core/job/train_job.h"
#include "core/train/memory_estimate.h"

namespace graft {
namespace {

void print_result(const TrainJob& job, const TrainResult& result) {
  std::cout << result.steps << " steps, " << result.tokens << " tokens, "
            << format_figure(result.seconds) << " s of training\n";
  if (result.teacher_perplexity > 0 && !result.perplexity.empty())
    std::cout << "perplexity: " << format_figure(result.perplexity.back()) << " (teacher "
              << format_figure(result.teacher_perplexity) << ")\n";
  std::cout << "peak memory: " << bytes_text(result.memory_peak) << " (estimated "
            << bytes_text(result.memory_estimate) << ")\n"
            << "student: " << result.student.string() << "\n"
            << "metrics: " << (job.out / "metrics.jsonl").string() << "\n";
}

}  // namespace

void run_train(const CommandLine& line, const Config& config, PluginRegistry& registry,
               Console& console) {
  TrainJob job = make_train_job(config, registry);
  if (line.resume && job.force)
    fail(ErrorKind::usage, "--resume goes on with a run, --force replaces it: give one of them");
  job.resume = line.resume;
  job.allow_change = line.allow_change;
  for (const FlagValue& value : line.flags)
    if (value.key == "scale") job.scale = value.words.front();
  TrainHooks hooks;
  hooks.begin = [&](const std::string& phase, std::int64_t units, const std::string& unit,
                    std::int64_t done) { console.begin(phase, units, unit, done); };
  hooks.advance = [&](std::int64_t units, const std::string& note) {
    console.advance(units, note);
  };
  hooks.say = [](const std::string& message) { log_info(message); };
  hooks.warn = [](const std::string& message) { log_warning(message); };
  hooks.should_stop = interrupted;
  const TrainResult result = run_train_job(job, registry, hooks);
  console.finish();
  print_result(job, result);
}

}  // namespace graft
