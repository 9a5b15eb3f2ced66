#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> schema_tests() { return {}; }

}  // namespace graft::conformance
