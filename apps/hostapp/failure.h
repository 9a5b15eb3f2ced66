#pragma once

#include <string>

namespace graft {

// The message for an exception that nothing has put into words: "out of memory (...)" where that is
// what LibTorch means, "unexpected: ..." otherwise. One line.
std::string describe_failure(const std::string& what);

}  // namespace graft
