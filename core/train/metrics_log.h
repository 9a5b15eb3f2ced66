#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace graft {

// metrics.jsonl: one JSON object a line, each with "stage_index" and "step". Lines are appended as
// they come, so that a reader may follow them; one that cannot be written whole (disk full) is
// taken back and is an Error.
class MetricsLog {
 public:
  explicit MetricsLog(std::filesystem::path path);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  void append(const nlohmann::ordered_json& line);
  // On disk: a checkpoint written after this never knows of steps that the log lost.
  void sync();

 private:
  std::filesystem::path path_;
  int descriptor_;
};

// Drops what a run did behind its checkpoint, the half line of a killed process included: lines of
// later stages, and of this stage behind `step`. No file is no error.
void truncate_metrics(const std::filesystem::path& path, std::int64_t stage, std::int64_t step);

}  // namespace graft
