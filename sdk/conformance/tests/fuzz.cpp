#include "kit/context.h"

namespace graft::conformance {

std::vector<Test> fuzz_tests() { return {}; }

}  // namespace graft::conformance
