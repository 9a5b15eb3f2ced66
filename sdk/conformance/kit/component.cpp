#include "kit/component.h"

#include "kit/mixer.h"

namespace graft::conformance {
namespace {

// Calls `call` on whichever handle there is.
template <class Call>
auto with_handle(graft_mixer* mixer, graft_initializer* initializer, graft_objective* objective,
                 Call&& call) {
  if (mixer != nullptr) return call(mixer);
  if (initializer != nullptr) return call(initializer);
  return call(objective);
}

template <class Factory, class Handle, class... Layer>
Outcome make(const Factory& factory, const char* id, Handle** out, const graft_config* config,
             Layer... layer) {
  const Outcome outcome =
      outcome_of([&](graft_error* e) { return factory.create(id, layer..., config, out, e); });
  if (outcome.ok() && (*out == nullptr || (*out)->v == nullptr))
    fail("create answers OK and gives no instance");
  if (!outcome.ok()) *out = nullptr;
  return outcome;
}

}  // namespace

Instance::Instance(const Library& library, const Component& component, const graft_config* config)
    : component_(component) {
  const char* const id = component.desc->id;
  switch (component.kind) {
    case Kind::mixer:
      outcome_ = make(*library.mixers(), id, &mixer_, config, small_layer().c());
      break;
    case Kind::initializer:
      outcome_ = make(*library.initializers(), id, &initializer_, config);
      break;
    case Kind::objective:
      outcome_ = make(*library.objectives(), id, &objective_, config);
      break;
    case Kind::library:
      throw std::logic_error("Instance: a library is no component");
  }
}

Instance::~Instance() {
  if (!outcome_.ok()) return;
  with_handle(mixer_, initializer_, objective_, [](auto* handle) { handle->v->destroy(handle); });
}

bool Instance::extensible() const {
  return with_handle(mixer_, initializer_, objective_,
                     [](auto* handle) { return handle->v->get_extension != nullptr; });
}

const void* Instance::extension(const char* id) const {
  return with_handle(mixer_, initializer_, objective_,
                     [&](auto* handle) { return handle->v->get_extension(handle, id); });
}

Context context_of(const Context& library, const Component& component) {
  return {library.library,
          &component,
          library.settings,
          options_for(*component.desc, library.settings),
          library.seed,
          library.tolerance,
          {}};
}

std::span<const graft_option* const> schema_of(const graft_desc& desc) {
  return {desc.options, desc.n_options};
}

}  // namespace graft::conformance
