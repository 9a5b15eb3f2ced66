#include "core/abi/library.h"

#include <algorithm>

#include "core/abi/full_copy.h"
#include "core/abi/plugin_call.h"
#include "core/abi/strict.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

// What stands in for functions a plugin need not have.
graft_status nothing_to_init(const graft_host*, const char*, graft_error*) { return GRAFT_OK; }
void nothing_to_deinit() {}

graft_plugin usable(const graft_plugin* given, const std::string& label) {
  if (given == nullptr) {
    fail(ErrorKind::plugin, label + ": negotiation succeeded, but gave no plugin (NULL)");
  }
  graft_plugin plugin = full_copy(given);
  if (plugin.get_extension == nullptr) {
    fail(ErrorKind::plugin, label + ": its table has no function get_extension");
  }
  if (*text_or_empty(plugin.id) == '\0') fail(ErrorKind::plugin, label + ": it has no id");
  if (plugin.init == nullptr) plugin.init = &nothing_to_init;
  if (plugin.deinit == nullptr) plugin.deinit = &nothing_to_deinit;
  return plugin;
}

template <class Factory>
Factory usable_factory(const void* found, const std::string& what) {
  const auto factory = full_copy(static_cast<const Factory*>(found));
  if (found == nullptr || factory.count == 0) return Factory{};
  if (factory.descs == nullptr) {
    fail(ErrorKind::plugin,
         what + " has " + std::to_string(factory.count) + " components, but their list is NULL");
  }
  if (factory.create == nullptr) {
    fail(ErrorKind::plugin, what + " has no function create");
  }
  return factory;
}

Component owned_component(ComponentKind kind, const graft_desc* given, const std::string& what) {
  const graft_desc desc = full_copy(given);
  if (given == nullptr || *text_or_empty(desc.id) == '\0') {
    fail(ErrorKind::plugin, what + " has no id");
  }
  Component component;
  component.kind = kind;
  component.id = desc.id;
  // Without an alias it goes by its id.
  component.alias = *text_or_empty(desc.alias) == '\0' ? desc.id : desc.alias;
  component.name = text_or_empty(desc.name);
  component.version = text_or_empty(desc.version);
  component.license = text_or_empty(desc.license);
  component.citation = text_or_empty(desc.citation);
  component.description = text_or_empty(desc.description);
  component.caps = desc.caps;
  component.schema = OptionSchema(desc, component.label());
  if (desc.dtypes != nullptr) component.dtypes.assign(desc.dtypes, desc.dtypes + desc.n_dtypes);
  if (desc.devices != nullptr)
    component.devices.assign(desc.devices, desc.devices + desc.n_devices);
  return component;
}

}  // namespace

std::shared_ptr<PluginLibrary> PluginLibrary::negotiate(graft_plugin_negotiate_fn negotiate,
                                                        const std::filesystem::path& file,
                                                        HostServices& host) {
  const std::string label = "plugin " + quoted_path(file);
  graft_negotiate_in in{};
  in.struct_size = sizeof in;
  in.dlpack_major = DLPACK_MAJOR_VERSION;
  in.min_abi = host.abi().min;
  in.max_abi = host.abi().max;
  in.host_name = host.name().c_str();
  in.host_version = host.version().c_str();
  graft_negotiate_out out{};
  out.struct_size = sizeof out;
  const auto* const key = reinterpret_cast<const void*>(negotiate);
  const OneAtATime alone(key, label + ", negotiation and init");
  call_plugin(label + ", negotiation",
              [&](graft_error* error) { return negotiate(&in, &out, error); });
  if (!host.abi().contains(out.abi)) {
    fail(ErrorKind::plugin, label + ": speaks graft ABI " + abi_text(out.abi) +
                                ", but this graft speaks " + abi_text(host.abi()) +
                                ": get the plugin for this version of graft");
  }
  std::shared_ptr<PluginLibrary> library(
      new PluginLibrary(file, usable(out.plugin, label), out.abi, key));
  const std::string conflict = build_tags_conflict(library->build_tags_, host.build_tags());
  if (!conflict.empty()) {
    fail(ErrorKind::plugin,
         label + ": was built with " + conflict + ": rebuild it against the same");
  }
  call_plugin(label + ", init", [&](graft_error* error) {
    return library->plugin_.init(host.c_host(library->id_, out.abi), library->file_.c_str(), error);
  });
  library->initialised_ = true;
  try {
    library->read_factories();
  } catch (const Error& error) {
    fail(error.kind(), label + ": " + error.what());
  }
  return library;
}

PluginLibrary::PluginLibrary(std::filesystem::path file, const graft_plugin& plugin,
                             std::uint32_t abi, const void* key)
    : file_(std::move(file)),
      plugin_(plugin),
      abi_(abi),
      id_(plugin.id),
      vendor_(text_or_empty(plugin.vendor)),
      url_(text_or_empty(plugin.url)),
      version_(text_or_empty(plugin.version)),
      license_(text_or_empty(plugin.license)),
      build_tags_(text_or_empty(plugin.build_tags)),
      key_(key),
      lease_(id_) {}

PluginLibrary::~PluginLibrary() {
  if (!initialised_) return;
  OneAtATime::log_if_busy(key_, "plugin " + quoted(id_) + ", deinit");
  plugin_.deinit();
}

void PluginLibrary::read_factories() {
  const auto ask = [&](const char* id) {
    const void* found = nullptr;
    call_plugin_silent("get_extension", [&] { found = plugin_.get_extension(id); });
    return found;
  };
  mixers_ = usable_factory<graft_mixer_factory>(ask(GRAFT_EXT_MIXER_FACTORY), "its mixer factory");
  initializers_ = usable_factory<graft_initializer_factory>(ask(GRAFT_EXT_INITIALIZER_FACTORY),
                                                            "its initializer factory");
  objectives_ = usable_factory<graft_objective_factory>(ask(GRAFT_EXT_OBJECTIVE_FACTORY),
                                                        "its objective factory");
  add_components(ComponentKind::mixer, mixers_.descs, mixers_.count);
  add_components(ComponentKind::initializer, initializers_.descs, initializers_.count);
  add_components(ComponentKind::objective, objectives_.descs, objectives_.count);
}

void PluginLibrary::add_components(ComponentKind kind, const graft_desc* const* descs,
                                   std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::string what = std::string(name_of(kind)) + " " + std::to_string(i);
    Component component = owned_component(kind, descs[i], what);
    component.library = this;
    const bool taken = std::any_of(components_.begin(), components_.end(), [&](const Component& c) {
      return c.kind == kind && c.id == component.id;
    });
    if (taken) fail(ErrorKind::plugin, "it has two components of the id " + quoted(component.id));
    components_.push_back(std::move(component));
  }
}

std::unique_ptr<Mixer> PluginLibrary::create_mixer(
    const Component& component, const graft_layer_info& layer,
    const std::map<std::string, OptionValue>& options) const {
  ResolvedOptions resolved(component.schema, options, component.label());
  OwnedLayerInfo owned(layer);
  const graft_layer_info info = owned.c_info();
  graft_mixer* handle = nullptr;
  call_plugin(component.label() + ", create", [&](graft_error* error) {
    return mixers_.create(component.id.c_str(), &info, resolved.c_config(), &handle, error);
  });
  return std::make_unique<Mixer>(shared_from_this(), component, std::move(resolved),
                                 std::move(owned), handle);
}

std::unique_ptr<Initializer> PluginLibrary::create_initializer(
    const Component& component, const std::map<std::string, OptionValue>& options) const {
  ResolvedOptions resolved(component.schema, options, component.label());
  graft_initializer* handle = nullptr;
  call_plugin(component.label() + ", create", [&](graft_error* error) {
    return initializers_.create(component.id.c_str(), resolved.c_config(), &handle, error);
  });
  return std::make_unique<Initializer>(shared_from_this(), component, std::move(resolved), handle);
}

std::unique_ptr<Objective> PluginLibrary::create_objective(
    const Component& component, const std::map<std::string, OptionValue>& options) const {
  ResolvedOptions resolved(component.schema, options, component.label());
  graft_objective* handle = nullptr;
  call_plugin(component.label() + ", create", [&](graft_error* error) {
    return objectives_.create(component.id.c_str(), resolved.c_config(), &handle, error);
  });
  return std::make_unique<Objective>(shared_from_this(), component, std::move(resolved), handle);
}

}  // namespace graft
