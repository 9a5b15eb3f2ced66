#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> padding_tests() { return {}; }

}  // namespace graft::conformance
