#include "core/train/permutation.h"

#include <gtest/gtest.h>

#include <vector>

namespace graft {
namespace {

std::vector<std::uint64_t> order(std::uint64_t n, std::uint64_t key) {
  std::vector<std::uint64_t> places;
  for (std::uint64_t i = 0; i < n; ++i) places.push_back(permuted(i, n, key));
  return places;
}

TEST(Permutation, GivesEachPlaceOnce) {
  for (const std::uint64_t n : {1u, 2u, 3u, 4u, 5u, 63u, 64u, 65u, 1000u, 4097u})
    for (const std::uint64_t key : {0u, 1u, 77u}) {
      std::vector<bool> seen(n);
      for (const std::uint64_t place : order(n, key)) {
        ASSERT_LT(place, n);
        EXPECT_FALSE(seen[place]) << n << ", " << key;
        seen[place] = true;
      }
    }
}

TEST(Permutation, DependsOnTheKeyAndOnNothingElse) {
  EXPECT_EQ(order(100, 1), order(100, 1));
  EXPECT_NE(order(100, 1), order(100, 2));
}

TEST(Permutation, LeavesNoTraceOfTheOrderItCameFrom) {
  // Of neighbours in the text, few stay neighbours: of 1000 pairs about two by chance.
  const auto places = order(1000, 5);
  int neighbours = 0;
  for (std::size_t i = 1; i < places.size(); ++i) neighbours += places[i] == places[i - 1] + 1;
  EXPECT_LT(neighbours, 10);
}

}  // namespace
}  // namespace graft
