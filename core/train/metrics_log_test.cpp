#include "core/train/metrics_log.h"

#include <fstream>

#include "core/base/file.h"
#include "core/base/testing.h"

namespace graft {
namespace {

using nlohmann::ordered_json;

ordered_json line(int stage, int step) { return {{"stage_index", stage}, {"step", step}}; }

class MetricsLogTest : public testing::Test {
 protected:
  std::filesystem::path path() const { return folder_ / "metrics.jsonl"; }
  TempFolder folder_;
};

TEST_F(MetricsLogTest, DropsWhatIsBehindTheCheckpoint) {
  {
    MetricsLog log(path());
    for (const auto& [stage, step] :
         std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {0, 2}, {1, 2}, {1, 3}, {1, 4}})
      log.append(line(stage, step));
    log.sync();
  }
  std::ofstream(path(), std::ios::app) << R"({"stage_index":1,"st)";  // killed while writing
  const std::string first = line(0, 0).dump() + "\n" + line(0, 1).dump() + "\n";
  truncate_metrics(path(), 1, 3);
  EXPECT_EQ(read_text(path()),
            first + line(0, 2).dump() + "\n" + line(1, 2).dump() + "\n" + line(1, 3).dump() + "\n");
  // The end of a stage: what the next one did at the same step goes.
  truncate_metrics(path(), 0, 2);
  EXPECT_EQ(read_text(path()), first + line(0, 2).dump() + "\n");
  truncate_metrics(path(), 0, 1);
  MetricsLog(path()).append(line(0, 2));
  EXPECT_EQ(read_text(path()), first + line(0, 2).dump() + "\n");
  truncate_metrics(path(), 0, -1);
  EXPECT_EQ(read_text(path()), "");
}

TEST_F(MetricsLogTest, WithoutAFileThereIsNothingToDrop) {
  truncate_metrics(path(), 0, 0);
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(MetricsLogTest, AFolderThatIsNotThereIsNamed) {
  EXPECT_GRAFT_ERROR(MetricsLog(folder_ / "no/metrics.jsonl"), ErrorKind::usage,
                     testing::HasSubstr("no/metrics.jsonl"));
}

}  // namespace
}  // namespace graft
