#include "apps/hostapp/plugins_command.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "apps/hostapp/table.h"
#include "core/abi/abi_range.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/suggest.h"
#include "core/config/config.h"
#include "core/loader/registry.h"

namespace graft {
namespace {

constexpr std::array kinds = {ComponentKind::mixer, ComponentKind::initializer,
                              ComponentKind::objective};

constexpr std::array<std::pair<std::uint64_t, const char*>, 12> capabilities = {{
    {GRAFT_CAP_BACKWARD, "trains"},
    {GRAFT_CAP_STEP, "decodes with a constant state"},
    {GRAFT_CAP_STATE_IO, "goes on from a state"},
    {GRAFT_CAP_PAD_MASK, "pad mask"},
    {GRAFT_CAP_VARLEN, "packed sequences"},
    {GRAFT_CAP_STRIDED, "strided inputs"},
    {GRAFT_CAP_DETERMINISTIC, "deterministic"},
    {GRAFT_CAP_BATCH_INVARIANT, "batch-invariant"},
    {GRAFT_CAP_THREAD_INVARIANT, "thread-invariant"},
    {GRAFT_CAP_GRAPH_CAPTURE, "CUDA graphs"},
    {GRAFT_CAP_STATEFUL_GRAD, "gradients through states"},
    {GRAFT_CAP_TAPS_ONLY, "taps without y"},
}};

void append(std::string& list, const std::string& item) {
  list += (list.empty() ? "" : ", ") + item;
}

std::string capability_names(std::uint64_t caps) {
  std::string names;
  for (const auto& [bit, name] : capabilities) {
    if ((caps & bit) != 0) append(names, name);
  }
  return names.empty() ? "none declared" : names;
}

std::string dtype_names(const std::vector<DLDataType>& dtypes) {
  std::string names;
  for (const DLDataType& type : dtypes) {
    const char* const base = type.code == kDLFloat    ? "float"
                             : type.code == kDLBfloat ? "bfloat"
                                                      : "type ";
    append(names, base + std::to_string(int{type.bits}));
  }
  return names.empty() ? "none declared" : names;
}

std::string device_names(const std::vector<DLDeviceType>& devices) {
  std::string names;
  for (const DLDeviceType device : devices) {
    append(names, device == kDLCPU    ? "CPU"
                  : device == kDLCUDA ? "CUDA"
                                      : "device " + std::to_string(int{device}));
  }
  return names.empty() ? "none declared" : names;
}

std::string indented(const std::string& text, const std::string& indent) {
  std::string out = indent;
  for (const char c : text) {
    out += c;
    if (c == '\n') out += indent;
  }
  return out + "\n";
}

std::string describe_component(const Component& component) {
  std::string out = component.label() + "  " + component.version + "  " + component.id + "\n";
  if (!component.name.empty()) out += "  " + component.name + "\n";
  if (!component.description.empty()) out += indented(component.description, "  ");
  const auto line = [&](const std::string& what, const std::string& value) {
    if (!value.empty()) out += "  " + what + std::string(14 - what.size(), ' ') + value + "\n";
  };
  line("license", component.license);
  line("can", component.kind == ComponentKind::mixer ? capability_names(component.caps) : "");
  line("computes in", dtype_names(component.dtypes));
  line("runs on", device_names(component.devices));
  line("file", component.library->file().string());
  line("library", component.library->id() + " " + component.library->version());
  if (!component.citation.empty()) out += "  citation\n" + indented(component.citation, "    ");
  const std::string options = describe_options(component, "");
  return out + (options.empty() ? "  no options\n" : "  options\n" + options);
}

const Component& find_anywhere(PluginRegistry& registry, const std::string& name) {
  std::vector<std::string> known;
  for (const ComponentKind candidate : kinds) {
    for (const Component* const component : registry.components(candidate)) {
      known.push_back(component->alias);
      if (component->alias != name && component->id != name) continue;
      return registry.find(candidate, name);
    }
  }
  std::string looked;
  for (const auto& place : registry.search_path()) looked += "\n  looked in " + place.string();
  for (const RefusedPlugin& refused : registry.refused()) looked += "\n  refused: " + refused.cause;
  fail(ErrorKind::usage, "there is no plugin " + quoted(name) + did_you_mean(name, known) + looked);
}

// The LibTorch a library was built with, out of "compiler=gcc-13;cxx11abi=1;libtorch=2.8.0".
std::string libtorch_of(const std::string& build_tags) {
  const std::string key = "libtorch=";
  for (std::size_t from = 0; from < build_tags.size();) {
    const std::size_t end = std::min(build_tags.find(';', from), build_tags.size());
    const std::string tag = build_tags.substr(from, end - from);
    if (tag.starts_with(key)) return tag.substr(key.size());
    from = end + 1;
  }
  return "-";
}

}  // namespace

std::string list_plugins(PluginRegistry& registry) {
  std::vector<std::vector<std::string>> rows = {
      {"ID", "ALIAS", "KIND", "VERSION", "ABI", "LICENSE", "LIBTORCH", "PATH"}};
  for (const ComponentKind kind : kinds) {
    for (const Component* const component : registry.components(kind)) {
      const PluginLibrary& library = *component->library;
      rows.push_back({component->id, component->alias, name_of(kind), component->version,
                      abi_text(library.abi()), component->license,
                      libtorch_of(library.build_tags()), library.file().string()});
    }
  }
  std::string out = rows.size() > 1 ? format_table(rows) : "no plugins\n";
  for (const auto& place : registry.search_path()) out += "looked in " + place.string() + "\n";
  for (const RefusedPlugin& refused : registry.refused()) out += "refused: " + refused.cause + "\n";
  return out;
}

std::string plugin_info(PluginRegistry& registry, const std::string& name) {
  return describe_component(find_anywhere(registry, name));
}

std::string describe_options(const Component& component, const std::string& table) {
  std::string out;
  for (const Option& option : component.schema.options()) {
    const std::string name = table.empty() ? option.key : "--" + table + "." + option.key;
    out += "    " + name + "  " + option.describe() +
           (option.required() ? "; required" : " [" + to_text(option.default_value) + "]") +
           (option.deprecated() ? "; deprecated" : "") + "\n";
    if (!option.doc.empty()) out += indented(option.doc, "        ");
  }
  return out;
}

void run_validator(const std::filesystem::path& program,
                   const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {program.string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(program.c_str(), pointers.data());
  fail(ErrorKind::usage, "cannot run " + quoted_path(program) + ": " + std::strerror(errno) +
                             "; it comes with graft's SDK (cmake --install BUILD --component sdk)");
}

std::string help_on_plugins(const Config& config, PluginRegistry& registry) {
  std::string out;
  const auto add = [&](ComponentKind kind, const std::string& name_key, const std::string& table) {
    const std::string& name = config.text(name_key);
    if (name.empty()) return;
    const Component& component = registry.find(kind, name);
    const std::string options = describe_options(component, table);
    out += "Options of " + component.label() + ":\n" + (options.empty() ? "    none\n" : options) +
           "\n";
  };
  add(ComponentKind::mixer, "mixer.name", "mixer.options");
  add(ComponentKind::initializer, "init.name", "init.options");
  add(ComponentKind::objective, "calibrate.objective.name", "calibrate.objective.options");
  return out;
}

}  // namespace graft
