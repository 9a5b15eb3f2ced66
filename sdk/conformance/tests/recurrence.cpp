#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> recurrence_tests() { return {}; }

}  // namespace graft::conformance
