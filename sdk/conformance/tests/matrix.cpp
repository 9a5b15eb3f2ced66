// Initializers and mixers brought together: each pair works, or is refused before anything was
// read.
#include <algorithm>

#include "kit/checks.h"
#include "kit/initializer.h"

namespace graft::conformance {
namespace {

// "works", or "refused: why".
std::string refused(const std::string& why) { return "refused: " + why; }

std::string run_pair(const Context& context, Initializer& initializer, const Choice& mixer,
                     const InitSetup& setup) {
  InitRig rig(context, mixer, setup);
  if (const std::string why = rig.missing_role(initializer); !why.empty()) return refused(why);
  const InitResult result = rig.run(initializer);
  if (!result.outcome.ok()) {
    if (result.outcome.message.empty())
      fail("is refused without a message (status ", result.outcome.status, ")");
    if (result.batches > 0)
      fail("is refused after ", result.batches, " batches were read: ", result.outcome.text());
    return refused(result.outcome.text());
  }
  for (std::size_t i = 0; i < result.student.size(); ++i)
    check_finite(result.student[i], sdk::cat("parameter ", i));
  rig.forward(result.student);
  return "works";
}

// On a small block and on one with q/k norms. True when one of them works.
bool try_pair(Context& context, const Choice& from, const Choice& mixer, const Choice* source) {
  bool works = false;
  Initializer initializer(*from.library, *from.component, from.options);
  for (const std::size_t i : {0U, 2U}) {
    const Layer& layer = all_layers()[i];
    InitSetup setup;
    setup.layer = &layer;
    setup.seed = context.seed;
    setup.source = source;
    const std::string what =
        sdk::cat(from.label, " on ", mixer.label,
                 source == nullptr ? "" : ", from " + source->label, ", layer '", layer.name, "'");
    std::string end;
    try {
      end = run_pair(context, initializer, mixer, setup);
    } catch (const Skipped& why) {
      end = refused(why.what());
    } catch (const Failed& problem) {
      fail(what, ": ", problem.what());
    }
    context.note(what, ": ", end);
    works = works || end == "works";
  }
  return works;
}

// Mixers that an initializer may start from instead of attention: those with all roles that it
// names, where attention has not all.
std::vector<const Choice*> sources_of(Context& context, const Choice& from,
                                      const Neighbours& neighbours) {
  const Initializer initializer(*from.library, *from.component, from.options);
  std::vector<const Choice*> out;
  const auto named = std::ranges::count_if(initializer.needs(), [](const graft_role_need& need) {
    return (need.flags & GRAFT_NEED_TEACHER) != 0 && (need.flags & GRAFT_NEED_REQUIRED) == 0;
  });
  if (starts_from_attention(initializer, small_layer())) {
    out.push_back(nullptr);
    if (named == 0) return out;
  }
  for (const Choice& choice : neighbours.mixers()) {
    InitSetup setup;
    setup.source = &choice;
    setup.batches = {};
    try {
      if (InitRig(context, choice, setup).has_all_teacher_roles(initializer))
        out.push_back(&choice);
    } catch (const Skipped&) {
      continue;  // it refuses the layer, or has no float32
    }
  }
  return out;
}

void of_initializer(Context& context) {
  const Neighbours neighbours(context);
  const Choice from = choice_of(context.library, *context.component, context.options);
  bool works = false;
  for (const Choice* const source : sources_of(context, from, neighbours)) {
    for (const Choice& mixer : neighbours.mixers())
      works = try_pair(context, from, mixer, source) || works;
  }
  if (!works) skip("is refused on every mixer here; name the plugin of one with --partner");
}

void of_mixer(Context& context) {
  const Neighbours neighbours(context);
  const Choice mixer = choice_of(context.library, *context.component, context.options);
  if (neighbours.initializers().empty())
    skip("there is no initializer to try it with; name plugins with --partner");
  for (const Choice& from : neighbours.initializers()) {
    for (const Choice* const source : sources_of(context, from, neighbours))
      try_pair(context, from, mixer, source);
  }
}

}  // namespace

std::vector<Test> matrix_tests() {
  return {
      {"matrix.pairs", Kind::initializer,
       "Every mixer at hand is filled and runs, or is refused before text was read.",
       of_initializer},
      {"matrix.pairs", Kind::mixer,
       "Every initializer at hand fills it so that it runs, or refuses before text was read.",
       of_mixer},
  };
}

}  // namespace graft::conformance
