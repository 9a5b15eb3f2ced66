#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> resource_tests() { return {}; }

}  // namespace graft::conformance
