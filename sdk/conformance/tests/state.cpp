#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> state_tests() { return {}; }

}  // namespace graft::conformance
