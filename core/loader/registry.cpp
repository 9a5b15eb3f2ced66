#include "core/loader/registry.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <system_error>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/hash.h"
#include "core/base/suggest.h"
#include "core/loader/open_library.h"
#include "core/loader/trial.h"

namespace graft {
namespace fs = std::filesystem;
namespace {

// What the sidecar alone shows to be wrong: said before a line of the plugin runs.
void check_before_opening(const Sidecar& sidecar, const fs::path& file, const HostServices& host) {
  const std::string label = "plugin " + quoted_path(file);
  const AbiRange spoken{sidecar.abi_min.value_or(0), sidecar.abi_max.value_or(0xFFFFFFFFU)};
  if (!host.abi().overlaps(spoken)) {
    std::string range = abi_text(spoken);
    if (!sidecar.abi_min) range = abi_text(spoken.max) + " and earlier";
    if (!sidecar.abi_max) range = abi_text(spoken.min) + " and later";
    fail(ErrorKind::plugin, label + " is for graft ABI " + range + " (" +
                                quoted_path(sidecar.file) + "), but this graft speaks " +
                                abi_text(host.abi()) +
                                ": get the plugin for this version of graft");
  }
  const std::string conflict =
      build_tags_conflict(sidecar.build_tags.value_or(""), host.build_tags());
  if (!conflict.empty()) {
    fail(ErrorKind::plugin,
         label + " was built with " + conflict + ": rebuild it against the same");
  }
  if (sidecar.sha256 && sha256_hex_of_file(file) != *sidecar.sha256) {
    fail(ErrorKind::plugin, label + " is not the file that " + quoted_path(sidecar.file) +
                                " describes (its SHA-256 differs): install the two together");
  }
}

void check_agrees(const Sidecar& sidecar, const PluginLibrary& library) {
  const auto check = [&](const char* key, const std::optional<std::string>& said,
                         const std::string& is) {
    if (!said || *said == is) return;
    fail(ErrorKind::plugin, "plugin " + quoted_path(library.file()) + " disagrees with " +
                                quoted_path(sidecar.file) + ": " + key + " is " + quoted(is) +
                                ", the sidecar says " + quoted(*said));
  };
  check("id", sidecar.id, library.id());
  check("license", sidecar.license, library.license());
  check("build_tags", sidecar.build_tags, library.build_tags());
  if (!sidecar.aliases) return;
  std::set<std::string> are;
  for (const Component& component : library.components()) are.insert(component.alias);
  const std::set<std::string> said(sidecar.aliases->begin(), sidecar.aliases->end());
  const auto joined = [](const std::set<std::string>& names) {
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
  };
  check("the list of aliases", joined(said), joined(are));
}

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

// "2 plugins", "no plugin", "does not exist".
std::string place_text(const fs::path& place, std::size_t plugins) {
  std::error_code error;
  if (!fs::exists(place, error)) return "does not exist";
  if (plugins == 0) return "no plugin";
  return std::to_string(plugins) + (plugins == 1 ? " plugin" : " plugins");
}

}  // namespace

std::vector<fs::path> default_search_path(const std::vector<fs::path>& given,
                                          const fs::path& exe_dir) {
  std::vector<fs::path> places;
  for (const fs::path& place : given) {
    std::error_code error;
    if (!fs::exists(place, error)) {
      fail(ErrorKind::usage, "the plugin path " + quoted_path(place) + " does not exist");
    }
    places.push_back(place);
  }
  if (const char* const from_environment = std::getenv("GRAFT_PLUGIN_PATH")) {
    const std::string all = from_environment;
    for (std::size_t begin = 0; begin < all.size();) {
      const std::size_t end = std::min(all.find(':', begin), all.size());
      if (end > begin) places.emplace_back(all.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  places.push_back((exe_dir / ".." / "lib" / "graft" / "plugins").lexically_normal());
  return places;
}

PluginRegistry::PluginRegistry(std::vector<fs::path> search_path, HostServices& host)
    : search_path_(std::move(search_path)), host_(host) {
  for (fs::path& place : search_path_) {
    place = fs::absolute(place).lexically_normal();
    if (!place.has_filename()) place = place.parent_path();  // "plugins/"
  }
}

// ---------------------------------------------------------------- files

void PluginRegistry::discover() {
  if (discovered_) return;
  discovered_ = true;
  for (const fs::path& place : search_path_) {
    std::error_code error;
    if (!fs::is_directory(place, error)) {
      // A place that does not exist may come from a default; "not found" shows it.
      if (fs::exists(place, error)) add_file(place, true);
      continue;
    }
    std::vector<fs::path> found;
    for (auto entry = fs::directory_iterator(place, error);
         !error && entry != fs::directory_iterator(); entry.increment(error)) {
      if (entry->path().extension() == ".so") found.push_back(entry->path());
      if (entry->path().string().ends_with(kSidecarSuffix)) report_orphan(entry->path());
    }
    if (error)
      refused_.push_back({place, quoted_path(place) + " cannot be read: " + error.message()});
    // The order of a folder is the file system's mood.
    std::sort(found.begin(), found.end());
    for (const fs::path& file : found) add_file(file, false);
  }
}

void PluginRegistry::report_orphan(const fs::path& sidecar) {
  std::string name = sidecar.filename().string();
  name.replace(name.size() - kSidecarSuffix.size(), kSidecarSuffix.size(), ".so");
  std::error_code error;
  if (fs::exists(sidecar.parent_path() / name, error)) return;
  refused_.push_back({sidecar, quoted_path(sidecar) + " describes a plugin, but there is no " +
                                   quoted(name) + " beside it"});
}

void PluginRegistry::add_file(const fs::path& path, bool named) {
  const auto known = std::find_if(files_.begin(), files_.end(),
                                  [&](const File& file) { return same_file(file.path, path); });
  if (known != files_.end()) {
    known->named = known->named || named;
    return;
  }
  File file{path, named, false, std::nullopt};
  try {
    std::error_code error;
    if (fs::exists(sidecar_path(path), error)) file.sidecar = read_sidecar(sidecar_path(path));
  } catch (const Error& error) {
    file.opened = true;
    refuse(file, "plugin " + quoted_path(path) + " is not used: " + error.what());
  }
  files_.push_back(std::move(file));
}

void PluginRegistry::refuse(const File& file, const std::string& cause) {
  if (file.named) fail(ErrorKind::plugin, cause);
  refused_.push_back({file.path, cause});
}

void PluginRegistry::open(File& file, bool tried_first) {
  if (file.opened) return;
  file.opened = true;
  try {
    if (file.sidecar) check_before_opening(*file.sidecar, file.path, host_);
    // Without a sidecar nothing vouches for the file.
    const bool tried = tried_first || !file.sidecar;
    const std::string crash = tried ? trial_in_child(file.path) : "";
    if (!crash.empty()) fail(ErrorKind::plugin, "plugin " + quoted_path(file.path) + " " + crash);
    auto library = PluginLibrary::negotiate(open_library(file.path), file.path, host_);
    if (file.sidecar) check_agrees(*file.sidecar, *library);
    for (const auto& other : libraries_) {
      if (other->id() == library->id()) {
        fail(ErrorKind::plugin,
             "plugin " + quoted_path(file.path) + " is not used: " + quoted_path(other->file()) +
                 " with the same id " + quoted(library->id()) + " comes first in the search path");
      }
    }
    libraries_.push_back(std::move(library));
  } catch (const Error& error) {
    refuse(file, error.what());
  }
}

void PluginRegistry::scan(bool tried_first) {
  discover();
  for (File& file : files_) open(file, tried_first);
}

void PluginRegistry::open_those_with(const std::string& alias) {
  discover();
  for (File& file : files_) {
    const bool elsewhere = file.sidecar && file.sidecar->aliases &&
                           std::find(file.sidecar->aliases->begin(), file.sidecar->aliases->end(),
                                     alias) == file.sidecar->aliases->end();
    if (file.named || !elsewhere) open(file);
  }
}

void PluginRegistry::open_library_called(const std::string& id) {
  for (File& file : files_) {
    if (file.sidecar && file.sidecar->id == id) open(file);
  }
}

std::vector<std::shared_ptr<const PluginLibrary>> PluginRegistry::libraries() const {
  return {libraries_.begin(), libraries_.end()};
}

// ---------------------------------------------------------------- components

std::vector<const Component*> PluginRegistry::opened_components(ComponentKind kind) const {
  std::vector<const Component*> found;
  for (const auto& library : libraries_) {
    for (const Component& component : library->components()) {
      if (component.kind == kind) found.push_back(&component);
    }
  }
  std::sort(found.begin(), found.end(), [](const Component* a, const Component* b) {
    return std::tie(a->alias, a->id) < std::tie(b->alias, b->id);
  });
  return found;
}

std::vector<const Component*> PluginRegistry::components(ComponentKind kind) {
  scan(/*tried_first=*/true);
  return opened_components(kind);
}

const Component& PluginRegistry::find(ComponentKind kind, const std::string& name) {
  const auto search = [&]() -> const Component* {
    const Component* by_alias = nullptr;
    const auto all = opened_components(kind);
    for (const Component* const component : all) {
      if (component->id == name) return component;
    }
    for (const Component* const component : all) {
      if (component->alias != name) continue;
      if (by_alias != nullptr) {
        fail(ErrorKind::usage, std::string(name_of(kind)) + " " + quoted(name) +
                                   " is ambiguous: " + quoted_path(by_alias->library->file()) +
                                   " and " + quoted_path(component->library->file()) +
                                   " both have one; ask for '" + by_alias->id + "' or '" +
                                   component->id + "'");
      }
      by_alias = component;
    }
    return by_alias;
  };
  open_those_with(name);
  if (const Component* const found = search()) return *found;
  // An id stands in no list of aliases, but a library of one component mostly has the same.
  open_library_called(name);
  if (const Component* const found = search()) return *found;
  scan(/*tried_first=*/true);
  if (const Component* const found = search()) return *found;
  fail_not_found(kind, name);
}

void PluginRegistry::fail_not_found(ComponentKind kind, const std::string& name) {
  std::vector<std::string> known;
  for (const Component* const component : opened_components(kind))
    known.push_back(component->alias);
  std::string text = std::string("there is no ") + name_of(kind) + " " + quoted(name);
  if (const auto near = nearest(name, known)) text += " (did you mean " + quoted(*near) + "?)";
  text += "\n  known: ";
  for (const std::string& alias : known) text += (&alias == &known.front() ? "" : ", ") + alias;
  if (known.empty()) text += "none";
  text += "\n  looked in:";
  for (const fs::path& place : search_path_) {
    const auto here = std::count_if(files_.begin(), files_.end(), [&](const File& file) {
      return file.path == place || file.path.parent_path() == place;
    });
    text +=
        "\n    " + quoted_path(place) + ": " + place_text(place, static_cast<std::size_t>(here));
  }
  if (!refused_.empty()) text += "\n  refused:";
  for (const RefusedPlugin& refused : refused_) text += "\n    " + refused.cause;
  fail(ErrorKind::usage, text);
}

std::unique_ptr<Mixer> PluginRegistry::create_mixer(
    const std::string& name, const graft_layer_info& layer,
    const std::map<std::string, OptionValue>& options) {
  const Component& component = find(ComponentKind::mixer, name);
  return component.library->create_mixer(component, layer, options);
}

std::unique_ptr<Initializer> PluginRegistry::create_initializer(
    const std::string& name, const std::map<std::string, OptionValue>& options) {
  const Component& component = find(ComponentKind::initializer, name);
  return component.library->create_initializer(component, options);
}

std::unique_ptr<Objective> PluginRegistry::create_objective(
    const std::string& name, const std::map<std::string, OptionValue>& options) {
  const Component& component = find(ComponentKind::objective, name);
  return component.library->create_objective(component, options);
}

}  // namespace graft
