#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/abi/options.h"
#include "core/abi/owned_layer_info.h"
#include "core/abi/strict_calls.h"
#include "graft/graft.h"

namespace graft {

class PluginLibrary;

enum class ComponentKind { mixer, initializer, objective };
// "mixer", "initializer", "objective".
const char* name_of(ComponentKind kind);

// A component a plugin offers, copied out of its graft_desc.
struct Component {
  ComponentKind kind = ComponentKind::mixer;
  std::string id;     // "org.example.gdn"
  std::string alias;  // "gdn"
  std::string name, version, license, citation, description;
  std::uint64_t caps = 0;  // GRAFT_CAP_*
  OptionSchema schema;
  std::vector<DLDataType> dtypes;
  std::vector<DLDeviceType> devices;
  const PluginLibrary* library = nullptr;  // the one that holds it

  bool has(std::uint64_t cap) const { return (caps & cap) == cap; }
  bool supports(DLDataType dtype, DLDeviceType device) const;
  // "mixer 'gdn'"
  std::string label() const;
};

// What the three kinds of instances share. Each holds its library, so that order of destruction
// does not matter.
//
// Every call into a plugin that does not return GRAFT_OK throws Error(plugin) naming component,
// call, where and message; GRAFT_CANCELLED becomes Error(interrupted). Calls on one instance come
// from one thread at a time. In strict mode (strict.h) calls are made on guarded copies, and both
// sides are checked.
class Instance {
 public:
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  const Component& component() const { return *component_; }
  const std::string& label() const { return component_->alias; }
  const ResolvedOptions& options() const { return options_; }

 protected:
  Instance(std::shared_ptr<const PluginLibrary> library, const Component& component,
           ResolvedOptions options);
  ~Instance();

  // "plugin 'org.example.x' (mixer 'x'), forward"
  std::string who(const char* call) const;

  std::shared_ptr<const PluginLibrary> library_;
  const Component* component_;
  ResolvedOptions options_;
};

class Mixer : public Instance {
 public:
  // Made by PluginLibrary. Takes the handle over, checks its table and reads the parameter specs.
  Mixer(std::shared_ptr<const PluginLibrary> library, const Component& component,
        ResolvedOptions options, OwnedLayerInfo layer, graft_mixer* handle);
  ~Mixer();

  // A second instance of the same component, options and layer, for another thread.
  std::unique_ptr<Mixer> another() const;

  // Full-size copies with no NULL string, in the plugin's order; they live as long as the mixer.
  const std::vector<const graft_param_spec*>& param_specs() const { return spec_pointers_; }
  std::uint32_t param_schema() const { return table_.param_schema; }

  // Pointers in the answer live until the next plan() or the end of the mixer. Forward, backward
  // and step follow the plan of their sizes.
  graft_plan_out plan(const graft_plan_in& in);
  void forward(const graft_exec& exec, const graft_mixer_forward& args);
  void backward(const graft_exec& exec, const graft_mixer_backward& args);  // GRAFT_CAP_BACKWARD
  void step(const graft_exec& exec, const graft_mixer_forward& args);       // GRAFT_CAP_STEP

  bool has_backward() const { return component().has(GRAFT_CAP_BACKWARD); }
  bool has_step() const { return component().has(GRAFT_CAP_STEP); }
  std::uint64_t caps() const { return component().caps; }

  // graft.mixer-domain/1; false when the mixer has no such quantity. `params` in param_specs order,
  // `written` as long or empty.
  bool set_natural(const std::string& what, std::span<const double> values,
                   std::span<DLTensor* const> params, std::span<std::uint8_t> written);
  // graft.mixer-migrate/1; false when the mixer cannot read parameters of `old_schema`.
  bool migrate(std::uint32_t old_schema, const std::map<std::string, const DLTensor*>& old_params,
               std::span<DLTensor* const> params);

  // The plugin's own handle, for graft_init_args.
  graft_mixer* get() const { return handle_; }

 private:
  void read_param_specs();
  MixerShapes shapes() const;

  OwnedLayerInfo layer_;
  graft_mixer* handle_;
  graft_mixer_vtbl table_;
  std::deque<graft_param_spec> specs_;
  std::vector<const graft_param_spec*> spec_pointers_;
  std::deque<graft_tensor_spec> plan_specs_;
  std::vector<const graft_tensor_spec*> plan_pointers_[3];
};

class Initializer : public Instance {
 public:
  Initializer(std::shared_ptr<const PluginLibrary> library, const Component& component,
              ResolvedOptions options, graft_initializer* handle);
  ~Initializer();

  std::span<const graft_role_need> needs() const { return {table_.needs, table_.n_needs}; }
  std::span<const graft_calibration_need> calibration() const {
    return {table_.calibration, table_.n_calibration};
  }
  void run(const graft_exec& exec, const graft_init_args& args) const;

 private:
  graft_initializer* handle_;
  graft_initializer_vtbl table_;
};

class Objective : public Instance {
 public:
  Objective(std::shared_ptr<const PluginLibrary> library, const Component& component,
            ResolvedOptions options, graft_objective* handle);
  ~Objective();

  std::span<const graft_signal_need> needs() const { return {table_.needs, table_.n_needs}; }
  std::uint64_t workspace(const graft_objective_args& args) const;  // bytes
  void run(const graft_exec& exec, const graft_objective_args& args) const;

 private:
  graft_objective* handle_;
  graft_objective_vtbl table_;
};

}  // namespace graft
