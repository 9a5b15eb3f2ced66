// The names a plugin may use: the well-known ones of graft.h, and its own under a reverse DNS.
#pragma once

#include <string>

namespace graft::conformance {

// What is wrong with the name of a role or a signal; "" when nothing is. NULL is allowed as an
// argument, and wrong.
std::string role_problem(const char* role);
std::string calibration_signal_problem(const char* signal);
std::string objective_signal_problem(const char* signal);

}  // namespace graft::conformance
