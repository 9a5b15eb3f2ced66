#include "core/train/text_split.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "core/train/permutation.h"

namespace graft {
namespace {

std::uint64_t content_key(const Document& document) {
  std::uint64_t hash = mix_bits(1);
  for (const std::int32_t token : document.tokens)
    hash = (hash ^ static_cast<std::uint64_t>(token)) * 0x100000001b3u;
  return mix_bits(hash);
}

TextSplit split_tail(const Document& document, double share) {
  const auto tail =
      static_cast<std::size_t>(std::ceil(share * static_cast<double>(document.tokens.size())));
  TextSplit split;
  split.training = {{document.name, document.tokens.first(document.tokens.size() - tail)}};
  split.held_out = {{document.name, document.tokens.last(tail)}};
  char text[64];
  std::snprintf(text, sizeof text, "the last %.3g %% of the one document", 100 * share);
  split.how = text;
  return split;
}

}  // namespace

TextSplit split_documents(const std::vector<Document>& documents, double share) {
  if (share <= 0 || documents.empty()) return {documents, {}, "nothing is held out"};
  if (documents.size() == 1) return split_tail(documents.front(), share);
  std::vector<std::pair<std::uint64_t, std::size_t>> order;
  for (std::size_t i = 0; i < documents.size(); ++i)
    order.emplace_back(content_key(documents[i]), i);
  std::sort(order.begin(), order.end());
  const auto wanted =
      static_cast<std::size_t>(std::lround(share * static_cast<double>(documents.size())));
  std::size_t count = std::clamp<std::size_t>(wanted, 1, documents.size() - 1);
  // Equal documents stand beside each other.
  while (count < order.size() && order[count].first == order[count - 1].first) ++count;
  if (count == order.size())
    while (count > 1 && order[count - 1].first == order.back().first) --count;
  order.resize(count);
  std::vector<bool> out(documents.size());
  for (const auto& [key, i] : order) out[i] = true;
  TextSplit split;
  for (std::size_t i = 0; i < documents.size(); ++i)
    (out[i] ? split.held_out : split.training).push_back(documents[i]);
  split.how = std::to_string(split.held_out.size()) + " of " + std::to_string(documents.size()) +
              " documents, drawn by content";
  return split;
}

}  // namespace graft
