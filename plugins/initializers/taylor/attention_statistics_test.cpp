#include "plugins/initializers/taylor/attention_statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace graft::taylor {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

// [heads, tokens, tokens] of one sequence, from a function of (head, t, s).
template <class F>
std::vector<float> probs(int64_t heads, int64_t tokens, F&& f) {
  std::vector<float> p;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t s = 0; s < tokens; ++s) {
        p.push_back(s <= t ? static_cast<float>(f(h, t, s)) : std::nanf(""));
      }
    }
  }
  return p;
}

TEST(AttentionStatistics, AHeadThatLooksAtItself) {
  AttentionStatistics statistics(1);
  statistics.add(probs(1, 12, [](auto, auto t, auto s) { return s == t ? 1 : 0; }), 1, 12);
  EXPECT_THAT(statistics.mean_distance(), ElementsAre(0.5));
  EXPECT_THAT(statistics.entropy(), ElementsAre(0.0));
  EXPECT_THAT(statistics.mean_distance_without_sink(), ElementsAre(0.5));
  EXPECT_THAT(statistics.median_distance_without_sink(), ElementsAre(0.5));
}

TEST(AttentionStatistics, ASinkDoesNotLengthenWhatExcludesIt) {
  // Half of the mass on position 0, half two tokens back: what counts is the two.
  AttentionStatistics statistics(1);
  constexpr int64_t T = 65;
  statistics.add(probs(1, T,
                       [](auto, auto t, auto s) {
                         if (t < 3) return s == t ? 1.0 : 0.0;
                         return (s == 0 ? 0.5 : 0.0) + (s == t - 2 ? 0.5 : 0.0);
                       }),
                 1, T);
  EXPECT_THAT(statistics.mean_distance_without_sink(), ElementsAre(2.0));
  EXPECT_THAT(statistics.median_distance_without_sink(), ElementsAre(2.0));
  // sum_{t=3}^{64} (t / 2 + 1) + 3 * 0.5, over 65 rows
  EXPECT_THAT(statistics.mean_distance(), ElementsAre(DoubleNear((1038.5 + 62 + 1.5) / 65, 1e-9)));
  EXPECT_THAT(statistics.median_distance(), ElementsAre(2.0));
  EXPECT_THAT(statistics.entropy(), ElementsAre(DoubleNear(62 * std::log(2.0) / 65, 1e-9)));
}

TEST(AttentionStatistics, AHeadWithNothingButTheSinkHasNoMedian) {
  AttentionStatistics statistics(1);
  statistics.add(probs(1, 20, [](auto, auto, auto s) { return s == 0 ? 1 : 0; }), 1, 20);
  EXPECT_THAT(statistics.median_distance_without_sink(), ElementsAre(0.5));
  EXPECT_THAT(statistics.mean_distance_without_sink(), ElementsAre(0.5));
  EXPECT_THAT(statistics.mean_distance(), ElementsAre(DoubleNear((0.5 + 190) / 20, 1e-9)));
}

TEST(AttentionStatistics, OneTokenIsNoDistance) {
  AttentionStatistics statistics(2);
  statistics.add(std::vector<float>{1.0F, 1.0F}, 1, 1);
  EXPECT_THAT(statistics.mean_distance(), ElementsAre(0.5, 0.5));
  EXPECT_THAT(statistics.median_distance(), ElementsAre(0.5, 0.5));
  EXPECT_THAT(statistics.entropy(), ElementsAre(0.0, 0.0));
}

// Random rows against the definitions written out, sequence by sequence, lengths mixed.
TEST(AttentionStatistics, EqualsTheDefinitionsOverSeveralBatches) {
  constexpr int64_t H = 3;
  AttentionStatistics statistics(H);
  std::vector<double> distance(H), entropy(H), late_sum(H), late_mass(H);
  std::vector<std::vector<double>> mass_by_lag(H, std::vector<double>(64));
  double rows = 0;
  std::mt19937 random(7);
  for (const int64_t T : {1, 7, 9, 33, 17}) {
    std::vector<float> p =
        probs(H, T, [&](auto...) { return 0.01 + static_cast<double>(random() % 1000); });
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t t = 0; t < T; ++t) {
        float* const row = p.data() + (h * T + t) * T;
        double sum = 0;
        for (int64_t s = 0; s <= t; ++s) sum += row[s];
        for (int64_t s = 0; s <= t; ++s) row[s] = static_cast<float>(row[s] / sum);
        for (int64_t s = 0; s <= t; ++s) {
          const auto i = static_cast<std::size_t>(h);
          distance[i] += row[s] * std::max<double>(static_cast<double>(t - s), 0.5);
          entropy[i] -= row[s] * std::log(static_cast<double>(row[s]));
          if (s == 0) continue;
          mass_by_lag[i][static_cast<std::size_t>(t - s)] += row[s];
          if (t < 8) continue;
          late_sum[i] += row[s] * static_cast<double>(t - s);
          late_mass[i] += row[s];
        }
      }
    }
    statistics.add(p, 1, T);
    rows += static_cast<double>(T);
  }
  for (std::size_t h = 0; h < H; ++h) {
    EXPECT_NEAR(statistics.mean_distance()[h], distance[h] / rows, 1e-9);
    EXPECT_NEAR(statistics.entropy()[h], entropy[h] / rows, 1e-9);
    EXPECT_NEAR(statistics.mean_distance_without_sink()[h], late_sum[h] / late_mass[h], 1e-9);
    double total = 0, below = 0;
    for (const double m : mass_by_lag[h]) total += m;
    std::size_t lag = 0;
    while (below + mass_by_lag[h][lag] < total / 2) below += mass_by_lag[h][lag++];
    EXPECT_EQ(statistics.median_distance_without_sink()[h], static_cast<double>(lag));
  }
}

}  // namespace
}  // namespace graft::taylor
