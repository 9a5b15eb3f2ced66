#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> library_tests() { return {}; }

}  // namespace graft::conformance
