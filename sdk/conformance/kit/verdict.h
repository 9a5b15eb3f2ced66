// How a test ends before its last line.
#pragma once

#include <stdexcept>

#include "graft/status.hpp"

namespace graft::conformance {

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Failed(sdk::cat(parts...));
}
template <class... Parts>
[[noreturn]] void skip(const Parts&... parts) {
  throw Skipped(sdk::cat(parts...));
}

}  // namespace graft::conformance
