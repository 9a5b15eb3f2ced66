#pragma once

#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/abi/component.h"
#include "core/abi/host_services.h"
#include "core/abi/options.h"
#include "graft/graft.h"

namespace graft {

// A plugin after its negotiation: what it is, what it offers, and the way to make instances. Knows
// nothing of files and dlopen; the loader hands it the entry function. Shared: every instance holds
// its library, and the last one to go calls the plugin's deinit. Call it from one thread at a time;
// instances are independent.
class PluginLibrary : public std::enable_shared_from_this<PluginLibrary> {
 public:
  // Negotiates, checks and initialises the plugin behind `negotiate`. Throws Error(plugin) whose
  // message names `file` and the cause. `host` outlives the library.
  static std::shared_ptr<PluginLibrary> negotiate(graft_plugin_negotiate_fn negotiate,
                                                  const std::filesystem::path& file,
                                                  HostServices& host);
  ~PluginLibrary();
  PluginLibrary(const PluginLibrary&) = delete;
  PluginLibrary& operator=(const PluginLibrary&) = delete;

  const std::filesystem::path& file() const { return file_; }
  const std::string& id() const { return id_; }
  const std::string& vendor() const { return vendor_; }
  const std::string& url() const { return url_; }
  const std::string& version() const { return version_; }
  const std::string& license() const { return license_; }
  const std::string& build_tags() const { return build_tags_; }
  std::uint32_t abi() const { return abi_; }
  const std::deque<Component>& components() const { return components_; }

  // `component` is one of components(). Options as in ResolvedOptions. The layer's pointers are
  // read during the call.
  std::unique_ptr<Mixer> create_mixer(const Component& component, const graft_layer_info& layer,
                                      const std::map<std::string, OptionValue>& options) const;
  std::unique_ptr<Initializer> create_initializer(
      const Component& component, const std::map<std::string, OptionValue>& options) const;
  std::unique_ptr<Objective> create_objective(
      const Component& component, const std::map<std::string, OptionValue>& options) const;

 private:
  PluginLibrary(std::filesystem::path file, const graft_plugin& plugin, std::uint32_t abi,
                const void* key);
  void read_factories();
  void add_components(ComponentKind kind, const graft_desc* const* descs, std::uint32_t count);

  std::filesystem::path file_;
  graft_plugin plugin_;
  std::uint32_t abi_;
  std::string id_, vendor_, url_, version_, license_, build_tags_;
  graft_mixer_factory mixers_{};
  graft_initializer_factory initializers_{};
  graft_objective_factory objectives_{};
  std::deque<Component> components_;
  const void* key_;  // what all libraries made of one file have in common
  HostLease lease_;
  bool initialised_ = false;
};

}  // namespace graft
