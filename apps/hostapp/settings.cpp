#include "apps/hostapp/settings.h"

#include <algorithm>
#include <system_error>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/config/coerce.h"
#include "core/config/keys.h"
#include "core/loader/registry.h"

namespace graft {
namespace {

namespace fs = std::filesystem;

// The two lists of types stand in the same order.
ValueType value_type(std::uint32_t option_type) {
  return static_cast<ValueType>(option_type - GRAFT_BOOL);
}
static_assert(GRAFT_FLOAT - GRAFT_BOOL == static_cast<int>(ValueType::number) &&
              GRAFT_FLOAT_LIST - GRAFT_BOOL == static_cast<int>(ValueType::numbers));

ConfigValue to_config(const OptionValue& value) {
  return std::visit([](const auto& held) { return ConfigValue(held); }, value);
}

OptionValue to_option(const ConfigEntry& entry, const Option& option, const std::string& name) {
  // What stood behind a flag has no type of its own: the option's counts.
  const ConfigValue value =
      entry.text ? parse_words({*entry.text}, value_type(option.type), name, entry.origin.where)
                 : entry.value;
  if (type_of(value) == ValueType::strings) {
    fail(ErrorKind::usage, entry.origin.where + ": " + name + ": expected " + option.describe() +
                               ", got " + describe(value));
  }
  return std::visit(
      [](const auto& held) -> OptionValue {
        if constexpr (std::is_constructible_v<OptionValue, decltype(held)>) return held;
        return false;  // the list of strings, refused above
      },
      value);
}

ResolvedOptions resolve(const Config& config, const std::string& table,
                        const Component& component) {
  const auto entries = config.table(table);
  OptionValues given;
  for (const auto& [key, entry] : entries) {
    if (entry.origin.layer == Layer::builtin) continue;
    const Option* const option = component.schema.find(key);
    given[key] = option ? to_option(entry, *option, table + "." + key) : OptionValue(false);
  }
  try {
    return ResolvedOptions(component.schema, given, component.label());
  } catch (const OptionError& error) {
    const auto entry = entries.find(error.key());
    const std::string where =
        entry == entries.end() ? "--" + table + "." + error.key() : entry->second.origin.where;
    fail(ErrorKind::usage, where + ": " + error.what());
  }
}

// Beside the mixer's file, where a third party ships it; then beside the initializer's; else graft's
// own, whether there or not.
fs::path default_recipe(const Component& mixer, const Component& initializer) {
  const std::string name = mixer.alias + "-" + initializer.alias + ".toml";
  for (const Component* component : {&mixer, &initializer}) {
    const fs::path file = component->library->file().parent_path() / name;
    if (fs::exists(file)) return file;
  }
  return executable_folder().parent_path() / "share/graft/recipes" / name;
}

void add_defaults_of(Config& config, PluginRegistry& registry, ComponentKind kind,
                     const std::string& name_key, const std::string& table) {
  const std::string& name = config.text(name_key);
  if (!name.empty()) add_plugin_defaults(config, table, registry.find(kind, name));
}

}  // namespace

fs::path executable_folder() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) fail(ErrorKind::internal, "cannot tell where the program lies: " + error.message());
  return program.parent_path();
}

Config read_configuration(const CommandLine& line) {
  Config config(graft_schema());
  for (const fs::path& file : line.config_files) config.read_file(file, Layer::file);
  for (const FlagValue& value : line.flags) config.set_flag(value.key, value.words, value.flag);
  return config;
}

std::unique_ptr<PluginRegistry> make_registry(const Config& config, HostServices& host) {
  std::vector<fs::path> given;
  for (const std::string& folder : config.get<std::vector<std::string>>("plugin_path"))
    given.emplace_back(folder);
  return std::make_unique<PluginRegistry>(default_search_path(given, executable_folder()), host);
}

fs::path add_recipe(Config& config, PluginRegistry& registry) {
  const std::string recipe = config.text("recipe");
  if (recipe == "none") return {};
  fs::path file = recipe;
  if (recipe == "auto") {
    const std::string &mixer = config.text("mixer.name"), &init = config.text("init.name");
    if (mixer.empty() || init.empty()) return {};
    const Component& made = registry.find(ComponentKind::mixer, mixer);
    const Component& by = registry.find(ComponentKind::initializer, init);
    file = default_recipe(made, by);
    if (!fs::exists(file)) return file;
  }
  config.read_file(file, Layer::recipe);
  for (const std::string key : {"recipe", "plugin_path"}) {
    if (config.at(key).origin.layer != Layer::recipe) continue;
    fail(ErrorKind::usage, config.at(key).origin.where + ": a recipe cannot set " + quoted(key));
  }
  return {};
}

OptionValues plugin_options(const Config& config, const std::string& table,
                            const Component& component) {
  // The defaults stay out: the plugin's own library fills them in, and a checkpoint stores what was
  // asked for.
  const ResolvedOptions resolved = resolve(config, table, component);
  OptionValues given;
  for (const auto& [key, entry] : config.table(table)) {
    if (entry.origin.layer != Layer::builtin) given[key] = resolved.at(key);
  }
  return given;
}

void add_plugin_defaults(Config& config, const std::string& table, const Component& component) {
  const auto resolved = resolve(config, table, component);
  for (const auto& [key, value] : resolved.values()) {
    config.set_default(table + "." + key, to_config(value), "default of " + component.label());
  }
}

void add_all_plugin_defaults(Config& config, PluginRegistry& registry) {
  add_defaults_of(config, registry, ComponentKind::mixer, "mixer.name", "mixer.options");
  add_defaults_of(config, registry, ComponentKind::initializer, "init.name", "init.options");
  if (config.get<bool>("calibrate.enabled")) {
    add_defaults_of(config, registry, ComponentKind::objective, "calibrate.objective.name",
                    "calibrate.objective.options");
  }
}

std::vector<const Config*> compared_baselines(const Config& config) {
  const std::vector<Config>& rows = config.rows("baseline");
  const auto& wanted = config.get<std::vector<std::string>>("compare");
  const std::string& where = config.at("compare").origin.where;
  std::vector<const Config*> chosen;
  std::vector<std::string> names;
  for (const Config& row : rows) {
    const std::string& name = row.text("name");
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      fail(ErrorKind::usage, row.origin().where + ": two baselines are called " + quoted(name));
    }
    names.push_back(name);
  }
  for (const std::string& name : wanted) {
    if ((name == "all" || name == "none") && wanted.size() > 1) {
      fail(ErrorKind::usage, where + ": compare: " + quoted(name) + " stands alone or not at all");
    }
    if (name == "none") return {};
    const auto row = std::find(names.begin(), names.end(), name);
    if (name != "all" && row == names.end()) {
      fail(ErrorKind::usage,
           where + ": compare: there is no baseline " + quoted(name) +
               (names.empty() ? "; the recipe has none" : did_you_mean(name, names)));
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const bool is_new = std::find(chosen.begin(), chosen.end(), &rows[i]) == chosen.end();
      if (is_new && (name == "all" || names[i] == name)) chosen.push_back(&rows[i]);
    }
  }
  return chosen;
}

}  // namespace graft
