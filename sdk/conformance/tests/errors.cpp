#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> error_tests() { return {}; }

}  // namespace graft::conformance
