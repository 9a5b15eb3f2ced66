#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "apps/hostapp/command_line.h"
#include "core/abi/component.h"
#include "core/abi/options.h"
#include "core/config/config.h"

namespace graft {

class HostServices;
class PluginRegistry;

// The folder of the running program; plugins and recipes lie beside it.
std::filesystem::path executable_folder();

// Config files and flags, without a recipe.
Config read_configuration(const CommandLine& line);

std::unique_ptr<PluginRegistry> make_registry(const Config& config, HostServices& host);

// Puts the recipe below what was given: the file that `recipe` names, or the default one of mixer
// and initializer where they are known: <mixer>-<initializer>.toml beside the mixer's or the
// initializer's file, or among those that come with graft. Returns the default recipe that was
// looked for last and not found, else "".
std::filesystem::path add_recipe(Config& config, PluginRegistry& registry);

using OptionValues = std::map<std::string, OptionValue>;

// The options given in `table` of `config`, checked against what the component declares. Throws
// Error(usage) that starts with where the option was written.
OptionValues plugin_options(const Config& config, const std::string& table,
                            const Component& component);

// Writes the plugin's own defaults into the table, for --print-config. Same errors.
void add_plugin_defaults(Config& config, const std::string& table, const Component& component);

// The same for every plugin that the configuration names: mixer, initializer, objective.
void add_all_plugin_defaults(Config& config, PluginRegistry& registry);

// Which [[baseline]] rows `compare` asks for.
std::vector<const Config*> compared_baselines(const Config& config);

}  // namespace graft
