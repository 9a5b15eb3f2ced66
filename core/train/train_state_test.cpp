#include "core/train/train_state.h"

#include "core/base/testing.h"

namespace graft {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

TEST(TrainState, ComesBackFromJsonToTheBit) {
  const TrainState state{1, 20, 320, 123456, {77, {40, 37}}, 0.1 + 0.2, 1.0 / 3.0, 300};
  const TrainState again = train_state_from_json(json::parse(to_json(state).dump()), "state.json");
  EXPECT_EQ(to_json(again), to_json(state));
  EXPECT_EQ(again.seconds, state.seconds);
  EXPECT_EQ(again.best, state.best);
  EXPECT_EQ(again.sampler, state.sampler);
  const TrainState unmeasured;
  EXPECT_TRUE(std::isinf(train_state_from_json(to_json(unmeasured), "state.json").best));
}

TEST(TrainState, AMissingKeyIsNamed) {
  json broken = to_json(TrainState());
  broken["sampler"].erase("taken");
  EXPECT_GRAFT_ERROR(train_state_from_json(broken, "run/state.json"), ErrorKind::input,
                     AllOf(HasSubstr("run/state.json"), HasSubstr("taken")));
  EXPECT_GRAFT_ERROR(train_state_from_json(json(), "state.json"), ErrorKind::input,
                     HasSubstr("state.json"));
}

TEST(TrainState, ADifferenceSaysWhatWasAndWhatIs) {
  const json saved = {{"recipe", {{"a.lr", "0.1"}, {"gone", "1"}}}, {"text", {{"corpus 0", "x"}}}};
  const json now = {{"recipe", {{"a.lr", "0.2"}, {"new", "2"}}}, {"text", {{"corpus 0", "x"}}}};
  EXPECT_EQ(difference(saved, saved), "");
  EXPECT_EQ(difference(saved, now),
            "\n  recipe a.lr: was 0.1, is now 0.2\n  recipe gone: is gone, was 1"
            "\n  recipe new: is new: 2");
  EXPECT_THAT(difference(json::object(), now), HasSubstr("text corpus 0: is new: x"));
}

}  // namespace
}  // namespace graft
