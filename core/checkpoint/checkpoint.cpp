#include "core/checkpoint/checkpoint.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "core/base/json.h"
#include "core/base/suggest.h"

namespace graft {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfig = "config.json";
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::size_t kMaxIndexBytes = 100'000'000;

// Dangling links count as there: opening them then names where they lead.
bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

// The names in a folder, sorted.
std::vector<std::string> listing(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    names.push_back(at->path().filename().string());
  }
  if (error) {
    fail(ErrorKind::input,
         "cannot read the folder " + quoted_path(folder) + ": " + error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

template <class Predicate>
std::string first_that(const std::vector<std::string>& names, Predicate predicate) {
  const auto found = std::find_if(names.begin(), names.end(), predicate);
  return found == names.end() ? "" : *found;
}

std::string first_ending(const std::vector<std::string>& names, std::string_view ending) {
  return first_that(names, [&](const std::string& name) { return name.ends_with(ending); });
}

// "model-00002-of-00005.safetensors"
bool is_shard_name(std::string_view name) {
  return name.starts_with("model-") && name.ends_with(".safetensors") &&
         name.find("-of-") != name.npos;
}

std::string found_text(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 8;
  std::string text = "found ";
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + printable(names[i], 80);
  }
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

[[noreturn]] void fail_no_folder(const fs::path& folder) {
  std::string message = "no folder " + quoted_path(folder);
  const std::string text = folder.generic_string();
  const bool hub_name = std::count(text.begin(), text.end(), '/') == 1 && text.front() != '/' &&
                        text.front() != '.' && text.back() != '/';
  const fs::path parent = folder.has_parent_path() ? folder.parent_path() : fs::path(".");
  std::error_code ignored;
  if (fs::is_directory(parent, ignored)) {
    if (const auto near = nearest(folder.filename().string(), listing(parent))) {
      fail(ErrorKind::input, message + " (did you mean " + quoted_path(parent / *near) + "?)");
    }
  } else if (hub_name) {
    message += "; if it is a model's name on the Hugging Face Hub, download it and give its folder";
  }
  fail(ErrorKind::input, message);
}

// What to do about weights of another kind, or "".
std::string other_weights_advice(const std::vector<std::string>& names) {
  const std::string shard = first_that(names, is_shard_name);
  if (!shard.empty()) {
    return "; " + quoted(shard) + " is a shard, but " + kIndex +
           ", which names the shards, is missing: download it too";
  }
  if (first_ending(names, "adapter_model.safetensors") != "") {
    return "; it holds a LoRA adapter: merge it into its base model and save that";
  }
  if (const std::string other = first_ending(names, ".safetensors"); !other.empty()) {
    return "; if " + quoted(other) + " holds the whole model, rename it to " + kWeights;
  }
  const auto is_pickle = [](const std::string& name) {
    return name.ends_with(".bin") || name.ends_with(".bin.index.json") || name.ends_with(".pt") ||
           name.ends_with(".pth");
  };
  if (const std::string pickle = first_that(names, is_pickle); !pickle.empty()) {
    return "; " + quoted(pickle) +
           " is a Python pickle, which is not read: load it with transformers and "
           "save_pretrained(folder, safe_serialization=True)";
  }
  if (const std::string gguf = first_ending(names, ".gguf"); !gguf.empty()) {
    return "; " + quoted(gguf) +
           " is a GGUF file, which is not read: load it with transformers' "
           "from_pretrained(folder, gguf_file=...) and save_pretrained(folder)";
  }
  return "";
}

// Where the model may be instead, when `folder` only leads to it, or "".
std::string elsewhere_advice(const fs::path& folder, const std::vector<std::string>& names) {
  // The Hub's cache keeps its downloads one level deeper.
  const bool cache = is_there(folder / "snapshots");
  const fs::path place = cache ? folder / "snapshots" : folder;
  std::error_code ignored;
  for (const std::string& name : cache ? listing(place) : names) {
    if (fs::is_regular_file(place / name / kConfig, ignored)) {
      return "; did you mean " + quoted_path(place / name) + "?";
    }
  }
  return "";
}

// ---- The index of a sharded checkpoint

// tensor -> file name
std::map<std::string, std::string> read_weight_map(const fs::path& index_path) {
  const std::string where = quoted_path(index_path) + ": ";
  const nlohmann::json index = read_json(index_path, kMaxIndexBytes);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    fail(ErrorKind::input, where + "expected an object with a weight_map of tensor to file");
  }
  std::map<std::string, std::string> map;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!file.is_string()) {
      fail(ErrorKind::input, where + "tensor " + quoted(tensor) + " is in " + file.type_name() +
                                 ", expected a file's name");
    }
    map.emplace(tensor, file.get<std::string>());
  }
  if (map.empty()) fail(ErrorKind::input, where + "the weight_map is empty");
  return map;
}

// An index is data from elsewhere: it may only name files beside it.
void check_shard_name(const std::string& name, const std::string& tensor, const fs::path& index) {
  const bool plain = !name.empty() && name != "." && name != ".." &&
                     name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
  if (!plain) {
    fail(ErrorKind::input, quoted_path(index) + ": tensor " + quoted(tensor) + " is in " +
                               quoted(name) + ", expected the name of a file in the same folder");
  }
}

void check_shards_exist(const fs::path& folder, const std::map<std::string, std::string>& map,
                        const fs::path& index) {
  std::map<std::string, std::size_t> tensors_in;
  for (const auto& [tensor, file] : map) {
    check_shard_name(file, tensor, index);
    ++tensors_in[file];
  }
  std::string missing;
  for (const auto& [file, count] : tensors_in) {
    if (is_there(folder / file)) continue;
    missing += (missing.empty() ? "" : ", ") + quoted(file) + " (" + std::to_string(count) +
               (count == 1 ? " tensor)" : " tensors)");
  }
  if (missing.empty()) return;
  fail(ErrorKind::input, quoted_path(folder) + ": missing " + missing + " of " +
                             std::to_string(tensors_in.size()) + " shards that " + kIndex +
                             " names: download again what is missing");
}

// Every tensor of the shards stands in the index, under the shard it is in.
void check_tensors_are_indexed(const std::vector<SafetensorsFile>& files,
                               const std::map<std::string, std::string>& map,
                               const fs::path& index) {
  for (const SafetensorsFile& file : files) {
    const std::string shard = file.path().filename().string();
    for (const TensorView& tensor : file.tensors()) {
      const auto entry = map.find(tensor.name);
      const std::string where = quoted_path(file.path()) + ": tensor " + quoted(tensor.name);
      if (entry == map.end()) {
        fail(ErrorKind::input,
             where + " is not in " + quoted_path(index) + "; the index belongs to other files");
      }
      if (entry->second != shard) {
        fail(ErrorKind::input, where + " is in " + quoted(entry->second) + " by " +
                                   quoted_path(index) + "; the index belongs to other files");
      }
    }
  }
}

void warn_of_unused(const fs::path& folder, const std::set<std::string>& used) {
  for (const std::string& name : listing(folder)) {
    if (is_shard_name(name) && !used.contains(name)) {
      spdlog::warn("{}: {} is not read: {} does not name it", quoted_path(folder), quoted(name),
                   used.contains(kWeights) ? kWeights : kIndex);
    }
  }
}

}  // namespace

void check_model_folder(const fs::path& folder) {
  std::error_code ignored;
  const fs::file_status status = fs::status(folder, ignored);
  if (folder.empty() || !fs::exists(status)) fail_no_folder(folder);
  if (!fs::is_directory(status)) {
    fail(ErrorKind::input, quoted_path(folder) + " is a file; give the model folder that holds it");
  }
  const std::vector<std::string> names = listing(folder);
  const std::string looked_for = std::string(kConfig) + ", and " + kWeights + " or " + kIndex;
  const std::string refused = quoted_path(folder) + " is not a Hugging Face model folder: ";
  if (names.empty()) {
    fail(ErrorKind::input, refused + "it is empty; looked for " + looked_for);
  }
  const bool config = is_there(folder / kConfig);
  const bool weights = is_there(folder / kWeights) || is_there(folder / kIndex);
  if (config && weights) return;
  const std::string lacks = config ? "no weights" : weights ? "no config.json" : "no model files";
  std::string advice = weights ? "" : other_weights_advice(names);
  if (!config && advice.empty()) advice = elsewhere_advice(folder, names);
  fail(ErrorKind::input,
       refused + lacks + "; looked for " + looked_for + "; " + found_text(names) + advice);
}

Checkpoint Checkpoint::open(const fs::path& folder) {
  check_model_folder(folder);
  Checkpoint out;
  out.folder_ = folder;
  if (is_there(folder / kWeights)) {
    out.open_single();
  } else {
    out.open_shards();
  }
  for (std::size_t i = 0; i < out.files_.size(); ++i) {
    for (const TensorView& tensor : out.files_[i].tensors()) out.file_index_[tensor.name] = i;
  }
  return out;
}

void Checkpoint::open_single() {
  files_.push_back(SafetensorsFile::open(folder_ / kWeights));
  warn_of_unused(folder_, {kWeights});
}

void Checkpoint::open_shards() {
  const fs::path index = folder_ / kIndex;
  const std::map<std::string, std::string> map = read_weight_map(index);
  check_shards_exist(folder_, map, index);
  std::set<std::string> shards;
  for (const auto& [tensor, file] : map) shards.insert(file);
  std::map<std::string, std::size_t> position;
  for (const std::string& shard : shards) {
    position[shard] = files_.size();
    files_.push_back(SafetensorsFile::open(folder_ / shard));
  }
  for (const auto& [tensor, shard] : map) {
    const SafetensorsFile& file = files_[position[shard]];
    if (file.find(tensor) == nullptr) {
      fail(ErrorKind::input, quoted_path(file.path()) + ": no tensor " + quoted(tensor) +
                                 ", which " + quoted_path(index) + " says is there");
    }
  }
  check_tensors_are_indexed(files_, map, index);
  warn_of_unused(folder_, shards);
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(file_index_.size());
  for (const auto& [name, file] : file_index_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

const TensorView* Checkpoint::find(std::string_view name) const {
  const auto found = file_index_.find(std::string(name));
  return found == file_index_.end() ? nullptr : files_[found->second].find(name);
}

const TensorView& Checkpoint::at(std::string_view name) const {
  if (const TensorView* tensor = find(name)) return *tensor;
  fail(ErrorKind::input,
       quoted_path(folder_) + ": no tensor " + quoted(name) + did_you_mean(name, names()));
}

const fs::path& Checkpoint::file_of(std::string_view name) const {
  at(name);
  return files_[file_index_.find(std::string(name))->second].path();
}

}  // namespace graft
