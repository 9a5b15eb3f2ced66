#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> determinism_tests() { return {}; }

}  // namespace graft::conformance
