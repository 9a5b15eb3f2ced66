#include "core/train/checkpoint_store.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <system_error>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/hash.h"
#include "core/base/json.h"
#include "core/checkpoint/safetensors.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormat = 1;
constexpr const char* kPrefix = "step-";
constexpr const char* kWeights = "weights.safetensors";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kState = "state.json";
constexpr const char* kManifest = "manifest.json";

// The step in a folder's name, -1 for any other name.
std::int64_t step_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return -1;
  const std::string digits = name.substr(std::strlen(kPrefix));
  std::int64_t step = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  return error == std::errc() && end == digits.data() + digits.size() && step >= 0 ? step : -1;
}

DType dtype_of(at::ScalarType type) {
  if (type == at::kFloat) return DType::F32;
  if (type == at::kDouble) return DType::F64;
  fail(ErrorKind::internal, std::string("a checkpoint holds no tensor of type ") + toString(type));
}

void write_tensors(const fs::path& path, const TensorsByName& tensors) {
  std::vector<at::Tensor> kept;
  std::vector<TensorView> views;
  for (const auto& [name, tensor] : tensors) {
    kept.push_back(tensor.detach().contiguous());
    views.push_back({name, dtype_of(tensor.scalar_type()), tensor.sizes().vec(),
                     static_cast<const std::byte*>(kept.back().const_data_ptr()),
                     static_cast<std::uint64_t>(kept.back().nbytes()), nullptr});
  }
  write_safetensors(path, std::move(views));
}

TensorsByName read_tensors(const fs::path& path) {
  TensorsByName tensors;
  const SafetensorsFile file = SafetensorsFile::open(path);
  for (const TensorView& view : file.tensors()) {
    if (view.dtype != DType::F32 && view.dtype != DType::F64)
      fail(ErrorKind::input, path.string() + ": tensor '" + view.name + "' is " + name(view.dtype) +
                                 "; checkpoints hold F32 and F64");
    at::Tensor value = at::empty(view.shape, view.dtype == DType::F32 ? at::kFloat : at::kDouble);
    if (view.bytes > 0) std::memcpy(value.mutable_data_ptr(), view.data, view.bytes);
    tensors[view.name] = std::move(value);
  }
  return tensors;
}

void check_manifest(const fs::path& folder) {
  const fs::path path = folder / kManifest;
  if (!fs::exists(path))
    fail(ErrorKind::input, folder.string() + ": there is no " + kManifest +
                               ": it is half a "
                               "checkpoint");
  const json manifest = read_json(path);
  try {
    if (manifest.at("format") != kFormat)
      fail(ErrorKind::input, path.string() + ": format is " + manifest.at("format").dump() +
                                 "; this program reads format " + std::to_string(kFormat));
    for (const char* name : {kWeights, kOptimizer, kState}) {
      const auto expected = manifest.at("files").at(name).at("sha256").get<std::string>();
      const std::string found = sha256_hex_of_file(folder / name);
      if (found != expected)
        fail(ErrorKind::input, (folder / name).string() + ": the file is damaged: its sha256 is " +
                                   found + ", " + kManifest + " says " + expected);
    }
  } catch (const json::exception& error) {
    fail(ErrorKind::input, path.string() + ": not a manifest as graft writes it: " + error.what());
  }
}

}  // namespace

TrainCheckpoint read_checkpoint(const fs::path& folder) {
  check_manifest(folder);
  return {step_of(folder.filename().string()), read_json(folder / kState),
          read_tensors(folder / kWeights), read_tensors(folder / kOptimizer), folder};
}

CheckpointStore::CheckpointStore(fs::path folder, std::int64_t keep)
    : folder_(std::move(folder)), keep_(keep) {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error)
    fail(ErrorKind::usage,
         "cannot make the folder " + quoted_path(folder_) + ": " + error.message());
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kPrefix) && name.find(".partial-") != std::string::npos)
      fs::remove_all(entry.path(), error);
  }
}

fs::path CheckpointStore::folder_of(std::int64_t step) const {
  return folder_ / (kPrefix + std::to_string(step));
}

std::vector<std::int64_t> CheckpointStore::steps() const {
  std::vector<std::int64_t> steps;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    const std::int64_t step = step_of(entry.path().filename().string());
    if (step >= 0 && entry.is_directory()) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void CheckpointStore::write(const TrainCheckpoint& checkpoint, std::int64_t best_step) {
  AtomicDirectory out(folder_of(checkpoint.step), /*replace_existing=*/true);
  write_tensors(out.path() / kWeights, checkpoint.weights);
  write_tensors(out.path() / kOptimizer, checkpoint.optimizer);
  write_file_atomically(out.path() / kState, checkpoint.state.dump(2) + "\n");
  json files;
  for (const char* name : {kWeights, kOptimizer, kState})
    files[name] = {{"sha256", sha256_hex_of_file(out.path() / name)},
                   {"bytes", fs::file_size(out.path() / name)}};
  const json manifest = {{"format", kFormat}, {"step", checkpoint.step}, {"files", files}};
  write_file_atomically(out.path() / kManifest, manifest.dump(2) + "\n");
  out.commit();
  prune(checkpoint.step, best_step);
}

void CheckpointStore::prune(std::int64_t written, std::int64_t best_step) const {
  const std::vector<std::int64_t> all = steps();
  const auto kept = static_cast<std::size_t>(keep_);
  for (std::size_t i = 0; i + kept < all.size(); ++i) {
    if (all[i] == best_step || all[i] == written) continue;
    // Renamed first: a process killed in between leaves no folder that looks like a checkpoint.
    std::error_code error;
    const fs::path doomed = folder_ / (folder_of(all[i]).filename().string() + ".partial-removed");
    fs::rename(folder_of(all[i]), doomed, error);
    if (!error) fs::remove_all(doomed, error);
  }
}

// A folder that cannot be used must not count as one of the last, or it would push usable ones out.
void CheckpointStore::set_aside(std::int64_t step, const Say& say) const {
  const fs::path from = folder_of(step), to = from.string() + ".damaged";
  std::error_code error;
  fs::remove_all(to, error);
  fs::rename(from, to, error);
  say(error ? "the folder " + quoted_path(from) + " cannot be set aside: " + error.message()
            : "the checkpoint of step " + std::to_string(step) + " is set aside as " +
                  quoted_path(to) + "; nothing reads it, remove it at will");
}

std::optional<TrainCheckpoint> CheckpointStore::load_last(const Say& say) const {
  std::vector<std::int64_t> all = steps(), unusable;
  if (all.empty()) return std::nullopt;
  std::string faults;
  for (; !all.empty(); all.pop_back()) {
    try {
      TrainCheckpoint found = read_checkpoint(folder_of(all.back()));
      for (const std::int64_t step : unusable) set_aside(step, say);
      return found;
    } catch (const Error& error) {
      faults += std::string("\n  ") + error.what();
      unusable.push_back(all.back());
      if (all.size() > 1)
        say("the checkpoint of step " + std::to_string(all.back()) +
            " cannot be used: " + error.what() + "; the one before it, of step " +
            std::to_string(all[all.size() - 2]) + ", is tried");
    }
  }
  fail(ErrorKind::input, "no checkpoint in " + quoted_path(folder_) + " can be used:" + faults +
                             "\nremove the folder to start this run anew");
}

}  // namespace graft
