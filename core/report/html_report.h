#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "core/report/run_metrics.h"

namespace graft {

// A run as one page: curves, per-layer alignment before and after, gates per head, perplexity and
// agreement against tokens, samples, and what the run was made of. Needs no network and no script.
// `record` is run.json's content; what it lacks is left out.
std::string html_report(const std::string& title, const RunMetrics& metrics,
                        const nlohmann::json& record);

// Reads RUN/metrics.jsonl and RUN/run.json and writes RUN/report.html and RUN/events/
// (TensorBoard). Throws Error(input) when RUN is no run's folder.
void write_report(const std::filesystem::path& run);

}  // namespace graft
