#include "kit/context.h"

namespace graft::conformance {

const std::vector<Test>& all_tests() {
  static const std::vector<Test>& tests = *[] {
    auto* const all = new std::vector<Test>;
    for (const auto& group :
         {library_tests,     schema_tests,   params_tests,     forward_tests,     causality_tests,
          recurrence_tests,  state_tests,    invariance_tests, padding_tests,     varlen_tests,
          taps_tests,        gradient_tests, dtype_tests,      error_tests,       determinism_tests,
          concurrency_tests, resource_tests, fuzz_tests,       initializer_tests, objective_tests,
          matrix_tests}) {
      const std::vector<Test> some = group();
      all->insert(all->end(), some.begin(), some.end());
    }
    return all;
  }();
  return tests;
}

std::vector<Test> tests_for(const Subject& subject) {
  std::vector<Test> out;
  for (const Test& test : all_tests()) {
    if (test.kind == subject.kind) out.push_back(test);
  }
  return out;
}

}  // namespace graft::conformance
