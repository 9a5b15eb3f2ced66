#include "core/train/text_split.h"

#include <algorithm>
#include <set>

#include "core/base/testing.h"

namespace graft {
namespace {

class Documents {
 public:
  explicit Documents(int count) {
    for (int i = 0; i < count; ++i)
      tokens_.push_back(std::vector<std::int32_t>(20, static_cast<std::int32_t>(i)));
    for (int i = 0; i < count; ++i)
      documents_.push_back({"d" + std::to_string(i), tokens_[static_cast<std::size_t>(i)]});
  }
  const std::vector<Document>& list() const { return documents_; }

 private:
  std::vector<std::vector<std::int32_t>> tokens_;
  std::vector<Document> documents_;
};

std::set<std::int32_t> ids(const std::vector<Document>& documents) {
  std::set<std::int32_t> all;
  for (const Document& document : documents) all.insert(document.tokens[0]);
  return all;
}

TEST(TextSplit, EachDocumentIsOnOneSide) {
  const Documents documents(20);
  const TextSplit split = split_documents(documents.list(), 0.1);
  EXPECT_EQ(split.held_out.size(), 2u);
  EXPECT_EQ(split.training.size(), 18u);
  auto all = ids(split.training);
  for (const auto id : ids(split.held_out)) EXPECT_TRUE(all.insert(id).second) << id;
  EXPECT_EQ(all.size(), 20u);
  EXPECT_EQ(split.how, "2 of 20 documents, drawn by content");
}

TEST(TextSplit, NeitherNamesNorOrderMatter) {
  const Documents documents(20);
  auto shuffled = documents.list();
  std::reverse(shuffled.begin(), shuffled.end());
  for (Document& document : shuffled) document.name = "other";
  const auto held = ids(split_documents(documents.list(), 0.3).held_out);
  EXPECT_EQ(ids(split_documents(shuffled, 0.3).held_out), held);
}

TEST(TextSplit, EqualDocumentsAreOnOneSide) {
  const Documents documents(10);
  auto twice = documents.list();
  twice.insert(twice.end(), documents.list().begin(), documents.list().end());
  for (const double share : {0.05, 0.25, 0.5, 0.95}) {
    const TextSplit split = split_documents(twice, share);
    EXPECT_FALSE(split.training.empty());
    EXPECT_FALSE(split.held_out.empty());
    auto trained = ids(split.training);
    for (const auto id : ids(split.held_out)) EXPECT_FALSE(trained.contains(id)) << share;
  }
}

TEST(TextSplit, AtLeastOneAndNeverAll) {
  EXPECT_EQ(split_documents(Documents(3).list(), 0.01).held_out.size(), 1u);
  EXPECT_EQ(split_documents(Documents(2).list(), 0.9).training.size(), 1u);
  EXPECT_TRUE(split_documents(Documents(3).list(), 0).held_out.empty());
}

TEST(TextSplit, OfOneDocumentTheTail) {
  const Documents one(1);
  const TextSplit split = split_documents(one.list(), 0.25);
  ASSERT_EQ(split.held_out.size(), 1u);
  EXPECT_EQ(split.held_out[0].tokens.size(), 5u);
  EXPECT_EQ(split.training[0].tokens.size(), 15u);
  EXPECT_EQ(split.held_out[0].tokens.data(), one.list()[0].tokens.data() + 15);
  EXPECT_EQ(split.how, "the last 25 % of the one document");
}

}  // namespace
}  // namespace graft
