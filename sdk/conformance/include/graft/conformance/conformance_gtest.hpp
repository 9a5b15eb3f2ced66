// The kit's tests as GoogleTest's, for an author's own suite:
//
//   int main(int argc, char** argv) {
//     testing::InitGoogleTest(&argc, argv);
//     graft::conformance::Settings settings;
//     settings.plugin = MY_PLUGIN_FILE;
//     graft::conformance::register_tests(settings);
//     return RUN_ALL_TESTS();
//   }
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "graft/conformance/conformance.hpp"

namespace graft::conformance {

class ConformanceTest : public ::testing::Test {
 public:
  ConformanceTest(conformance::Test test, Subject subject, Settings settings)
      : test_(test), subject_(std::move(subject)), settings_(std::move(settings)) {}
  void TestBody() override {
    const Result result = run_in_child(test_, subject_, settings_);
    for (const std::string& note : result.notes) std::printf("%s\n", note.c_str());
    if (result.verdict == Verdict::skip) GTEST_SKIP() << result.detail;
    if (result.verdict == Verdict::fail) {
      FAIL() << test_.description << "\n" << result.detail << "\nseed " << settings_.seed;
    }
  }

 private:
  conformance::Test test_;
  Subject subject_;
  Settings settings_;
};

// One suite per component, "mixer.gdn", and in it one test per test of the kit.
inline void register_tests(const Settings& settings) {
  for (const Subject& subject : subjects_of(settings)) {
    const std::string suite = std::string(name_of(subject.kind)) + "." +
                              (subject.alias.empty() ? subject.id : subject.alias);
    for (const conformance::Test& test : tests_for(subject)) {
      ::testing::RegisterTest(
          suite.c_str(), test.id, nullptr, nullptr, __FILE__, __LINE__,
          [=]() -> ConformanceTest* { return new ConformanceTest(test, subject, settings); });
    }
  }
}

}  // namespace graft::conformance
