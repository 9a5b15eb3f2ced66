#include "core/abi/component.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "core/abi/full_copy.h"
#include "core/abi/library.h"
#include "core/abi/plugin_call.h"
#include "core/abi/strict.h"
#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

constexpr std::int32_t kMostAxes = 6;

bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// ---- what stands in a table where the plugin has nothing

graft_status unimplemented(graft_error* error, const char* call) {
  if (error != nullptr) {
    error->code = GRAFT_UNIMPLEMENTED;
    std::strncpy(error->message, call, sizeof error->message - 1);
  }
  return GRAFT_UNIMPLEMENTED;
}

graft_status no_backward(graft_mixer*, const graft_exec*, const graft_mixer_backward*,
                         graft_error* error) {
  return unimplemented(error, "this mixer has no backward (GRAFT_CAP_BACKWARD)");
}

graft_status no_step(graft_mixer*, const graft_exec*, const graft_mixer_forward*,
                     graft_error* error) {
  return unimplemented(error, "this mixer has no step (GRAFT_CAP_STEP)");
}

graft_status no_workspace(graft_objective*, const graft_objective_args*, std::uint64_t* bytes,
                          graft_error*) {
  *bytes = 0;
  return GRAFT_OK;
}

template <class Handle>
const void* no_extension(Handle*, const char*) {
  return nullptr;
}

// ---- tables as we use them: no gap left

template <class Function>
void require_function(Function* function, const std::string& label, const char* name) {
  if (function == nullptr) {
    fail(ErrorKind::plugin, label + ": its table has no function " + name);
  }
}

void require_promised(bool promised, bool present, const std::string& label, const char* cap,
                      const char* name) {
  if (promised && !present) {
    fail(ErrorKind::plugin, label + " promises " + cap + ", but its table has no function " + name);
  }
}

graft_mixer_vtbl usable(graft_mixer_vtbl table, const Component& component) {
  const std::string label = component.label();
  require_function(table.param_specs, label, "param_specs");
  require_function(table.plan, label, "plan");
  require_function(table.forward, label, "forward");
  const bool backward = component.has(GRAFT_CAP_BACKWARD), step = component.has(GRAFT_CAP_STEP);
  require_promised(backward, table.backward != nullptr, label, "GRAFT_CAP_BACKWARD", "backward");
  require_promised(step, table.step != nullptr, label, "GRAFT_CAP_STEP", "step");
  // A function behind a capability that is not promised is not to be relied on.
  if (!backward) table.backward = &no_backward;
  if (!step) table.step = &no_step;
  if (table.get_extension == nullptr) table.get_extension = &no_extension<graft_mixer>;
  return table;
}

template <class Need>
void require_needs(const Need* needs, std::uint32_t count, const std::string& label,
                   const char* what) {
  if (count > 0 && needs == nullptr) {
    fail(ErrorKind::plugin,
         label + " declares " + std::to_string(count) + " " + what + ", but their list is NULL");
  }
}

graft_initializer_vtbl usable(graft_initializer_vtbl table, const Component& component) {
  const std::string label = component.label();
  require_function(table.run, label, "run");
  require_needs(table.needs, table.n_needs, label, "role needs");
  require_needs(table.calibration, table.n_calibration, label, "calibration needs");
  for (std::uint32_t i = 0; i < table.n_needs; ++i) {
    if (table.needs[i].role == nullptr) fail(ErrorKind::plugin, label + " needs a role of no name");
  }
  for (std::uint32_t i = 0; i < table.n_calibration; ++i) {
    if (table.calibration[i].name == nullptr) {
      fail(ErrorKind::plugin, label + " needs a calibration signal of no name");
    }
  }
  if (table.get_extension == nullptr) table.get_extension = &no_extension<graft_initializer>;
  return table;
}

graft_objective_vtbl usable(graft_objective_vtbl table, const Component& component) {
  const std::string label = component.label();
  require_function(table.run, label, "run");
  require_needs(table.needs, table.n_needs, label, "signals");
  for (std::uint32_t i = 0; i < table.n_needs; ++i) {
    if (table.needs[i].name == nullptr)
      fail(ErrorKind::plugin, label + " needs a signal of no name");
  }
  if (table.workspace == nullptr) table.workspace = &no_workspace;
  if (table.get_extension == nullptr) table.get_extension = &no_extension<graft_objective>;
  return table;
}

// The table of a fresh instance. What a failed check leaves is destroyed here, as the instance does
// not exist yet.
template <class Table, class Handle>
Table usable_table(Handle* handle, const Component& component) {
  const std::string label = component.label();
  if (handle == nullptr)
    fail(ErrorKind::plugin, label + ": create() succeeded but made no instance");
  if (handle->v == nullptr) fail(ErrorKind::plugin, label + ": its instance has no function table");
  const Table table = full_copy(handle->v);
  require_function(table.destroy, label, "destroy");
  try {
    return usable(table, component);
  } catch (...) {
    table.destroy(handle);
    throw;
  }
}

std::size_t label_count(std::string_view axes) {
  return axes.empty() ? 0 : 1 + static_cast<std::size_t>(std::count(axes.begin(), axes.end(), ','));
}

void check_shape(std::int32_t ndim, const std::int64_t (&shape)[kMostAxes], const char* axes,
                 const std::string& what) {
  if (ndim < 0 || ndim > kMostAxes) {
    fail(ErrorKind::plugin, what + " has " + std::to_string(ndim) + " axes; 0 to 6 are possible");
  }
  for (std::int32_t i = 0; i < ndim; ++i) {
    if (shape[i] < 0) {
      fail(ErrorKind::plugin,
           what + " has the size " + std::to_string(shape[i]) + " on axis " + std::to_string(i));
    }
  }
  if (*axes != '\0' && label_count(axes) != static_cast<std::size_t>(ndim)) {
    fail(ErrorKind::plugin,
         what + " has " + std::to_string(ndim) + " axes, but labels '" + printable(axes) + "'");
  }
}

graft_param_spec checked_spec(const graft_param_spec* given, const std::string& label,
                              std::uint32_t index) {
  if (given == nullptr || text_or_empty(full_copy(given).name)[0] == '\0') {
    fail(ErrorKind::plugin, label + ": parameter " + std::to_string(index) + " has no name");
  }
  graft_param_spec spec = full_copy(given);
  spec.role = text_or_empty(spec.role);
  spec.axes = text_or_empty(spec.axes);
  spec.domain = text_or_empty(spec.domain);
  spec.doc = text_or_empty(spec.doc);
  check_shape(spec.ndim, spec.shape, spec.axes, label + ", parameter " + quoted(spec.name));
  if (spec.init < GRAFT_INIT_ZEROS || spec.init > GRAFT_INIT_EYE) {
    fail(ErrorKind::plugin, label + ", parameter " + quoted(spec.name) +
                                " asks for initialisation kind " + std::to_string(spec.init) +
                                ", which this host does not know");
  }
  return spec;
}

graft_tensor_spec checked_spec(const graft_tensor_spec* given, const std::string& what,
                               std::uint32_t index) {
  const std::string number = what + " " + std::to_string(index);
  if (given == nullptr) fail(ErrorKind::plugin, number + " is NULL");
  graft_tensor_spec spec = full_copy(given);
  spec.name = text_or_empty(spec.name);
  spec.axes = text_or_empty(spec.axes);
  spec.doc = text_or_empty(spec.doc);
  if (*spec.name == '\0') fail(ErrorKind::plugin, number + " has no name");
  check_shape(spec.ndim, spec.shape, spec.axes, what + " " + quoted(spec.name));
  return spec;
}

}  // namespace

const char* name_of(ComponentKind kind) {
  switch (kind) {
    case ComponentKind::mixer:
      return "mixer";
    case ComponentKind::initializer:
      return "initializer";
    default:
      return "objective";
  }
}

bool Component::supports(DLDataType dtype, DLDeviceType device) const {
  const auto same = [&](DLDataType other) { return same_dtype(dtype, other); };
  return std::any_of(dtypes.begin(), dtypes.end(), same) &&
         std::find(devices.begin(), devices.end(), device) != devices.end();
}

std::string Component::label() const { return std::string(name_of(kind)) + " " + quoted(alias); }

// ---------------------------------------------------------------- instance

Instance::Instance(std::shared_ptr<const PluginLibrary> library, const Component& component,
                   ResolvedOptions options)
    : library_(std::move(library)), component_(&component), options_(std::move(options)) {}

Instance::~Instance() = default;

std::string Instance::who(const char* call) const {
  return "plugin " + quoted(library_->id()) + " (" + component().label() + "), " + call;
}

// ---------------------------------------------------------------- mixer

Mixer::Mixer(std::shared_ptr<const PluginLibrary> library, const Component& component,
             ResolvedOptions options, OwnedLayerInfo layer, graft_mixer* handle)
    : Instance(std::move(library), component, std::move(options)),
      layer_(std::move(layer)),
      handle_(handle),
      table_(usable_table<graft_mixer_vtbl>(handle, component)) {
  try {
    read_param_specs();
  } catch (...) {
    table_.destroy(handle_);
    throw;
  }
}

Mixer::~Mixer() {
  OneAtATime::log_if_busy(handle_, who("destroy"));
  table_.destroy(handle_);
}

std::unique_ptr<Mixer> Mixer::another() const {
  return library_->create_mixer(component(), layer_.c_info(), options().values());
}

void Mixer::read_param_specs() {
  const std::string label = component().label();
  const graft_param_spec* const* specs = nullptr;
  std::uint32_t count = 0;
  call_plugin(label + ", param_specs", [&](graft_error* error) {
    return table_.param_specs(handle_, &specs, &count, error);
  });
  if (count > 0 && specs == nullptr) {
    fail(ErrorKind::plugin, label + ", param_specs: gave " + std::to_string(count) +
                                " parameters, but their list is NULL");
  }
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto& spec = specs_.emplace_back(checked_spec(specs[i], label, i));
    if (!names.insert(spec.name).second) {
      fail(ErrorKind::plugin, label + ": two parameters have the name " + quoted(spec.name));
    }
    spec_pointers_.push_back(&spec);
  }
}

graft_plan_out Mixer::plan(const graft_plan_in& in) {
  const std::string what = component().label() + ", plan";
  const OneAtATime alone(handle_, who("plan"));
  graft_plan_out given{};
  given.struct_size = sizeof given;
  call_plugin(what, [&](graft_error* error) { return table_.plan(handle_, &in, &given, error); });

  graft_plan_out out = full_copy(&given);
  plan_specs_.clear();
  const auto take = [&](const graft_tensor_spec* const*& specs, std::uint32_t count,
                        std::vector<const graft_tensor_spec*>& pointers, const char* kind) {
    if (count > 0 && specs == nullptr) {
      fail(ErrorKind::plugin, what + ": gave " + std::to_string(count) + " " + kind +
                                  " tensors, but their list is NULL");
    }
    pointers.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
      const auto spec = checked_spec(specs[i], what + ", " + kind, i);
      pointers.push_back(&plan_specs_.emplace_back(spec));
    }
    specs = pointers.data();
  };
  take(out.saved, out.n_saved, plan_pointers_[0], "saved");
  take(out.state, out.n_state, plan_pointers_[1], "state");
  take(out.taps, out.n_taps, plan_pointers_[2], "tap");
  return out;
}

MixerShapes Mixer::shapes() const {
  return {caps(), spec_pointers_, plan_pointers_[0], plan_pointers_[1], plan_pointers_[2]};
}

void Mixer::forward(const graft_exec& exec, const graft_mixer_forward& args) {
  const OneAtATime alone(handle_, who("forward"));
  const auto call = [&](const graft_exec& own, const graft_mixer_forward& seen) {
    call_plugin(component().label() + ", forward",
                [&](graft_error* error) { return table_.forward(handle_, &own, &seen, error); });
  };
  strict_mode() ? strict_forward(who("forward"), shapes(), exec, args, call) : call(exec, args);
}

void Mixer::backward(const graft_exec& exec, const graft_mixer_backward& args) {
  const OneAtATime alone(handle_, who("backward"));
  const auto call = [&](const graft_exec& own, const graft_mixer_backward& seen) {
    call_plugin(component().label() + ", backward",
                [&](graft_error* error) { return table_.backward(handle_, &own, &seen, error); });
  };
  strict_mode() ? strict_backward(who("backward"), shapes(), exec, args, call) : call(exec, args);
}

void Mixer::step(const graft_exec& exec, const graft_mixer_forward& args) {
  const OneAtATime alone(handle_, who("step"));
  const auto call = [&](const graft_exec& own, const graft_mixer_forward& seen) {
    call_plugin(component().label() + ", step",
                [&](graft_error* error) { return table_.step(handle_, &own, &seen, error); });
  };
  strict_mode() ? strict_forward(who("step"), shapes(), exec, args, call) : call(exec, args);
}

bool Mixer::set_natural(const std::string& what, std::span<const double> values,
                        std::span<DLTensor* const> params, std::span<std::uint8_t> written) {
  const std::string call = component().label() + ", setting '" + what + "'";
  const OneAtATime alone(handle_, who("graft.mixer-domain"));
  if (params.size() != spec_pointers_.size() ||
      (!written.empty() && written.size() != params.size())) {
    fail(ErrorKind::internal, call + ": not as many tensors as the mixer has parameters");
  }
  const void* found = nullptr;
  call_plugin_silent(call, [&] { found = table_.get_extension(handle_, GRAFT_EXT_MIXER_DOMAIN); });
  const auto domain = full_copy(static_cast<const graft_mixer_domain*>(found));
  if (domain.set == nullptr) return false;
  graft_status status = GRAFT_OK;
  const auto set = [&](std::span<DLTensor* const> seen) {
    status = call_plugin(
        call,
        [&](graft_error* error) {
          return domain.set(handle_, what.c_str(), static_cast<std::uint32_t>(values.size()),
                            values.data(), seen.data(), written.empty() ? nullptr : written.data(),
                            error);
        },
        GRAFT_UNIMPLEMENTED);
  };
  strict_mode() ? strict_params(who("graft.mixer-domain"), spec_pointers_, params, set)
                : set(params);
  return status == GRAFT_OK;
}

bool Mixer::migrate(std::uint32_t old_schema,
                    const std::map<std::string, const DLTensor*>& old_params,
                    std::span<DLTensor* const> params) {
  const std::string call =
      component().label() + ", reading parameters of schema " + std::to_string(old_schema);
  const OneAtATime alone(handle_, who("graft.mixer-migrate"));
  if (params.size() != spec_pointers_.size()) {
    fail(ErrorKind::internal, call + ": not as many tensors as the mixer has parameters");
  }
  const void* found = nullptr;
  call_plugin_silent(call, [&] { found = table_.get_extension(handle_, GRAFT_EXT_MIXER_MIGRATE); });
  const auto migration = full_copy(static_cast<const graft_mixer_migrate*>(found));
  if (migration.migrate == nullptr) return false;
  std::vector<const char*> names;
  std::vector<const DLTensor*> tensors;
  for (const auto& [name, tensor] : old_params) {
    names.push_back(name.c_str());
    tensors.push_back(tensor);
  }
  graft_status status = GRAFT_OK;
  const auto migrate_into = [&](std::span<DLTensor* const> seen) {
    status = call_plugin(
        call,
        [&](graft_error* error) {
          return migration.migrate(handle_, old_schema, static_cast<std::uint32_t>(names.size()),
                                   names.data(), tensors.data(), seen.data(), error);
        },
        GRAFT_UNIMPLEMENTED);
  };
  strict_mode() ? strict_params(who("graft.mixer-migrate"), spec_pointers_, params, migrate_into)
                : migrate_into(params);
  return status == GRAFT_OK;
}

// ---------------------------------------------------------------- initializer, objective

Initializer::Initializer(std::shared_ptr<const PluginLibrary> library, const Component& component,
                         ResolvedOptions options, graft_initializer* handle)
    : Instance(std::move(library), component, std::move(options)),
      handle_(handle),
      table_(usable_table<graft_initializer_vtbl>(handle, component)) {}

Initializer::~Initializer() {
  OneAtATime::log_if_busy(handle_, who("destroy"));
  table_.destroy(handle_);
}

void Initializer::run(const graft_exec& exec, const graft_init_args& args) const {
  const OneAtATime alone(handle_, who("run"));
  const auto call = [&](const graft_exec& own, const graft_init_args& seen) {
    call_plugin(component().label() + ", run",
                [&](graft_error* error) { return table_.run(handle_, &own, &seen, error); });
  };
  strict_mode() ? strict_initializer(who("run"), exec, args, call) : call(exec, args);
}

Objective::Objective(std::shared_ptr<const PluginLibrary> library, const Component& component,
                     ResolvedOptions options, graft_objective* handle)
    : Instance(std::move(library), component, std::move(options)),
      handle_(handle),
      table_(usable_table<graft_objective_vtbl>(handle, component)) {}

Objective::~Objective() {
  OneAtATime::log_if_busy(handle_, who("destroy"));
  table_.destroy(handle_);
}

std::uint64_t Objective::workspace(const graft_objective_args& args) const {
  const std::string what = component().label() + ", workspace";
  const OneAtATime alone(handle_, who("workspace"));
  std::uint64_t bytes = 0;
  call_plugin(what,
              [&](graft_error* error) { return table_.workspace(handle_, &args, &bytes, error); });
  return bytes;
}

void Objective::run(const graft_exec& exec, const graft_objective_args& args) const {
  const OneAtATime alone(handle_, who("run"));
  const auto call = [&](const graft_exec& own, const graft_objective_args& seen) {
    call_plugin(component().label() + ", run",
                [&](graft_error* error) { return table_.run(handle_, &own, &seen, error); });
  };
  strict_mode() ? strict_objective(who("run"), needs(), exec, args, call) : call(exec, args);
}

}  // namespace graft
