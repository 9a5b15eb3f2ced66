// One instance of a component of any kind, as far as its making and its end go.
#pragma once

#include <span>

#include "kit/context.h"

namespace graft::conformance {

class Instance {
 public:
  // Mixers for the small layer. outcome() says whether there is one.
  Instance(const Library& library, const Component& component, const graft_config* config);
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  const Outcome& outcome() const { return outcome_; }
  bool extensible() const;  // has a get_extension
  const void* extension(const char* id) const;

 private:
  const Component& component_;
  Outcome outcome_;
  graft_mixer* mixer_ = nullptr;
  graft_initializer* initializer_ = nullptr;
  graft_objective* objective_ = nullptr;
};

// A context for one component, in a test of the library.
Context context_of(const Context& library, const Component& component);

// The options of a component as a list.
std::span<const graft_option* const> schema_of(const graft_desc& desc);

}  // namespace graft::conformance
