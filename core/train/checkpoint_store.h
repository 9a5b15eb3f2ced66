#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/train/parameter_optimizer.h"

namespace graft {

// What a checkpoint holds.
struct TrainCheckpoint {
  std::int64_t step = 0;
  nlohmann::json state;     // state.json: the caller's
  TensorsByName weights;    // weights.safetensors
  TensorsByName optimizer;  // optimizer.safetensors
  std::filesystem::path folder;
};

// The checkpoints of a run, each a folder step-N of
//
//   weights.safetensors  optimizer.safetensors  state.json
//   manifest.json        sha256 and size of each of them
//
// written beside and renamed, so that one is there whole or not at all.
class CheckpointStore {
 public:
  // Makes the folder, and removes what a killed process left half-written in it.
  CheckpointStore(std::filesystem::path folder, std::int64_t keep);

  using Say = std::function<void(const std::string&)>;

  // Writes one (over another of that step), then removes all but the last `keep`, that of
  // `best_step` and the one just written. A disk that is full or read-only is an Error that names
  // the file and leaves the older checkpoints as they are.
  void write(const TrainCheckpoint& checkpoint, std::int64_t best_step);

  // The last one that is whole. Each that is not is said, with what is wrong and which is taken in
  // its place, and renamed to step-N.damaged when an older one is whole. Nothing when there is none
  // at all; Error(input) when none is whole.
  std::optional<TrainCheckpoint> load_last(const Say& say) const;

  std::filesystem::path folder_of(std::int64_t step) const;
  // Steps of all checkpoints, ascending.
  std::vector<std::int64_t> steps() const;

 private:
  void prune(std::int64_t written, std::int64_t best_step) const;
  void set_aside(std::int64_t step, const Say& say) const;

  std::filesystem::path folder_;
  std::int64_t keep_;
};

// Reads and checks one. Throws Error(input) naming file and fault.
TrainCheckpoint read_checkpoint(const std::filesystem::path& folder);

}  // namespace graft
