#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> initializer_tests() { return {}; }

}  // namespace graft::conformance
