#include "validate/report.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

namespace graft::conformance {
namespace {

std::string label_of(const Subject& subject) {
  return std::string(name_of(subject.kind)) + " '" +
         (subject.alias.empty() ? subject.id : subject.alias) + "'";
}

using Counts = std::array<int, 3>;  // by verdict

struct Tally {
  std::string label;
  Counts counts{};
};

std::vector<Tally> tally(const std::vector<Row>& rows) {
  std::vector<Tally> out;
  for (const Row& row : rows) {
    const std::string label = label_of(row.subject);
    auto found =
        std::find_if(out.begin(), out.end(), [&](const Tally& t) { return t.label == label; });
    if (found == out.end()) found = out.insert(out.end(), {label, {}});
    ++found->counts[static_cast<std::size_t>(row.result.verdict)];
  }
  return out;
}

std::string abi_text() {
  return std::to_string(GRAFT_ABI_MAJOR(GRAFT_ABI_CURRENT)) + "." +
         std::to_string(GRAFT_ABI_MINOR(GRAFT_ABI_CURRENT));
}

std::string counts_text(const Counts& counts) {
  return std::to_string(counts[0]) + " pass, " + std::to_string(counts[1]) + " fail, " +
         std::to_string(counts[2]) + " skip";
}

}  // namespace

std::string line_of(const Row& row, const ReportStyle& style) {
  const Result& result = row.result;
  if (style.only_failed && result.verdict != Verdict::fail) return "";
  std::ostringstream out;
  out << name_of(result.verdict) << "  " << label_of(row.subject) << "  " << row.test.id << "  "
      << row.test.description;
  if (style.verbose) out << "  (" << std::fixed << std::setprecision(2) << result.seconds << " s)";
  out << "\n";
  if (result.verdict != Verdict::pass) out << "      " << result.detail << "\n";
  const bool show_notes = style.verbose || result.verdict == Verdict::fail;
  for (const std::string& note : result.notes) {
    if (show_notes) out << "      - " << note << "\n";
  }
  return out.str();
}

std::string summary_of(const std::vector<Row>& rows, const Settings& settings) {
  const std::vector<Tally> tallies = tally(rows);
  std::size_t width = 0;
  for (const Tally& t : tallies) width = std::max(width, t.label.size());
  std::ostringstream out;
  Counts all{};
  out << "\n"
      << std::left << std::setw(static_cast<int>(width)) << ""
      << "  pass  fail  skip\n";
  for (const Tally& t : tallies) {
    out << std::left << std::setw(static_cast<int>(width)) << t.label << std::right;
    for (std::size_t i = 0; i < 3; ++i) {
      out << std::setw(6) << t.counts[i];
      all[i] += t.counts[i];
    }
    out << "\n";
  }
  for (const auto& [test, loosened] : settings.tolerances) {
    out << "tolerance of " << test << " x " << loosened.factor << ": " << loosened.reason << "\n";
  }
  out << (all[1] == 0 ? "conforms: " : "does not conform: ") << "abi " << abi_text() << ", kit "
      << kKitVersion << ", " << counts_text(all) << ", seed " << settings.seed << "\n";
  return out.str();
}

std::string json_of(const std::vector<Row>& rows, const Settings& settings) {
  nlohmann::ordered_json out;
  out["plugin"] = settings.plugin.string();
  out["abi"] = abi_text();
  out["kit"] = kKitVersion;
  out["seed"] = settings.seed;
  Counts all{};
  out["tests"] = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    ++all[static_cast<std::size_t>(row.result.verdict)];
    out["tests"].push_back({{"kind", name_of(row.subject.kind)},
                            {"id", row.subject.id},
                            {"alias", row.subject.alias},
                            {"test", row.test.id},
                            {"description", row.test.description},
                            {"verdict", name_of(row.result.verdict)},
                            {"detail", row.result.detail},
                            {"notes", row.result.notes},
                            {"seconds", row.result.seconds}});
  }
  out["pass"] = all[0];
  out["fail"] = all[1];
  out["skip"] = all[2];
  return out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace graft::conformance
