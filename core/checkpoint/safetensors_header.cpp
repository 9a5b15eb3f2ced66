#include "core/checkpoint/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

using nlohmann::json;

// More than NumPy or LibTorch work with; without a limit a header could ask for an array as long as
// itself.
constexpr std::size_t kMaxRank = 64;

struct DTypeRow {
  DType dtype;
  const char* name;
  std::size_t size;
};

constexpr std::array<DTypeRow, 15> kDTypes = {{{DType::BOOL, "BOOL", 1},
                                               {DType::U8, "U8", 1},
                                               {DType::I8, "I8", 1},
                                               {DType::F8_E5M2, "F8_E5M2", 1},
                                               {DType::F8_E4M3, "F8_E4M3", 1},
                                               {DType::I16, "I16", 2},
                                               {DType::U16, "U16", 2},
                                               {DType::F16, "F16", 2},
                                               {DType::BF16, "BF16", 2},
                                               {DType::I32, "I32", 4},
                                               {DType::U32, "U32", 4},
                                               {DType::F32, "F32", 4},
                                               {DType::F64, "F64", 8},
                                               {DType::I64, "I64", 8},
                                               {DType::U64, "U64", 8}}};

const DTypeRow& row_of(DType dtype) { return kDTypes.at(static_cast<std::size_t>(dtype)); }

constexpr bool rows_follow_the_enum() {
  for (std::size_t i = 0; i < kDTypes.size(); ++i) {
    if (static_cast<std::size_t>(kDTypes[i].dtype) != i) return false;
  }
  return true;
}
static_assert(rows_follow_the_enum());

std::string offsets_text(const HeaderTensor& tensor) {
  return "[" + std::to_string(tensor.begin) + ", " + std::to_string(tensor.end) + "]";
}

// Reads the header as a stream of events: nothing is built that the format has no place for, so
// depth and size of hostile JSON cost nothing.
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(const std::string& source) : source_(source) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() override { unexpected("null"); }
  bool boolean(bool value) override { unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override {
    unexpected("the number " + printable(text, 40));
  }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (at_ == At::shape) {
      add_dimension(value);
    } else if (at_ == At::offsets && offsets_seen_ < 2) {
      (offsets_seen_++ == 0 ? tensor_.begin : tensor_.end) = value;
    } else {
      unexpected(std::to_string(value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (at_ == At::metadata) {
      header_.metadata[key_] = std::move(value);
    } else if (at_ == At::tensor && key_ == "dtype") {
      set_dtype(value);
    } else {
      unexpected("the text " + quoted(value));
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (at_ == At::document) {
      at_ = At::root;
    } else if (at_ == At::root && key_ == "__metadata__") {
      at_ = At::metadata;
    } else if (at_ == At::root) {
      at_ = At::tensor;
      tensor_ = HeaderTensor();
      tensor_.name = key_;
      fields_.clear();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    key_ = std::move(value);
    auto& seen = at_ == At::root ? names_ : at_ == At::tensor ? fields_ : metadata_keys_;
    if (!seen.insert(key_).second) {
      fail_here(at_ == At::root && key_ != "__metadata__"
                    ? "tensor " + quoted(key_) + " stands twice in the header"
                    : prefix() + "the key " + quoted(key_) + " stands twice");
    }
    if (at_ == At::tensor && key_ != "dtype" && key_ != "shape" && key_ != "data_offsets") {
      fail_here(prefix() + "unknown key " + quoted(key_) +
                "; expected dtype, shape and data_offsets");
    }
    return true;
  }

  bool end_object() override {
    if (at_ == At::tensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!fields_.contains(field)) fail_here(prefix() + field + " is missing");
      }
      header_.tensors.push_back(std::move(tensor_));
    }
    at_ = at_ == At::root ? At::document : At::root;
    return true;
  }

  bool start_array(std::size_t) override {
    if (at_ == At::tensor && key_ == "shape") {
      at_ = At::shape;
    } else if (at_ == At::tensor && key_ == "data_offsets") {
      at_ = At::offsets;
      offsets_seen_ = 0;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (at_ == At::offsets && offsets_seen_ != 2) {
      fail_here(prefix() + "data_offsets has " + std::to_string(offsets_seen_) +
                " numbers, expected 2");
    }
    at_ = At::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const json::exception& error) override {
    std::string_view what =
        error.what();  // "[json.exception...] parse error at line 1, column 2: "
    for (const std::string_view skipped : {"] ", ": "}) {
      const std::size_t at = what.find(skipped);
      if (at != what.npos) what.remove_prefix(at + skipped.size());
    }
    fail_here("the header is not valid JSON at byte " + std::to_string(position) + ": " +
              printable(what));
  }

 private:
  enum class At { document, root, metadata, tensor, shape, offsets };

  [[noreturn]] void fail_here(const std::string& message) const {
    fail(ErrorKind::input, source_ + ": " + message);
  }

  // Where the reader is, as the beginning of a message.
  std::string prefix() const {
    if (at_ == At::document || at_ == At::root) return "the header: ";
    return at_ == At::metadata ? "__metadata__: " : "tensor " + quoted(tensor_.name) + ": ";
  }

  [[noreturn]] void unexpected(const std::string& found) const {
    switch (at_) {
      case At::document:
        fail_here("the header is " + found + ", expected an object of tensors");
      case At::root:
        if (key_ == "__metadata__") {
          fail_here("__metadata__ is " + found + ", expected an object of texts");
        }
        fail_here("tensor " + quoted(key_) + " is " + found +
                  ", expected an object with dtype, shape and data_offsets");
      case At::metadata:
        fail_here(prefix() + quoted(key_) + " is " + found + ", expected a text");
      case At::tensor:
        fail_here(prefix() + key_ + " is " + found + ", expected " +
                  (key_ == "dtype" ? "a text such as \"F32\"" : "an array of numbers"));
      case At::shape:
        fail_here(prefix() + "shape holds " + found + ", expected whole numbers of 0 and more");
      case At::offsets:
        if (offsets_seen_ == 2) fail_here(prefix() + "data_offsets has more than 2 numbers");
        fail_here(prefix() + "data_offsets holds " + found +
                  ", expected two whole numbers of 0 and more");
    }
    fail_here("the header has " + found + " out of place");
  }

  void add_dimension(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      fail_here(prefix() + "shape holds " + std::to_string(value) + ", more than 63 bits count");
    }
    if (tensor_.shape.size() == kMaxRank) {
      fail_here(prefix() + "shape has more than " + std::to_string(kMaxRank) + " dimensions");
    }
    tensor_.shape.push_back(static_cast<std::int64_t>(value));
  }

  void set_dtype(const std::string& value) {
    const DType* dtype = find_dtype(value);
    if (dtype == nullptr) {
      std::string known;
      for (const DTypeRow& row : kDTypes)
        known += (known.empty() ? "" : ", ") + std::string(row.name);
      fail_here(prefix() + "unknown dtype " + quoted(value) + "; known: " + known);
    }
    tensor_.dtype = *dtype;
  }

  const std::string& source_;
  SafetensorsHeader header_;
  At at_ = At::document;
  std::string key_;
  HeaderTensor tensor_;
  int offsets_seen_ = 0;
  std::unordered_set<std::string> names_, fields_, metadata_keys_;
};

void check_extent(const HeaderTensor& tensor, std::uint64_t data_bytes, const std::string& source) {
  const std::string where = source + ": tensor " + quoted(tensor.name) + ": ";
  const std::string form = std::string(name(tensor.dtype)) + " " + shape_text(tensor.shape);
  const std::optional<std::uint64_t> bytes = byte_count(tensor.dtype, tensor.shape);
  if (!bytes) fail(ErrorKind::input, where + form + " takes more bytes than 63 bits count");
  if (tensor.begin > tensor.end) {
    fail(ErrorKind::input,
         where + "data_offsets " + offsets_text(tensor) + " end before they begin");
  }
  if (*bytes != tensor.end - tensor.begin) {
    fail(ErrorKind::input, where + form + " takes " + std::to_string(*bytes) +
                               " bytes, but data_offsets " + offsets_text(tensor) + " hold " +
                               std::to_string(tensor.end - tensor.begin));
  }
  if (tensor.end > data_bytes) {
    fail(ErrorKind::input, where + "data_offsets " + offsets_text(tensor) +
                               " reach beyond the file, which has " + std::to_string(data_bytes) +
                               " bytes of data; it is truncated: download or copy it again");
  }
}

// The tensors, sorted by offset, must tile the data.
void check_tiling(const std::vector<HeaderTensor>& tensors, std::uint64_t data_bytes,
                  const std::string& source) {
  std::uint64_t reached = 0;
  const HeaderTensor* last = nullptr;
  for (const HeaderTensor& tensor : tensors) {
    const std::string where =
        source + ": tensor " + quoted(tensor.name) + ": data_offsets " + offsets_text(tensor);
    if (tensor.begin < reached) {
      fail(ErrorKind::input,
           where + " overlap " + offsets_text(*last) + " of tensor " + quoted(last->name));
    }
    if (tensor.begin > reached) {
      fail(ErrorKind::input, where + " leave a hole: the bytes from " + std::to_string(reached) +
                                 " on belong to no tensor");
    }
    reached = tensor.end;
    last = &tensor;
  }
  if (reached != data_bytes) {
    const std::string after =
        last ? "after its last tensor " + quoted(last->name) : "but no tensor";
    fail(ErrorKind::input, source + ": has " + std::to_string(data_bytes - reached) +
                               " bytes of data " + after + "; expected a file of " +
                               std::to_string(reached) + " bytes of data, found " +
                               std::to_string(data_bytes));
  }
}

}  // namespace

const char* name(DType dtype) { return row_of(dtype).name; }

std::size_t size_of(DType dtype) { return row_of(dtype).size; }

const DType* find_dtype(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (name == row.name) return &row.dtype;
  }
  return nullptr;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text += "]";
}

std::optional<std::uint64_t> byte_count(DType dtype, std::span<const std::int64_t> shape) {
  auto bytes = static_cast<std::int64_t>(size_of(dtype));
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return static_cast<std::uint64_t>(bytes);
}

SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                           const std::string& source) {
  if (!text.starts_with('{')) {
    fail(ErrorKind::input,
         source + ": the header must start with '{', found " + quoted(text.substr(0, 8)));
  }
  // The JSON library takes NUL for the end of the text and would not look at what follows.
  if (const std::size_t nul = text.find('\0'); nul != text.npos) {
    fail(ErrorKind::input, source + ": the header is not valid JSON at byte " +
                               std::to_string(nul + 1) + ": a NUL byte");
  }
  HeaderReader reader(source);
  json::sax_parse(text.begin(), text.end(), &reader);
  SafetensorsHeader header = reader.take();
  for (const HeaderTensor& tensor : header.tensors) check_extent(tensor, data_bytes, source);
  const auto extent = [](const HeaderTensor& t) { return std::tuple(t.begin, t.end); };
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [&](const auto& a, const auto& b) { return extent(a) < extent(b); });
  check_tiling(header.tensors, data_bytes, source);
  return header;
}

}  // namespace graft
