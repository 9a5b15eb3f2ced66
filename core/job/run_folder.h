#pragma once

#include <filesystem>
#include <string>

namespace graft {

// The folder of a training run, held by one process at a time:
//
//   config.toml  run.json  metrics.jsonl  samples.json  checkpoints/step-N/  student/
//   report.html  events/
class RunFolder {
 public:
  enum class Start { fresh, resume, replace };

  // fresh: the folder must be missing or empty. resume: it must be a run's, or missing or empty.
  // replace: a run in it is removed first. Throws Error(usage): something else is in it, another
  // process trains in it, it cannot be written.
  RunFolder(std::filesystem::path folder, Start start);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return folder_; }
  std::filesystem::path config() const { return folder_ / "config.toml"; }
  std::filesystem::path record() const { return folder_ / "run.json"; }
  std::filesystem::path metrics() const { return folder_ / "metrics.jsonl"; }
  std::filesystem::path samples() const { return folder_ / "samples.json"; }
  std::filesystem::path checkpoints() const { return folder_ / "checkpoints"; }
  std::filesystem::path student() const { return folder_ / "student"; }

 private:
  void lock();

  std::filesystem::path folder_;
  int lock_ = -1;
};

}  // namespace graft
