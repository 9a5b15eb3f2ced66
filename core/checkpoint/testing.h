#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint/safetensors.h"

// For tests only.

namespace graft {

// The bytes of a safetensors file, right or wrong: the header's length, the header, the data.
inline std::string framed(std::string_view header, std::string_view data = {}) {
  const std::uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes.append(header).append(data);
}

// Makes a file without waiting for the disk, as the library's own writing does.
inline void put_file(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// A view of a vector's elements, which must outlive it.
template <class T>
TensorView view_of(std::string name, DType dtype, std::vector<std::int64_t> shape,
                   const std::vector<T>& values) {
  return {std::move(name),           dtype,
          std::move(shape),          reinterpret_cast<const std::byte*>(values.data()),
          values.size() * sizeof(T), nullptr};
}

// The bytes of a tensor as characters.
inline std::string_view bytes_of(const TensorView& tensor) {
  return {reinterpret_cast<const char*>(tensor.data), tensor.bytes};
}

}  // namespace graft
