#include "core/train/sampler.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/train/permutation.h"

namespace graft {

Sampler::Sampler(std::vector<WeightedText> corpora, std::int64_t context, std::uint64_t seed,
                 std::int64_t pool)
    : context_(static_cast<std::uint64_t>(context)), seed_(seed), pooled_(pool > 0) {
  double total_weight = 0;
  for (const WeightedText& text : corpora) total_weight += text.weight;
  if (!(total_weight > 0))
    fail(ErrorKind::usage, "no corpus has a weight above 0: there is nothing to train on");
  const std::uint64_t most = pooled_ ? static_cast<std::uint64_t>(pool) / context_ : 0;
  if (pooled_ && most == 0)
    fail(ErrorKind::usage, "a pool of " + std::to_string(pool) + " tokens holds no row of " +
                               std::to_string(context));
  for (WeightedText& text : corpora) {
    Source source;
    source.share = text.weight / total_weight;
    std::uint64_t tokens = 0;
    for (const auto& document : text.documents)
      source.ends.push_back(tokens += static_cast<std::uint64_t>(document.size()));
    source.all_rows = tokens / context_;
    source.rows = pooled_ ? std::min(most, source.all_rows) : source.all_rows;
    if (source.rows == 0 && source.share > 0)
      fail(ErrorKind::input, quoted(text.name) + " has " + std::to_string(tokens) +
                                 " tokens to train on; one row needs " + std::to_string(context));
    source.text = std::move(text);
    sources_.push_back(std::move(source));
  }
  position_.taken.resize(sources_.size());
}

std::size_t Sampler::choose() const {
  const auto behind = [&](std::size_t i) {
    return sources_[i].share * static_cast<double>(position_.rows + 1) -
           static_cast<double>(position_.taken[i]);
  };
  std::size_t best = 0;
  for (std::size_t i = 1; i < sources_.size(); ++i)
    if (behind(i) > behind(best)) best = i;
  return best;
}

std::vector<Piece> Sampler::next() {
  const std::size_t chosen = choose();
  const Source& source = sources_[chosen];
  const std::uint64_t taken = position_.taken[chosen]++, epoch = taken / source.rows;
  ++position_.rows;
  const std::uint64_t stream = mix_bits(seed_ ^ mix_bits(chosen + 1));
  const std::uint64_t key = mix_bits(stream + epoch);
  std::uint64_t row = permuted(taken % source.rows, source.rows, key), shift = 0;
  if (pooled_) {
    row = permuted(row, source.all_rows, stream);
  } else {
    const std::uint64_t left = source.ends.back() - source.all_rows * context_;
    shift = mix_bits(key) % (left + 1);
  }
  return cut(source, shift + row * context_);
}

std::vector<Piece> Sampler::cut(const Source& source, std::uint64_t start) const {
  std::vector<Piece> pieces;
  const std::uint64_t end = start + context_;
  auto at = static_cast<std::size_t>(
      std::upper_bound(source.ends.begin(), source.ends.end(), start) - source.ends.begin());
  while (start < end) {
    const auto& document = source.text.documents[at];
    const std::uint64_t begins = source.ends[at] - static_cast<std::uint64_t>(document.size());
    const std::uint64_t stop = std::min(end, source.ends[at]);
    if (stop > start) {
      Piece piece{document.subspan(static_cast<std::size_t>(start - begins),
                                   static_cast<std::size_t>(stop - start)),
                  -1};
      if (stop < source.ends[at]) piece.next = document[static_cast<std::size_t>(stop - begins)];
      pieces.push_back(piece);
    }
    start = stop;
    ++at;
  }
  return pieces;
}

void Sampler::seek(const SamplerPosition& position) {
  if (position.taken.size() != sources_.size())
    fail(ErrorKind::input, "the saved position is one in " + std::to_string(position.taken.size()) +
                               " corpora, there are " + std::to_string(sources_.size()) + " now");
  position_ = position;
}

std::uint64_t Sampler::rows() const {
  std::uint64_t total = 0;
  for (const Source& source : sources_)
    if (source.share > 0) total += source.rows;
  return total;
}

}  // namespace graft
