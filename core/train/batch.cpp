#include "core/train/batch.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "core/train/logit_loss.h"

namespace graft {
namespace {

Batch batch_of(const std::vector<Piece>& pieces, std::size_t first, std::size_t count) {
  const auto rows = static_cast<std::int64_t>(count);
  const auto tokens = static_cast<std::int64_t>(pieces[first].tokens.size());
  Batch batch{at::zeros({rows, tokens}, at::kLong), at::full({rows, tokens}, kNoLabel, at::kLong),
              at::zeros({rows, tokens}, at::kByte), 0, 0};
  for (std::int64_t row = 0; row < rows; ++row) {
    const Piece& piece = pieces[first + static_cast<std::size_t>(row)];
    const auto length = static_cast<std::int64_t>(piece.tokens.size());
    auto* ids = batch.ids.data_ptr<std::int64_t>() + row * tokens;
    auto* labels = batch.labels.data_ptr<std::int64_t>() + row * tokens;
    std::copy(piece.tokens.begin(), piece.tokens.end(), ids);
    std::copy(piece.tokens.begin() + 1, piece.tokens.end(), labels);
    if (piece.next >= 0) labels[length - 1] = piece.next;
    std::fill_n(batch.mask.data_ptr<std::uint8_t>() + row * tokens, length, std::uint8_t{1});
    batch.real += length;
    batch.labelled += piece.next >= 0 ? length : length - 1;
  }
  if (batch.real == rows * tokens) batch.mask.reset();
  return batch;
}

}  // namespace

std::vector<Batch> make_batches(const std::vector<std::vector<Piece>>& rows) {
  std::vector<Piece> pieces;
  std::size_t total = 0;
  for (const auto& row : rows) {
    pieces.insert(pieces.end(), row.begin(), row.end());
    for (const Piece& piece : row) total += piece.tokens.size();
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.tokens.size() > b.tokens.size();
  });
  std::vector<Batch> batches;
  for (std::size_t first = 0; first < pieces.size();) {
    const std::size_t longest = pieces[first].tokens.size();
    std::size_t end = first + 1;
    while (end < pieces.size() && 3 * pieces[end].tokens.size() >= 2 * longest &&
           (end + 1 - first) * longest <= total)
      ++end;
    batches.push_back(batch_of(pieces, first, end - first));
    first = end;
  }
  return batches;
}

}  // namespace graft
