// graft-validate: the conformance kit on one plugin.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <filesystem>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "graft/conformance/conformance.hpp"
#include "kit/runner.h"
#include "validate/report.h"

namespace {

using namespace graft::conformance;

enum ExitCode { kConforms = 0, kFails = 1, kUsage = 2, kNotOpened = 4 };

struct Arguments {
  Settings settings;
  std::vector<std::string> ids, options;
  std::string include = ".*", exclude = "^$", config;
  double timeout = 0;
  bool json = false, list = false, in_process = false;
  ReportStyle style;
};

void declare(CLI::App& app, Arguments& a) {
  app.add_option("plugin", a.settings.plugin, "The plugin's file")->required();
  app.add_option("--id", a.ids, "Only these components, by id or alias");
  app.add_option("--include", a.include, "Only tests whose id matches this regular expression");
  app.add_option("--exclude", a.exclude, "No test whose id matches");
  app.add_option("--option", a.options,
                 "An option for the component tested: KEY=VALUE, or ALIAS.KEY=VALUE in a pack");
  app.add_option("--partner", a.settings.partners,
                 "A plugin to try this one together with, in the matrix tests");
  app.add_option("--seed", a.settings.seed,
                 "Of everything random; a failure repeats with its seed");
  app.add_option("--timeout", a.timeout, "Seconds for one test (60)");
  app.add_option("--jobs,-j", a.settings.jobs, "Tests side by side")->check(CLI::Range(1, 256));
  app.add_option("--config", a.config,
                 "Settings; graft-validate.toml beside the plugin where there is one");
  app.add_flag("--only-failed", a.style.only_failed, "Show nothing but failures and the summary");
  app.add_flag("--verbose,-v", a.style.verbose, "Show times and figures");
  app.add_flag("--json", a.json, "Print JSON instead of lines");
  app.add_flag("--list", a.list, "Show the tests and what they say, and run none");
  app.add_flag("--in-process", a.in_process,
               "Run the tests here, for a debugger: a crash is a crash");
}

void read_settings(Arguments& a) {
  if (!std::filesystem::is_regular_file(a.settings.plugin)) {
    throw std::runtime_error("'" + a.settings.plugin.string() + "' is no file");
  }
  const std::uint64_t seed = a.settings.seed;
  std::filesystem::path config = a.config;
  if (config.empty()) config = a.settings.plugin.parent_path() / "graft-validate.toml";
  if (!a.config.empty() || std::filesystem::exists(config)) a.settings.read(config);
  if (seed != 1) a.settings.seed = seed;
  if (a.timeout > 0)
    a.settings.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(a.timeout * 1000));
}

// KEY=VALUE belongs to the only component tested; with more than one it is ALIAS.KEY=VALUE.
void take_options(Arguments& a, const std::vector<Subject>& subjects) {
  for (const std::string& option : a.options) {
    const std::size_t equals = option.find('=');
    if (equals == std::string::npos)
      throw std::runtime_error("--option " + option + ": expected KEY=VALUE");
    std::string key = option.substr(0, equals);
    std::string component;
    for (const Subject& subject : subjects) {
      if (subject.kind == Kind::library) continue;
      if (!subject.alias.empty() && key.starts_with(subject.alias + ".")) {
        component = subject.alias;
        key.erase(0, subject.alias.size() + 1);
        break;
      }
      component = component.empty() ? subject.id : "?";
    }
    if (component == "?")
      throw std::runtime_error("--option " + option + ": of which component? Write ALIAS." + key +
                               "=...");
    a.settings.options[component][key] = option.substr(equals + 1);
  }
}

bool chosen(const Subject& subject, const std::vector<std::string>& ids) {
  if (ids.empty()) return true;
  return std::find(ids.begin(), ids.end(), subject.id) != ids.end() ||
         (!subject.alias.empty() && std::find(ids.begin(), ids.end(), subject.alias) != ids.end());
}

std::vector<Subject> choose_subjects(const Arguments& a) {
  const std::vector<Subject> all = subjects_of(a.settings);
  std::vector<Subject> out;
  for (const Subject& subject : all) {
    if (chosen(subject, a.ids)) out.push_back(subject);
  }
  for (const std::string& id : a.ids) {
    if (std::any_of(out.begin(), out.end(), [&](const Subject& s) { return chosen(s, {id}); }))
      continue;
    std::string known;
    for (const Subject& subject : all) known += (known.empty() ? "" : ", ") + subject.id;
    throw std::runtime_error("there is no '" + id + "' in '" + a.settings.plugin.string() +
                             "'; it has " + known);
  }
  return out;
}

std::vector<Row> plan_rows(const Arguments& a, const std::vector<Subject>& subjects) {
  const std::regex include(a.include), exclude(a.exclude);
  std::vector<Row> rows;
  for (const Subject& subject : subjects) {
    for (const Test& test : tests_for(subject)) {
      if (std::regex_search(test.id, include) && !std::regex_search(test.id, exclude))
        rows.push_back({subject, test, {}});
    }
  }
  return rows;
}

// In the order of `rows`, up to `jobs` at once.
void run_all(std::vector<Row>& rows, const Arguments& a) {
  const auto show = [&](const Row& row) {
    if (a.json) return;
    std::fputs(line_of(row, a.style).c_str(), stdout);
    std::fflush(stdout);
  };
  if (a.in_process) {
    for (Row& row : rows) {
      row.result = run_here(row.test, row.subject, a.settings);
      show(row);
    }
    return;
  }
  std::deque<std::unique_ptr<TestRun>> running;
  std::size_t started = 0, shown = 0;
  while (shown < rows.size()) {
    while (started < rows.size() && running.size() < static_cast<std::size_t>(a.settings.jobs)) {
      running.push_back(
          std::make_unique<TestRun>(rows[started].test, rows[started].subject, a.settings));
      ++started;
    }
    // The oldest first: lines come in the order of the tests. The others run on meanwhile.
    while (!running.front()->wait(std::chrono::milliseconds(200))) {
    }
    rows[shown].result = running.front()->result();
    running.pop_front();
    show(rows[shown++]);
  }
}

int validate(Arguments& a) {
  std::vector<Subject> subjects;
  try {
    subjects = choose_subjects(a);
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "graft-validate: %s\n", problem.what());
    return kNotOpened;
  }
  take_options(a, subjects);
  std::vector<Row> rows = plan_rows(a, subjects);
  if (rows.empty()) throw std::runtime_error("no test matches --include " + a.include);
  if (a.list) {
    for (const Row& row : rows) std::printf("%s  %s\n", row.test.id, row.test.description);
    return kConforms;
  }
  run_all(rows, a);
  std::fputs((a.json ? json_of(rows, a.settings) : summary_of(rows, a.settings)).c_str(), stdout);
  return std::any_of(rows.begin(), rows.end(),
                     [](const Row& r) { return r.result.verdict == Verdict::fail; })
             ? kFails
             : kConforms;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Tests whether a graft plugin does what the ABI asks of it.", "graft-validate");
  declare(app, arguments);
  try {
    app.parse(argc, argv);
    read_settings(arguments);
    return validate(arguments);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kConforms : kUsage;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "graft-validate: %s\n", e.what());
    return kUsage;
  }
}
