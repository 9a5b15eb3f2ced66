// GRAFT_CAP_VARLEN is reserved: no host of ABI 1.0 packs sequences.
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

void unclaimed(Context& context) {
  if (context.has(GRAFT_CAP_VARLEN)) fail("claims GRAFT_CAP_VARLEN, which ABI 1.0 reserves");
}

}  // namespace

std::vector<Test> varlen_tests() {
  return {{"varlen.unclaimed", Kind::mixer, "The capability that this ABI reserves is not claimed.",
           unclaimed}};
}

}  // namespace graft::conformance
