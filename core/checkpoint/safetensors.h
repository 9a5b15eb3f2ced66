#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/file.h"

namespace graft {

// The safetensors format (github.com/huggingface/safetensors): a little-endian u64 header length, a
// JSON header {"name": {"dtype", "shape", "data_offsets": [begin, end)}, ...}, then the tensors'
// bytes, row-major and little-endian, without holes.

enum class DType {
  BOOL,
  U8,
  I8,
  F8_E5M2,
  F8_E4M3,
  I16,
  U16,
  F16,
  BF16,
  I32,
  U32,
  F32,
  F64,
  I64,
  U64
};

// As the format spells it: "BF16".
const char* name(DType dtype);
// Bytes of one element.
std::size_t size_of(DType dtype);

// One tensor in memory it does not own, or that `file` owns.
struct TensorView {
  std::string name;
  DType dtype = DType::F32;
  std::vector<std::int64_t> shape;  // empty for a scalar
  const std::byte* data = nullptr;  // not aligned in general: files may start tensors at any byte
  std::uint64_t bytes = 0;          // product of shape * size_of(dtype)
  std::shared_ptr<const MappedFile> file;  // keeps `data` alive; null for memory of others
};

std::int64_t element_count(const TensorView& tensor);
// "[576, 1536]"; "[]" for a scalar.
std::string shape_text(std::span<const std::int64_t> shape);

// The first NaN or infinity of a tensor.
struct NonFinite {
  std::int64_t flat_index = 0;      // row-major
  std::vector<std::int64_t> index;  // the same, per dimension
  std::string value;                // "nan", "inf" or "-inf"
};

// Scans a floating-point tensor (F64, F32, F16, BF16, F8) at about the speed of memory; nothing for
// other types, which have no such values.
std::optional<NonFinite> find_non_finite(const TensorView& tensor);

// A safetensors file, memory-mapped. Views stay valid for as long as they or the file object live.
class SafetensorsFile {
 public:
  // Checks the whole header against the format before anything is handed out: its length, JSON,
  // keys, types, shapes against offsets, overlaps, holes, and the file's size. Throws Error(input)
  // naming the file, the tensor, what was expected and what was found.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept { return file_->path(); }
  // In the order of their data in the file.
  const std::vector<TensorView>& tensors() const noexcept { return tensors_; }
  std::vector<std::string> names() const;
  // Null when there is none of that name.
  const TensorView* find(std::string_view name) const;
  // Error(input) naming the file, the tensor and the nearest name it has.
  const TensorView& at(std::string_view name) const;
  // The header's __metadata__, empty when it has none.
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::vector<TensorView> tensors_;
  std::unordered_map<std::string, std::size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Writes a file that every reader of the format takes, atomically (see write_file_atomically) and
// without copying the tensors. The order is ours: larger element types first, so that each tensor
// is aligned to its own, then by name; the same tensors give the same bytes. "format": "pt", which
// Hugging Face transformers asks for, is set in `metadata`. Throws Error(internal) for views that
// contradict themselves (bytes against shape, a name twice, reserved or not UTF-8).
void write_safetensors(const std::filesystem::path& path, std::vector<TensorView> tensors,
                       std::map<std::string, std::string> metadata = {});

}  // namespace graft
