#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/abi/component.h"

namespace graft {

class Config;
class PluginRegistry;

// All plugins as a table, one line each, and the files that were refused with their causes.
std::string list_plugins(PluginRegistry& registry);

// Everything a component says of itself; `name` is an alias or an id of any kind. Throws
// Error(usage).
std::string plugin_info(PluginRegistry& registry, const std::string& name);

// The options of a component, one or two lines each. `table` = "" gives bare keys, "mixer.options"
// flags.
std::string describe_options(const Component& component, const std::string& table);

// The options of the plugins that the configuration names, for --help; "" when it names none.
std::string help_on_plugins(const Config& config, PluginRegistry& registry);

// Runs `program` (graft-validate) with these arguments in place of this process: its output and
// exit code are what the user sees. Error(usage) when it is not there.
[[noreturn]] void run_validator(const std::filesystem::path& program,
                                const std::vector<std::string>& arguments);

}  // namespace graft
