#pragma once

#include <ATen/core/Tensor.h>

#include <sstream>
#include <string>

namespace graft {

// For messages: "[2, 3]", or "nothing" for an undefined tensor.
inline std::string shape_of(const at::Tensor& t) {
  if (!t.defined()) return "nothing";
  std::ostringstream text;
  text << t.sizes();
  return text.str();
}

}  // namespace graft
