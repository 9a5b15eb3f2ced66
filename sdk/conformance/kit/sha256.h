// SHA-256 (FIPS 180-4), to compare a plugin with its sidecar.
#pragma once

#include <span>
#include <string>

namespace graft::conformance {

// In lower-case hexadecimal digits.
std::string sha256(std::span<const char> bytes);

}  // namespace graft::conformance
