#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> gradient_tests() { return {}; }

}  // namespace graft::conformance
