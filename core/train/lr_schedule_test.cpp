#include "core/train/lr_schedule.h"

#include "core/base/testing.h"

namespace graft {
namespace {

TEST(LrSchedule, WarmsUpToOneWithTheLastStepOfIt) {
  for (const char* kind : {"constant", "cosine", "wsd"}) {
    const LrSchedule schedule{kind, 100, 4, 0, 0.1};
    EXPECT_DOUBLE_EQ(schedule.factor(0), 0.25) << kind;
    EXPECT_DOUBLE_EQ(schedule.factor(3), 1.0) << kind;
    EXPECT_DOUBLE_EQ(schedule.factor(4), 1.0) << kind;
  }
}

TEST(LrSchedule, ACosineFallsToItsFloor) {
  const LrSchedule schedule{"cosine", 104, 4, 0, 0.1};
  EXPECT_DOUBLE_EQ(schedule.factor(54), 0.55);
  EXPECT_NEAR(schedule.factor(103), 0.1, 1e-3);
  EXPECT_DOUBLE_EQ(schedule.factor(104), 0.1);
}

TEST(LrSchedule, WsdStaysThenFallsInALine) {
  const LrSchedule given{"wsd", 100, 10, 20, 0};
  EXPECT_DOUBLE_EQ(given.factor(10), 1);
  EXPECT_DOUBLE_EQ(given.factor(80), 1);
  EXPECT_DOUBLE_EQ(given.factor(90), 0.5);
  EXPECT_NEAR(given.factor(99), 0.05, 1e-12);
  const LrSchedule tenth{"wsd", 100, 0, 0, 0.5};
  EXPECT_DOUBLE_EQ(tenth.factor(90), 1);
  EXPECT_DOUBLE_EQ(tenth.factor(95), 0.75);
}

TEST(LrSchedule, AConstantStays) {
  EXPECT_DOUBLE_EQ((LrSchedule{"constant", 10, 0, 0, 0}).factor(9), 1);
}

TEST(LrSchedule, AnUnknownKindIsNamed) {
  EXPECT_GRAFT_ERROR((LrSchedule{"linear", 10, 0, 0, 0}).factor(1), ErrorKind::usage,
                     testing::HasSubstr("'linear'"));
}

}  // namespace
}  // namespace graft
