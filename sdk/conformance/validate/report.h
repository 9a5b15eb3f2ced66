// How results are shown.
#pragma once

#include <string>
#include <vector>

#include "graft/conformance/conformance.hpp"

namespace graft::conformance {

struct Row {
  Subject subject;
  Test test;
  Result result;
};

struct ReportStyle {
  bool only_failed = false;
  bool verbose = false;  // notes and times too
};

// "pass  causality.outputs  A token changes nothing before it."
std::string line_of(const Row& row, const ReportStyle& style);
// One line per component, the skips with their reasons, and "conforms: ..." or "does not conform:
// ...".
std::string summary_of(const std::vector<Row>& rows, const Settings& settings);
std::string json_of(const std::vector<Row>& rows, const Settings& settings);

}  // namespace graft::conformance
