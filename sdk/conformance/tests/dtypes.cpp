#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> dtype_tests() { return {}; }

}  // namespace graft::conformance
