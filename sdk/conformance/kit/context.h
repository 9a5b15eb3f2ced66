// What a test is given.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "graft/conformance/conformance.hpp"
#include "kit/library.h"
#include "kit/verdict.h"

namespace graft::conformance {

struct Context {
  const Library& library;
  const Component* component;  // NULL for a test of the library
  const Settings& settings;
  Options options;  // what the settings say of this component
  std::uint64_t seed;
  double tolerance = 1;  // factor on the test's own
  std::vector<std::string> notes;

  const graft_desc& desc() const { return *component->desc; }
  bool has(std::uint64_t cap) const { return component->has(cap); }
  // A figure worth reading, shown with -v and in JSON.
  template <class... Parts>
  void note(const Parts&... parts) {
    notes.push_back(sdk::cat(parts...));
  }
};

// The tests of each file in tests/, put together by kit/catalog.cpp.
std::vector<Test> library_tests();
std::vector<Test> schema_tests();
std::vector<Test> params_tests();
std::vector<Test> forward_tests();
std::vector<Test> causality_tests();
std::vector<Test> recurrence_tests();
std::vector<Test> state_tests();
std::vector<Test> invariance_tests();
std::vector<Test> padding_tests();
std::vector<Test> varlen_tests();
std::vector<Test> taps_tests();
std::vector<Test> gradient_tests();
std::vector<Test> dtype_tests();
std::vector<Test> error_tests();
std::vector<Test> determinism_tests();
std::vector<Test> concurrency_tests();
std::vector<Test> resource_tests();
std::vector<Test> fuzz_tests();
std::vector<Test> initializer_tests();
std::vector<Test> objective_tests();
std::vector<Test> matrix_tests();

}  // namespace graft::conformance
