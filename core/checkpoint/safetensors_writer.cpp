#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/safetensors_header.h"

namespace graft {
namespace {

using std::filesystem::path;

[[noreturn]] void refuse(const path& file, const std::string& message) {
  fail(ErrorKind::internal, "cannot write " + quoted_path(file) + ": " + message);
}

void check_view(const path& file, const TensorView& tensor) {
  const std::string where = "tensor " + quoted(tensor.name) + ": ";
  if (tensor.name == "__metadata__") refuse(file, where + "the name is the format's own");
  const std::optional<std::uint64_t> bytes = byte_count(tensor.dtype, tensor.shape);
  const std::string form = std::string(name(tensor.dtype)) + " " + shape_text(tensor.shape);
  if (!bytes) refuse(file, where + form + " is not a possible size");
  if (*bytes != tensor.bytes) {
    refuse(file, where + form + " takes " + std::to_string(*bytes) + " bytes, but " +
                     std::to_string(tensor.bytes) + " are given");
  }
  if (tensor.data == nullptr && *bytes != 0) refuse(file, where + "it has no data");
}

void check_views(const path& file, const std::vector<TensorView>& tensors) {
  std::unordered_set<std::string_view> names;
  for (const TensorView& tensor : tensors) {
    check_view(file, tensor);
    if (!names.insert(tensor.name).second) {
      refuse(file, "tensor " + quoted(tensor.name) + " is given twice");
    }
  }
}

std::string json_text(const path& file, const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    refuse(file, quoted(text) + " is not UTF-8");
  }
}

std::string header_text(const path& file, const std::vector<TensorView>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    if (text.back() != '{') text += ',';
    text += json_text(file, key) + ":" + json_text(file, value);
  }
  text += '}';
  std::uint64_t begin = 0;
  for (const TensorView& tensor : tensors) {
    const std::uint64_t end = begin + tensor.bytes;
    std::string shape = shape_text(tensor.shape);
    std::erase(shape, ' ');
    text += "," + json_text(file, tensor.name) + ":{\"dtype\":\"" + name(tensor.dtype) +
            "\",\"shape\":" + shape + ",\"data_offsets\":[" + std::to_string(begin) + "," +
            std::to_string(end) + "]}";
    begin = end;
  }
  text += '}';
  // The data then starts at a multiple of 8, where any of its types is aligned.
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > kMaxHeaderBytes) {
    refuse(file, "a header of " + std::to_string(text.size()) + " bytes, the format allows " +
                     std::to_string(kMaxHeaderBytes));
  }
  return text;
}

}  // namespace

void write_safetensors(const path& file, std::vector<TensorView> tensors,
                       std::map<std::string, std::string> metadata) {
  check_views(file, tensors);
  const auto order = [](const TensorView& t) {
    return std::tuple(-static_cast<int>(size_of(t.dtype)), std::string_view(t.name));
  };
  std::sort(tensors.begin(), tensors.end(),
            [&](const TensorView& a, const TensorView& b) { return order(a) < order(b); });
  metadata["format"] = "pt";
  const std::string header = header_text(file, tensors, metadata);
  write_file_atomically(file, [&](FileWriter& writer) {
    const std::uint64_t length = header.size();
    writer.write(std::as_bytes(std::span(&length, 1)), "the header");
    writer.write(header, "the header");
    for (const TensorView& tensor : tensors) {
      writer.write(std::span(tensor.data, tensor.bytes), "tensor " + quoted(tensor.name));
    }
  });
}

}  // namespace graft
