#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> concurrency_tests() { return {}; }

}  // namespace graft::conformance
