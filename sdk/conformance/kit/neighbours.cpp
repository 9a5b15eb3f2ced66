#include "kit/neighbours.h"

#include "kit/stand_in.h"

namespace graft::conformance {

Choice choice_of(const Library& library, const Component& component, Options options) {
  const char* const alias = component.desc->alias;
  const bool unnamed = alias == nullptr || *alias == '\0';
  return {sdk::cat(name_of(component.kind), " '", unnamed ? name_of(*component.desc) : alias, "'"),
          &library, &component, std::move(options)};
}

Neighbours::Neighbours(const Context& context) {
  add_stand_in();
  add(context.library, context.settings);
  for (const auto& file : context.settings.partners) {
    try {
      add(*partners_.emplace_back(std::make_unique<Library>(file)), context.settings);
    } catch (const std::exception& problem) {
      fail("partner '", file.string(), "': ", problem.what());
    }
  }
}

void Neighbours::add(const Library& library, const Settings& settings) {
  for (const Component& listed : library.components()) {
    if (listed.kind != Kind::mixer && listed.kind != Kind::initializer) continue;
    const Component& component = library.find(listed.kind, name_of(*listed.desc));
    auto& list = listed.kind == Kind::mixer ? mixers_ : initializers_;
    list.push_back(choice_of(library, component, options_for(*component.desc, settings)));
  }
}

void Neighbours::add_stand_in() {
  static const Component component{Kind::mixer, stand_in_mixers().descs[0]};
  mixers_.push_back({"the kit's stand-in", nullptr, &component, {}});
  mixers_.push_back({"the kit's stand-in with feature maps", nullptr, &component,
                     Options{{"feature_maps", sdk::Value::of(true)}}});
}

}  // namespace graft::conformance
