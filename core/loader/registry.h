#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/abi/component.h"
#include "core/abi/host_services.h"
#include "core/abi/library.h"
#include "core/loader/sidecar.h"

namespace graft {

// A file in the search path that could not be used, and why. The cause names the file.
struct RefusedPlugin {
  std::filesystem::path file;
  std::string cause;
};

// --plugin-path entries, then those of GRAFT_PLUGIN_PATH (':' between them), then
// <exe_dir>/../lib/graft/plugins. Error(usage) for a given path that does not exist.
std::vector<std::filesystem::path> default_search_path(
    const std::vector<std::filesystem::path>& given, const std::filesystem::path& exe_dir);

// The plugins of a search path, by component. Files are opened when they may hold what is asked
// for: a sidecar's list of aliases says so, and without one a file is opened at the first question,
// in a child process before (trial_in_child()): one that crashes there is refused.
// What cannot be opened is remembered and reported by refused() and by "not found"; a file that the
// search path names itself (not its folder) has to open, or it is an error. Of two files with one
// component id the earlier in the search path is used. Not thread-safe.
class PluginRegistry {
 public:
  // Entries are folders (their *.so files, by name, not deeper) or plugin files. `host` outlives
  // the registry and all that it makes.
  PluginRegistry(std::vector<std::filesystem::path> search_path, HostServices& host);

  // Opens every plugin. Error(plugin) for an explicitly named file that fails. With `tried_first`
  // those with a sidecar are opened in a child process before, too.
  void scan(bool tried_first = false);

  // All components of a kind, by alias. Opens every plugin, each tried first.
  std::vector<const Component*> components(ComponentKind kind);

  // By alias or id. Error(usage): an alias that two components claim (both named; their ids work),
  // or nothing of that name: the nearest, all known, every place looked at and every file refused.
  const Component& find(ComponentKind kind, const std::string& id_or_alias);

  // find() and make. Errors as there and as ResolvedOptions and Instance say.
  std::unique_ptr<Mixer> create_mixer(const std::string& id_or_alias, const graft_layer_info& layer,
                                      const std::map<std::string, OptionValue>& options = {});
  std::unique_ptr<Initializer> create_initializer(
      const std::string& id_or_alias, const std::map<std::string, OptionValue>& options = {});
  std::unique_ptr<Objective> create_objective(
      const std::string& id_or_alias, const std::map<std::string, OptionValue>& options = {});

  // The libraries opened and the files refused so far; scan() first for all.
  std::vector<std::shared_ptr<const PluginLibrary>> libraries() const;
  const std::vector<RefusedPlugin>& refused() const { return refused_; }
  const std::vector<std::filesystem::path>& search_path() const { return search_path_; }

 private:
  struct File {
    std::filesystem::path path;
    bool named;  // by the search path itself
    bool opened = false;
    std::optional<Sidecar> sidecar;
  };

  void discover();
  void add_file(const std::filesystem::path& path, bool named);
  void report_orphan(const std::filesystem::path& sidecar);
  void open(File& file, bool tried_first = false);
  void refuse(const File& file, const std::string& cause);
  void open_those_with(const std::string& alias);
  void open_library_called(const std::string& id);
  std::vector<const Component*> opened_components(ComponentKind kind) const;
  [[noreturn]] void fail_not_found(ComponentKind kind, const std::string& name);

  std::vector<std::filesystem::path> search_path_;
  HostServices& host_;
  bool discovered_ = false;
  std::vector<File> files_;
  std::vector<std::shared_ptr<PluginLibrary>> libraries_;
  std::vector<RefusedPlugin> refused_;
};

}  // namespace graft
