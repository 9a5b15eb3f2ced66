#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint/safetensors.h"

namespace graft {

// The format's limit on the header's length.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

// What a safetensors header says, before anything of it is believed.
struct HeaderTensor {
  std::string name;
  DType dtype = DType::F32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // data_offsets, from the end of the header
};

struct SafetensorsHeader {
  std::vector<HeaderTensor> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// Null for a name the format does not know.
const DType* find_dtype(std::string_view name);

// Product of shape times the element's size; nothing when a dimension is negative or 63 bits cannot
// count it.
std::optional<std::uint64_t> byte_count(DType dtype, std::span<const std::int64_t> shape);

// Parses and checks a header, whose tensors must fill `data_bytes` exactly: no hole, no overlap.
// Throws Error(input) that starts with `source`. Memory stays within a small multiple of the text.
SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                           const std::string& source);

}  // namespace graft
