#include "core/teacher/kv_cache.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/testing.h"

namespace graft {
namespace {

using testing::HasSubstr;

at::Tensor numbers(int64_t batch, int64_t heads, int64_t tokens, int64_t dim) {
  return at::randn({batch, heads, tokens, dim});
}

class KvCacheGrowth : public testing::TestWithParam<int64_t> {};

TEST_P(KvCacheGrowth, ReturnsAllThatWasAppended) {
  const int64_t capacity = GetParam();
  KvCache cache(1, 2, capacity);
  at::Tensor k = at::empty({2, 3, 0, 4}), v = k;
  for (const int64_t tokens : {1, 0, 5, 1, 1, 17, 64, 1}) {
    const at::Tensor new_k = numbers(2, 3, tokens, 4), new_v = numbers(2, 3, tokens, 4);
    k = at::cat({k, new_k}, 2);
    v = at::cat({v, new_v}, 2);
    const auto [all_k, all_v] = cache.append(0, new_k, new_v);
    EXPECT_TRUE(at::equal(all_k, k));
    EXPECT_TRUE(at::equal(all_v, v));
    EXPECT_EQ(cache.length(0), k.size(2));
  }
}

INSTANTIATE_TEST_SUITE_P(Capacities, KvCacheGrowth, testing::Values(0, 1, 2, 6, 7, 256));

TEST(KvCache, CountsEachLayerByItself) {
  KvCache cache(3, 1);
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(cache.bytes(), 0u);
  cache.append(0, numbers(1, 2, 7, 4), numbers(1, 2, 7, 4));
  cache.append(2, numbers(1, 2, 5, 4), numbers(1, 2, 5, 4));
  EXPECT_EQ(cache.length(0), 7);
  EXPECT_EQ(cache.length(1), 0);
  EXPECT_EQ(cache.length(2), 5);
  EXPECT_EQ(cache.length(), 7);
  EXPECT_EQ(cache.bytes(), 2u * 2 * 2 * 256 * 4 * sizeof(float));
}

TEST(KvCache, ForgetsFromTheEnd) {
  KvCache cache(2, 1, 4);
  const at::Tensor k = numbers(1, 2, 9, 4);
  cache.append(0, k, k);
  cache.append(1, k.narrow(2, 0, 3), k.narrow(2, 0, 3));
  cache.truncate(5);
  EXPECT_EQ(cache.length(0), 5);
  EXPECT_EQ(cache.length(1), 3);
  const at::Tensor more = numbers(1, 2, 1, 4);
  EXPECT_TRUE(at::equal(cache.append(0, more, more).first, at::cat({k.narrow(2, 0, 5), more}, 2)));
  cache.reset();
  EXPECT_EQ(cache.length(), 0);
  EXPECT_TRUE(at::equal(cache.append(0, more, more).second, more));
}

TEST(KvCache, KeepsTheTypeItIsGivenAndNoGraph) {
  KvCache cache(1, 1);
  const at::Tensor k = numbers(1, 2, 3, 4).to(at::kBFloat16).requires_grad_();
  const auto [all_k, all_v] = cache.append(0, k * 2, k * 3);
  EXPECT_EQ(all_k.scalar_type(), at::kBFloat16);
  EXPECT_FALSE(all_k.requires_grad());
  EXPECT_FALSE(all_v.requires_grad());
}

TEST(KvCache, RefusesWhatDoesNotFit) {
  KvCache cache(1, 2);
  const at::Tensor k = numbers(2, 3, 5, 4);
  EXPECT_GRAFT_ERROR(cache.append(1, k, k), ErrorKind::internal, HasSubstr("no layer 1"));
  EXPECT_GRAFT_ERROR(
      cache.append(0, numbers(1, 3, 5, 4), numbers(1, 3, 5, 4)), ErrorKind::internal,
      HasSubstr("keys [1, 3, 5, 4] and values [1, 3, 5, 4] do not fit the cache of layer "
                "0, batch 2"));
  EXPECT_GRAFT_ERROR(cache.append(0, k, numbers(2, 3, 4, 4)), ErrorKind::internal,
                     HasSubstr("do not fit"));
  cache.append(0, k, k);
  EXPECT_GRAFT_ERROR(cache.append(0, numbers(2, 2, 1, 4), numbers(2, 2, 1, 4)), ErrorKind::internal,
                     HasSubstr("which holds [2, 3, 256, 4]"));
  const at::Tensor half = k.to(at::kHalf);
  EXPECT_GRAFT_ERROR(cache.append(0, half, half), ErrorKind::internal, HasSubstr("do not fit"));
  EXPECT_EQ(cache.length(0), 5);
  EXPECT_GRAFT_ERROR(cache.truncate(-1), ErrorKind::internal, HasSubstr("cannot be cut to -1"));
  EXPECT_GRAFT_ERROR(KvCache(1, 0), ErrorKind::internal, HasSubstr("batch 0"));
}

}  // namespace
}  // namespace graft
