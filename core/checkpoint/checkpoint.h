#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/checkpoint/safetensors.h"

namespace graft {

// Throws Error(input) unless `folder` looks like a Hugging Face model folder: config.json, and
// weights as model.safetensors or model.safetensors.index.json. The message says what was looked
// for, what is there instead and what to do. Reads no file's contents.
void check_model_folder(const std::filesystem::path& folder);

// The weights of a Hugging Face model folder: one file, or the shards an index names. When both are
// there the one file is taken, as transformers does. Shards left over are named in a warning.
class Checkpoint {
 public:
  // Opens and checks every file: each tensor of the index is in its shard, each tensor of a shard
  // in the index, and no index leads out of the folder. Throws Error(input) naming file and tensor.
  static Checkpoint open(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const noexcept { return folder_; }
  const std::vector<SafetensorsFile>& files() const noexcept { return files_; }
  // Sorted by name.
  std::vector<std::string> names() const;
  const TensorView* find(std::string_view name) const;
  // Error(input) naming the folder, the tensor and the nearest name there is.
  const TensorView& at(std::string_view name) const;
  // The file that holds a tensor; the same error as at().
  const std::filesystem::path& file_of(std::string_view name) const;

 private:
  void open_single();
  void open_shards();

  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::unordered_map<std::string, std::size_t> file_index_;
};

}  // namespace graft
