// The conformance kit: what a plugin must do to be a good one, as tests anybody can run on it.
//
//   graft::conformance::Settings settings;
//   settings.plugin = "build/plugins/mymixer.so";
//   for (const Subject& subject : subjects_of(settings)) {
//     for (const Test& test : tests_for(subject)) {
//       const Result result = run_in_child(test, subject, settings);
//     }
//   }
//
// graft-validate is this from the command line, conformance_gtest.hpp from GoogleTest. Neither
// needs LibTorch or the host. A test runs in a process of its own: a crash, a hang or a stray exit
// is a result of that test.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graft/graft.h"

namespace graft::conformance {

enum class Kind : std::uint8_t { library, mixer, initializer, objective };
const char* name_of(Kind kind);

// What is tested: a library, or one of its components.
struct Subject {
  Kind kind = Kind::library;
  std::string id;     // the component's, or the library's
  std::string alias;  // "" for a library
};

// How one run goes. The defaults are those of graft-validate.
struct Settings {
  std::filesystem::path plugin;
  std::uint64_t seed = 1;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  // of one test
  int jobs = 1;                                                  // tests at once

  // Options of a component by alias or id, over their defaults: {"gdn": {"rope": "true"}}. Text as
  // in TOML.
  std::map<std::string, std::map<std::string, std::string>> options;
  // Plugins that the matrix of initializers and mixers brings together with this one.
  std::vector<std::filesystem::path> partners;
  // Tests that are not run, "<alias>:<test id>" or "<test id>", each with its reason.
  std::map<std::string, std::string> skips;
  // Factors on a test's tolerance, by the same names, each with its reason; reported.
  struct Loosened {
    double factor = 1;
    std::string reason;
  };
  std::map<std::string, Loosened> tolerances;

  // Reads graft-validate.toml over what is here. Throws std::runtime_error naming file, line and
  // key.
  void read(const std::filesystem::path& file);
};

struct Context;  // what a test gets; kit/context.h

struct Test {
  const char* id;           // "<group>.<name>", stable: "causality.outputs"
  Kind kind;                // of the subjects it is for
  const char* description;  // one sentence: what holds of a good plugin
  void (*run)(Context&);
};

enum class Verdict : std::uint8_t { pass, fail, skip };
const char* name_of(Verdict verdict);

struct Result {
  Verdict verdict = Verdict::fail;
  std::string detail;              // why it failed or was skipped
  std::vector<std::string> notes;  // figures worth reading, a pass's too
  double seconds = 0;
};

// Every test of the kit, group by group.
const std::vector<Test>& all_tests();
std::vector<Test> tests_for(const Subject& subject);

// The library and its components. Opens the plugin in a child process; std::runtime_error says why
// it cannot be.
std::vector<Subject> subjects_of(const Settings& settings);

Result run_in_child(const Test& test, const Subject& subject, const Settings& settings);
// In this process: for a debugger. A crash is a crash.
Result run_here(const Test& test, const Subject& subject, const Settings& settings);

// "2 mixers, abi 1.0"-like facts for a report's head line.
inline constexpr std::string_view kKitVersion = "1.0";

}  // namespace graft::conformance
