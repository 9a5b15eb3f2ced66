#include "core/train/checkpoint_store.h"

#include <ATen/Functions.h>

#include "core/base/file.h"
#include "core/base/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
namespace fs = std::filesystem;
using Steps = std::vector<std::int64_t>;

class CheckpointStoreTest : public testing::Test {
 protected:
  CheckpointStore store(std::int64_t keep) { return {folder_ / "checkpoints", keep}; }
  // As earlier runs with other ideas of how many to keep may have left them.
  void write(const Steps& steps) {
    for (const std::int64_t step : steps) write(store(9), step);
  }
  static void write(CheckpointStore store, std::int64_t step, std::int64_t best = -1) {
    TrainCheckpoint checkpoint;
    checkpoint.step = step;
    checkpoint.state = {{"step", step}};
    checkpoint.weights["w"] = at::full({3}, static_cast<double>(step));
    store.write(checkpoint, best);
  }
  void damage(std::int64_t step) {
    write_file_atomically(store(9).folder_of(step) / "weights.safetensors", std::string_view("?"));
  }
  std::int64_t load(std::int64_t keep) {
    said_.clear();
    const auto found =
        store(keep).load_last([this](const std::string& message) { said_.push_back(message); });
    return found ? found->step : -1;
  }

  TempFolder folder_;
  std::vector<std::string> said_;
};

TEST_F(CheckpointStoreTest, ADamagedOneIsSetAsideAndPushesNoneOut) {
  write({35, 60});
  damage(60);
  EXPECT_EQ(load(1), 35);
  EXPECT_THAT(said_, Contains(AllOf(HasSubstr("step 60"), HasSubstr("damaged"),
                                    HasSubstr("of step 35, is tried"))));
  EXPECT_THAT(said_,
              Contains(AllOf(HasSubstr("step 60 is set aside"), HasSubstr("step-60.damaged"))));
  write(store(1), 36);
  EXPECT_EQ(store(1).steps(), Steps{36});
  EXPECT_EQ(load(1), 36);
  EXPECT_TRUE(said_.empty());
  // A second one of that step takes the first one's place.
  write({60});
  damage(60);
  EXPECT_EQ(load(1), 36);
  EXPECT_TRUE(fs::exists(folder_ / "checkpoints/step-60.damaged"));
}

TEST_F(CheckpointStoreTest, TwoDamagedOnesLeaveTheUsableOnes) {
  write({30, 35, 60, 70});
  damage(60);
  damage(70);
  EXPECT_EQ(load(2), 35);
  write(store(2), 36);
  EXPECT_EQ(store(2).steps(), (Steps{35, 36}));
  EXPECT_EQ(load(2), 36);
}

// Where they could not be renamed, say.
TEST_F(CheckpointStoreTest, TheOneJustWrittenStays) {
  for (const std::int64_t keep : {1, 2}) {
    write({60, 70});
    write(store(keep), 36);
    EXPECT_THAT(store(keep).steps(), Contains(36)) << keep;
  }
}

TEST_F(CheckpointStoreTest, WhenNoneIsWholeAllStayWhereTheyAre) {
  write({1, 2});
  damage(1);
  damage(2);
  EXPECT_GRAFT_ERROR(load(2), ErrorKind::input,
                     AllOf(HasSubstr("no checkpoint"), HasSubstr("step-1"), HasSubstr("step-2")));
  EXPECT_EQ(store(2).steps(), (Steps{1, 2}));
}

TEST_F(CheckpointStoreTest, TheBestStays) {
  for (const std::int64_t step : {1, 2, 3, 4}) write(store(1), step, 2);
  EXPECT_EQ(store(1).steps(), (Steps{2, 4}));
}

}  // namespace
}  // namespace graft
