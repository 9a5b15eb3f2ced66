#pragma once

#include "apps/hostapp/command_line.h"
#include "core/config/config.h"
#include "core/job/train_job.h"

namespace graft {

class PluginRegistry;

// The recipe of `hostapp train`, its scale applied and the flags over it.
Config read_train_configuration(const CommandLine& line);

// What of it is in force, to be stored or shown: with the plugins' own defaults, and without the
// corpora that text from the command line replaces.
Config resolved_train_configuration(Config config, PluginRegistry& registry);

// The job that a configuration describes. Throws Error(usage) that starts with where a value was
// written.
TrainJob make_train_job(const Config& config, PluginRegistry& registry);

}  // namespace graft
