#include "core/checkpoint/safetensors.h"

#include <bit>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/checkpoint/safetensors_header.h"

namespace graft {

static_assert(std::endian::native == std::endian::little,
              "the format's bytes are used as they are");

namespace {

constexpr std::size_t kLengthBytes = 8;

// Other things that get saved under the name of a safetensors file, told by their first bytes.
std::string lookalike(std::string_view text) {
  const std::vector<std::pair<std::string_view, const char*>> known = {
      {"version https://git-lfs", "it is a Git LFS pointer, not the weights: run git lfs pull"},
      {"PK\x03\x04", "it is a PyTorch archive (torch.save); save it again as safetensors"},
      {"\x80\x02", "it is a Python pickle; save it again as safetensors"},
      {"GGUF", "it is a GGUF file; convert it to safetensors"},
      {"<", "it is a web page or XML, not the weights: download the file itself"}};
  for (const auto& [start, meaning] : known) {
    if (text.starts_with(start)) return meaning;
  }
  return "";
}

// Checks the framing and returns the header's text.
std::string_view header_text(const MappedFile& file) {
  const std::string where = quoted_path(file.path()) + ": ";
  const std::size_t size = file.bytes().size();
  if (size < kLengthBytes) {
    fail(ErrorKind::input, where + "not a safetensors file: " + std::to_string(size) +
                               " bytes, expected at least 8 for the header's length");
  }
  std::uint64_t length = 0;
  std::memcpy(&length, file.bytes().data(), kLengthBytes);
  const bool too_long = length > kMaxHeaderBytes;
  if (!too_long && length <= size - kLengthBytes) return file.text().substr(kLengthBytes, length);
  if (const std::string other = lookalike(file.text()); !other.empty()) {
    fail(ErrorKind::input, where + "not a safetensors file: " + other);
  }
  if (too_long) {
    fail(ErrorKind::input, where + "not a safetensors file: a header of " + std::to_string(length) +
                               " bytes, the format allows " + std::to_string(kMaxHeaderBytes));
  }
  fail(ErrorKind::input, where + "the header takes " + std::to_string(length) +
                             " bytes, but the file has " + std::to_string(size - kLengthBytes) +
                             " after its length; it is truncated or no safetensors file");
}

}  // namespace

std::int64_t element_count(const TensorView& tensor) {
  std::int64_t count = 1;
  for (const std::int64_t size : tensor.shape) count *= size;
  return count;
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile out;
  out.file_ = std::make_shared<const MappedFile>(path);
  const std::string_view text = header_text(*out.file_);
  const std::span<const std::byte> data = out.file_->bytes().subspan(kLengthBytes + text.size());
  SafetensorsHeader header = parse_safetensors_header(text, data.size(), quoted_path(path));
  out.metadata_ = std::move(header.metadata);
  out.tensors_.reserve(header.tensors.size());
  for (HeaderTensor& tensor : header.tensors) {
    out.index_.emplace(tensor.name, out.tensors_.size());
    out.tensors_.push_back({std::move(tensor.name), tensor.dtype, std::move(tensor.shape),
                            data.data() + tensor.begin, tensor.end - tensor.begin, out.file_});
  }
  return out;
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const TensorView& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const TensorView& SafetensorsFile::at(std::string_view name) const {
  if (const TensorView* tensor = find(name)) return *tensor;
  fail(ErrorKind::input,
       quoted_path(path()) + ": no tensor " + quoted(name) + did_you_mean(name, names()));
}

}  // namespace graft
