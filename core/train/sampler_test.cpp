#include "core/train/sampler.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "core/base/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Documents whose tokens count on from 1000 * document.
class Texts {
 public:
  explicit Texts(const std::vector<std::size_t>& lengths) {
    tokens_.reserve(lengths.size());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      std::vector<std::int32_t> document(lengths[i]);
      std::iota(document.begin(), document.end(), static_cast<std::int32_t>(1000 * i));
      tokens_.push_back(std::move(document));
    }
  }
  WeightedText text(double weight = 1, const std::string& name = "text") const {
    WeightedText text{name, {}, weight};
    for (const auto& document : tokens_) text.documents.emplace_back(document);
    return text;
  }

 private:
  std::vector<std::vector<std::int32_t>> tokens_;
};

std::vector<std::int32_t> flat(const std::vector<Piece>& row) {
  std::vector<std::int32_t> all;
  for (const Piece& piece : row) all.insert(all.end(), piece.tokens.begin(), piece.tokens.end());
  return all;
}

TEST(Sampler, RowsAreWholeAndSplitWhereDocumentsEnd) {
  const Texts texts({10, 1, 7, 30, 3});
  Sampler sampler({texts.text()}, 8, 3);
  ASSERT_EQ(sampler.rows(), 6u);  // 51 tokens
  for (int i = 0; i < 60; ++i) {
    const auto row = sampler.next();
    EXPECT_EQ(flat(row).size(), 8u);
    for (const Piece& piece : row) {
      ASSERT_FALSE(piece.tokens.empty());
      const std::int32_t document = piece.tokens[0] / 1000;
      for (std::size_t k = 1; k < piece.tokens.size(); ++k)
        EXPECT_EQ(piece.tokens[k], piece.tokens[k - 1] + 1);
      const std::vector<std::int32_t> lengths = {10, 1, 7, 30, 3};
      const bool ends =
          piece.tokens.back() % 1000 + 1 == lengths[static_cast<std::size_t>(document)];
      EXPECT_EQ(piece.next, ends ? -1 : piece.tokens.back() + 1);
    }
  }
}

TEST(Sampler, AnEpochGivesEachTokenAtMostOnceAndEpochsDiffer) {
  const Texts texts({100, 37});
  Sampler sampler({texts.text()}, 8, 1);
  std::vector<std::vector<std::int32_t>> epochs;
  std::map<std::int32_t, int> seen;
  for (int epoch = 0; epoch < 8; ++epoch) {
    std::vector<std::int32_t> all;
    for (std::uint64_t i = 0; i < sampler.rows(); ++i) {
      const auto row = flat(sampler.next());
      all.insert(all.end(), row.begin(), row.end());
    }
    epochs.push_back(all);
    std::sort(all.begin(), all.end());
    EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
    for (const auto token : all) ++seen[token];
  }
  EXPECT_NE(epochs[0], epochs[1]);
  // What one epoch leaves out at the ends, another has.
  EXPECT_EQ(seen.size(), 137u);
}

TEST(Sampler, GoesOnFromASavedPosition) {
  const Texts a({300}), b({100, 50});
  const std::vector<WeightedText> corpora = {a.text(2, "a"), b.text(1, "b")};
  Sampler whole(corpora, 8, 9);
  std::vector<std::vector<std::int32_t>> rows;
  std::vector<SamplerPosition> positions;
  for (int i = 0; i < 100; ++i) {
    positions.push_back(whole.position());
    rows.push_back(flat(whole.next()));
  }
  for (const std::size_t at : {0u, 1u, 36u, 37u, 55u, 99u}) {
    Sampler resumed(corpora, 8, 9);
    resumed.seek(positions[at]);
    for (std::size_t i = at; i < rows.size(); ++i) ASSERT_EQ(flat(resumed.next()), rows[i]) << at;
  }
  Sampler other(corpora, 8, 10);
  EXPECT_NE(flat(other.next()), rows[0]);
}

TEST(Sampler, CorporaHaveTheirShareAtAnyTime) {
  const Texts a({500}), b({500}), c({500});
  Sampler sampler({a.text(3), b.text(1), c.text(0)}, 8, 1);
  for (int i = 1; i <= 40; ++i) {
    sampler.next();
    const auto& taken = sampler.position().taken;
    EXPECT_NEAR(static_cast<double>(taken[0]), 0.75 * i, 1.0);
    EXPECT_NEAR(static_cast<double>(taken[1]), 0.25 * i, 1.0);
    EXPECT_EQ(taken[2], 0u);
  }
}

TEST(Sampler, APoolIsTheSameRowsInEveryEpoch) {
  const Texts texts({1000});
  Sampler sampler({texts.text()}, 8, 4, /*pool=*/40);
  ASSERT_EQ(sampler.rows(), 5u);
  std::vector<std::vector<std::vector<std::int32_t>>> epochs(3);
  for (auto& epoch : epochs) {
    for (int i = 0; i < 5; ++i) epoch.push_back(flat(sampler.next()));
    std::sort(epoch.begin(), epoch.end());
  }
  EXPECT_EQ(epochs[0], epochs[1]);
  EXPECT_EQ(epochs[0], epochs[2]);
}

TEST(Sampler, WrongUseIsNamed) {
  const Texts small({7}), large({100});
  EXPECT_GRAFT_ERROR(Sampler({small.text(1, "tiny.txt")}, 8, 1), ErrorKind::input,
                     AllOf(HasSubstr("tiny.txt"), HasSubstr("7 tokens"), HasSubstr("8")));
  EXPECT_GRAFT_ERROR(Sampler({large.text(0)}, 8, 1), ErrorKind::usage, HasSubstr("weight"));
  EXPECT_GRAFT_ERROR(Sampler({large.text()}, 8, 1, 7), ErrorKind::usage, HasSubstr("pool of 7"));
  Sampler sampler({large.text()}, 8, 1);
  EXPECT_GRAFT_ERROR(sampler.seek({3, {1, 2}}), ErrorKind::input, HasSubstr("2 corpora"));
  EXPECT_EQ(Sampler({large.text()}, 100, 1).next().size(), 1u);
}

}  // namespace
}  // namespace graft
