#include "core/text/word_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace graft::text {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(WordCache, RemembersWords) {
  WordCache cache;
  EXPECT_EQ(cache.find("a"), std::nullopt);
  cache.insert("a", std::vector<std::int32_t>{1, 2});
  cache.insert("", std::vector<std::int32_t>{});
  cache.insert("b", std::vector<std::int32_t>{3});
  EXPECT_THAT(*cache.find("a"), ElementsAre(1, 2));
  EXPECT_THAT(*cache.find("b"), ElementsAre(3));
  EXPECT_THAT(*cache.find(""), IsEmpty());
}

TEST(WordCache, LongWordsAreNotKept) {
  WordCache cache;
  const std::vector<std::int32_t> ids = {1};
  cache.insert(std::string(WordCache::kLongestWord, 'x'), ids);
  cache.insert(std::string(WordCache::kLongestWord + 1, 'x'), ids);
  EXPECT_EQ(cache.size(), 1U);
  EXPECT_EQ(cache.find(std::string(WordCache::kLongestWord + 1, 'x')), std::nullopt);
}

TEST(WordCache, IsBounded) {
  WordCache cache;
  for (std::size_t i = 0; i < 3 * WordCache::kMostWords; ++i) {
    cache.insert(std::to_string(i), std::vector<std::int32_t>{static_cast<std::int32_t>(i)});
    ASSERT_LE(cache.size(), WordCache::kMostWords);
  }
  const std::size_t last = 3 * WordCache::kMostWords - 1;
  EXPECT_THAT(*cache.find(std::to_string(last)), ElementsAre(last));
}

}  // namespace
}  // namespace graft::text
