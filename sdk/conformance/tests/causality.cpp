#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> causality_tests() { return {}; }

}  // namespace graft::conformance
