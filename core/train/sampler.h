#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace graft {

// Consecutive tokens of one document. A model starts each piece from an empty state at position 0.
struct Piece {
  std::span<const std::int32_t> tokens;
  std::int32_t next = -1;  // the token behind the last one; -1 where the document ends
};

// A corpus that is sampled: its documents, and its share against the others'.
struct WeightedText {
  std::string name;
  std::vector<std::span<const std::int32_t>> documents;
  double weight = 1;
};

// Where a sampler stands: rows handed out, in all and of each corpus.
struct SamplerPosition {
  std::uint64_t rows = 0;
  std::vector<std::uint64_t> taken;
  bool operator==(const SamplerPosition&) const = default;
};

// Rows of `context` tokens in an order that depends on the seed and the position alone.
//
// The documents of a corpus lie end to end; an epoch cuts them into rows behind an offset of its
// own and hands the rows out in a permutation of its own. A row that crosses the border of two
// documents comes as two pieces. What is left over at the ends (fewer than `context` tokens in an
// epoch) lies elsewhere in the next epoch. Corpora take turns so that at any time each has had its
// share of the rows, to one row.
class Sampler {
 public:
  // `pool` > 0: only pool / context rows of each corpus, the same in every epoch. Spans are
  // borrowed. Throws Error(input) naming a corpus that has not one row, Error(usage) when no corpus
  // has a weight.
  Sampler(std::vector<WeightedText> corpora, std::int64_t context, std::uint64_t seed,
          std::int64_t pool = 0);

  // The pieces of the next row: `context` tokens in all.
  std::vector<Piece> next();

  const SamplerPosition& position() const { return position_; }
  // Throws Error(input) for a position of other corpora.
  void seek(const SamplerPosition& position);

  // Rows in one epoch over all corpora.
  std::uint64_t rows() const;

 private:
  struct Source {
    WeightedText text;
    std::vector<std::uint64_t> ends;  // of each document in the tokens laid end to end
    std::uint64_t rows = 0;           // in an epoch
    std::uint64_t all_rows = 0;       // as far as the text goes
    double share = 0;
  };
  std::size_t choose() const;
  std::vector<Piece> cut(const Source& source, std::uint64_t start) const;

  std::vector<Source> sources_;
  std::uint64_t context_, seed_;
  bool pooled_;
  SamplerPosition position_;
};

}  // namespace graft
