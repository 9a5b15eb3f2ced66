#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace graft {

// JSON from files that are not trusted. Beyond what the library checks (syntax, UTF-8) these refuse
// duplicate keys, nesting deeper than 100 and NUL bytes. Errors are Error(input) and start with
// `source`, then the line and column.
nlohmann::json parse_json(std::string_view text, const std::string& source);

// parse_json of a file; the source is its path.
nlohmann::json read_json(const std::filesystem::path& path,
                         std::size_t max_bytes = std::size_t{256} << 20);

}  // namespace graft
