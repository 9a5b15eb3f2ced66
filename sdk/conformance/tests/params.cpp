#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> params_tests() { return {}; }

}  // namespace graft::conformance
