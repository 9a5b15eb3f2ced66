#include "core/teacher/lanes.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace graft {
namespace {

class Lanes : public testing::TestWithParam<int> {
 protected:
  const int before_ = at::get_num_threads();
  Lanes() { at::set_num_threads(GetParam()); }
  ~Lanes() override { at::set_num_threads(before_); }
};

TEST_P(Lanes, EachPieceIsDoneOnceAndNoLaneTwiceAtATime) {
  for (const std::int64_t pieces : {0, 1, 2, 3, 20}) {
    std::vector<std::atomic<int>> done(static_cast<std::size_t>(pieces)), busy(16);
    const std::int64_t most = lanes(pieces);
    in_lanes(pieces, [&](std::int64_t piece, std::int64_t lane) {
      EXPECT_LT(lane, most);
      EXPECT_EQ(busy[static_cast<std::size_t>(lane)]++, 0);
      ++done[static_cast<std::size_t>(piece)];
      --busy[static_cast<std::size_t>(lane)];
    });
    for (const auto& times : done) EXPECT_EQ(times, 1);
  }
  EXPECT_EQ(at::get_num_threads(), GetParam());
}

TEST_P(Lanes, TheCallersModesHold) {
  for (const bool grad : {false, true}) {
    const at::AutoGradMode mode(grad);
    in_lanes(4, [&](std::int64_t, std::int64_t) {
      EXPECT_EQ(at::GradMode::is_enabled(), grad);
      EXPECT_FALSE(c10::InferenceMode::is_enabled());
    });
  }
  const c10::InferenceMode inference;
  in_lanes(4, [](std::int64_t, std::int64_t) { EXPECT_TRUE(c10::InferenceMode::is_enabled()); });
}

TEST_P(Lanes, TheSameBytesWhoeverDoesIt) {
  const at::Tensor a = at::randn({6, 70, 90}), b = at::randn({90, 110});
  const auto run = [&] {
    at::Tensor out = at::empty({6, 70, 110});
    in_lanes(6, [&](std::int64_t i, std::int64_t) { out[i].copy_(at::matmul(a[i], b)); });
    return out;
  };
  EXPECT_TRUE(at::equal(run(), run()));
}

TEST_P(Lanes, TheFirstPiecesErrorIsThrownAndNoFurtherPieceBegun) {
  std::atomic<int> begun = 0;
  try {
    in_lanes(1000, [&](std::int64_t piece, std::int64_t) {
      ++begun;
      if (piece >= 3) throw std::runtime_error("piece " + std::to_string(piece));
    });
    FAIL() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "piece 3");
  }
  EXPECT_LE(begun, 4 + 8);
  EXPECT_EQ(at::get_num_threads(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Threads, Lanes, testing::Values(1, 2, 3, 16));

}  // namespace
}  // namespace graft
