#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> matrix_tests() { return {}; }

}  // namespace graft::conformance
