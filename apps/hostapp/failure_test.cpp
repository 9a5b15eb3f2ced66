#include "apps/hostapp/failure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(Failure, SaysOutOfMemoryWhereLibTorchMeansIt) {
  for (const char* const what :
       {"[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)\nframe #0: x",
        "Storage size calculation overflowed with sizes=[4294967296, 4294967296]\nframe",
        "numel: integer multiplication overflow"}) {
    EXPECT_THAT(describe_failure(what), AllOf(StartsWith("out of memory ("), HasSubstr("need less"),
                                              Not(HasSubstr("\n")), Not(HasSubstr("unexpected"))));
  }
}

TEST(Failure, KeepsTheFirstLineOfAnythingElse) {
  EXPECT_EQ(describe_failure("mat1 and mat2 differ\nframe #0"), "unexpected: mat1 and mat2 differ");
}

}  // namespace
}  // namespace graft
