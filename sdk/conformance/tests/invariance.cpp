#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> invariance_tests() { return {}; }

}  // namespace graft::conformance
