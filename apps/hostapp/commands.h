#pragma once

#include "apps/hostapp/command_line.h"
#include "core/config/config.h"

namespace graft {

class Console;
class PluginRegistry;

// The work behind each command, results on standard output. They throw Error.

void run_convert(const CommandLine& line, Config config, PluginRegistry& registry,
                 Console& console);
void run_train(const CommandLine& line, const Config& config, PluginRegistry& registry,
               Console& console);
void run_eval(const std::string& model, const Config& config, PluginRegistry& registry,
              Console& console);
void run_generate(const std::string& model, const Config& config, PluginRegistry& registry);
void run_select_layers(Config config, PluginRegistry& registry, Console& console);
void run_compare(const CommandLine& line, const Config& config, PluginRegistry& registry,
                 Console& console);
void run_inspect(const std::string& model, bool every_tensor);

// LibTorch's threads; 0 leaves its choice, the cores there are.
void set_threads(std::int64_t threads);

}  // namespace graft
