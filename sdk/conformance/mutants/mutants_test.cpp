// The kit can fail: each mutant is caught by the test that is meant for it, and the healthy plugin
// that it is made from passes that test, and all others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "graft/conformance/conformance.hpp"

namespace graft::conformance {
namespace {

struct Mutant {
  Kind kind;
  const char* name;
  const char* test;
  const char* what;
};
constexpr Mutant kMutants[] = {
#define MUTANT(kind, name, test, what) {Kind::kind, #name, test, what},
#include "mutants.def"
#undef MUTANT
};

// How GoogleTest and ctest name it.
void PrintTo(const Mutant& mutant, std::ostream* out) { *out << mutant.name; }

// What is not meant to end is waited for no longer than this.
constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(5);

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::filesystem::path plugin_file(const std::string& name) {
  return std::filesystem::path(GRAFT_MUTANTS_DIR) / (name + ".so");
}

// The plugin that mutants of a kind are made from.
std::filesystem::path healthy(Kind kind) {
  return plugin_file(kind == Kind::library ? "healthy_mixer"
                                           : std::string("healthy_") + name_of(kind));
}

Settings settings_for(const std::filesystem::path& plugin) {
  Settings settings;
  settings.plugin = plugin;
  for (const Kind kind : {Kind::mixer, Kind::objective, Kind::initializer}) {
    if (healthy(kind) != plugin) settings.partners.push_back(healthy(kind));
  }
  return settings;
}

// By id and kind: one id may stand for a test of each kind.
const Test* find_test(const Mutant& mutant) {
  const auto found = std::ranges::find_if(all_tests(), [&](const Test& test) {
    return test.kind == mutant.kind && test.id == std::string(mutant.test);
  });
  return found == all_tests().end() ? nullptr : &*found;
}

// The healthy plugin's, which its mutants have too.
const Subject& subject_of(Kind kind) {
  static std::map<Kind, Subject> known;
  if (known.empty()) {
    for (const Kind of : {Kind::mixer, Kind::objective, Kind::initializer}) {
      for (const Subject& subject : subjects_of(settings_for(healthy(of))))
        known.emplace(subject.kind, subject);
    }
  }
  return known.at(kind);
}

// ---------------------------------------------------------------- the table

// Shown at the end, as far as this process has run it.
class Table : public testing::Environment {
 public:
  static void add(const Mutant& mutant, const Result& result) {
    std::string detail = result.verdict == Verdict::fail ? result.detail : "NOT CAUGHT";
    std::ranges::replace(detail, '\n', ' ');
    rows().push_back({lower(mutant.name), mutant.what, mutant.test, detail});
  }
  void TearDown() override {
    if (rows().empty()) return;
    std::printf("\n| mutant | what is wrong | caught by | which says |\n|---|---|---|---|\n");
    for (const auto& row : rows()) {
      for (const std::string& cell : row) std::printf("| %s ", cell.c_str());
      std::printf("|\n");
    }
    std::printf("\n");
  }

 private:
  static std::vector<std::vector<std::string>>& rows() {
    static std::vector<std::vector<std::string>> all;
    return all;
  }
};
[[maybe_unused]] const auto* const kTable = testing::AddGlobalTestEnvironment(new Table);

// ---------------------------------------------------------------- the tests

class MutantTest : public testing::TestWithParam<Mutant> {};

TEST_P(MutantTest, IsCaught) {
  const Mutant& mutant = GetParam();
  const conformance::Test* const test = find_test(mutant);
  ASSERT_NE(test, nullptr) << "the kit has no test " << mutant.test << " of a "
                           << name_of(mutant.kind);
  Settings settings = settings_for(plugin_file(lower(mutant.name)));
  if (mutant.name == std::string("HANGS")) settings.timeout = kPatience;
  const Result result = run_in_child(*test, subject_of(mutant.kind), settings);
  Table::add(mutant, result);
  EXPECT_EQ(result.verdict, Verdict::fail)
      << "a plugin that " << mutant.what << " passes " << test->id << " " << result.detail;
  EXPECT_FALSE(result.detail.empty());
  const Result base =
      run_in_child(*test, subject_of(mutant.kind), settings_for(healthy(mutant.kind)));
  EXPECT_EQ(base.verdict, Verdict::pass) << "the healthy plugin: " << base.detail;
}

INSTANTIATE_TEST_SUITE_P(Each, MutantTest, testing::ValuesIn(kMutants),
                         [](const auto& info) { return lower(info.param.name); });

class HealthyTest : public testing::TestWithParam<Kind> {};

TEST_P(HealthyTest, PassesTheWholeKit) {
  const Settings settings = settings_for(healthy(GetParam()));
  for (const Subject& subject : subjects_of(settings)) {
    for (const conformance::Test& test : tests_for(subject)) {
      const Result result = run_in_child(test, subject, settings);
      EXPECT_NE(result.verdict, Verdict::fail) << test.id << ": " << result.detail;
      if (result.verdict == Verdict::skip) {
        EXPECT_FALSE(result.detail.empty()) << test.id << " is skipped without a reason";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Each, HealthyTest,
                         testing::Values(Kind::mixer, Kind::objective, Kind::initializer),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace graft::conformance
