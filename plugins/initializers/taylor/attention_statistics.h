#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace graft::taylor {

// Statistics of causal attention probabilities per head, accumulated sequence by sequence in
// float64.
//
// All distances come from the mass at each lag t - s; "without the sink" leaves key position 0 out,
// where softmax attention parks the mass it has no use for.
class AttentionStatistics {
 public:
  explicit AttentionStatistics(int64_t heads);

  // probs: [sequences, heads, tokens, tokens] row-major; entries above the diagonal are not read.
  void add(std::span<const float> probs, int64_t sequences, int64_t tokens);

  int64_t rows() const { return rows_; }  // query positions seen, per head

  // arXiv 2606.16429, Phase 1: mean_t sum_s A[t,s] max(t - s, 0.5), at least 0.5 tokens.
  std::vector<double> mean_distance() const;
  // mean_t -sum_s A log max(A, 1e-10), in nats.
  std::vector<double> entropy() const;
  // Mean lag of the mass without the sink, over query positions t >= 8 (before that there is hardly
  // a key to choose from), at least 0.5 tokens.
  std::vector<double> mean_distance_without_sink() const;
  // Smallest lag that has half of the mass without the sink at or below it, at least 0.5 tokens.
  std::vector<double> median_distance_without_sink() const;
  // The same with key position 0 counted.
  std::vector<double> median_distance() const;

 private:
  using Histogram = std::vector<double>;  // mass by lag
  std::vector<double> medians(const std::vector<Histogram>& mass) const;

  int64_t rows_ = 0;
  std::vector<Histogram> all_, without_sink_, without_sink_late_;  // by head
  std::vector<double> entropy_sum_;
};

}  // namespace graft::taylor
