// Comparisons of tensors that end a test.
#pragma once

#include <string_view>

#include "graft/conformance/invariants.hpp"
#include "kit/tensor.h"
#include "kit/verdict.h"

namespace graft::conformance {

// `allowed` relative to the largest element of `expected`.
inline void check_close(const Tensor& got, const Tensor& expected, double allowed,
                        std::string_view what) {
  const std::string problem = not_close(got.values(), expected.values(), allowed);
  if (!problem.empty()) fail(what, ": ", problem);
}

inline void check_equal(const Tensor& got, const Tensor& expected, std::string_view what) {
  if (got.same_bytes(expected)) return;
  const std::string problem = not_close(got.values(), expected.values(), 0);
  fail(what, ": not the same bytes", problem.empty() ? "" : "; ", problem);
}

inline void check_finite(const Tensor& tensor, std::string_view what) {
  if (const auto at = first_not_finite(tensor)) {
    fail(what, ": element ", *at, " of shape ", sdk::shape_string(tensor.shape()), " is ",
         tensor.at(*at));
  }
}

}  // namespace graft::conformance
