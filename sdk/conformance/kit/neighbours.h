// The components that a plugin's is tried together with: those of its own library, of
// settings.partners, and the kit's stand-in for a mixer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kit/context.h"

namespace graft::conformance {

struct Choice {
  std::string label;                 // "mixer 'gdn'"
  const Library* library = nullptr;  // NULL: the stand-in
  const Component* component = nullptr;
  Options options;
};

class Neighbours {
 public:
  // Opens the partners. Fails naming the one that cannot be opened.
  explicit Neighbours(const Context& context);

  const std::vector<Choice>& mixers() const { return mixers_; }
  const std::vector<Choice>& initializers() const { return initializers_; }

 private:
  void add(const Library& library, const Settings& settings);
  void add_stand_in();

  std::vector<std::unique_ptr<Library>> partners_;
  std::vector<Choice> mixers_, initializers_;
};

// Of one component of `library`.
Choice choice_of(const Library& library, const Component& component, Options options);

}  // namespace graft::conformance
