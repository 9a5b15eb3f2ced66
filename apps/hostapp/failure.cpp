#include "apps/hostapp/failure.h"

namespace graft {

std::string describe_failure(const std::string& what) {
  // LibTorch puts a stack trace below the first line.
  const std::string line = what.substr(0, what.find('\n'));
  // Sizes whose product is no number of bytes are memory that nobody has, too.
  for (const char* const sign :
       {"can't allocate memory", "not enough memory", "out of memory",
        "Storage size calculation overflowed", "numel: integer multiplication overflow"}) {
    if (line.find(sign) != std::string::npos)
      return "out of memory (" + line +
             "): shorter windows, smaller batches or smaller sizes of the mixer need less";
  }
  return "unexpected: " + line;
}

}  // namespace graft
