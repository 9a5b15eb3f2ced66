#include "plugins/initializers/taylor/attention_statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace graft::taylor {
namespace {

constexpr double kLeastDistance = 0.5;
constexpr double kLeastProbability = 1e-10;
constexpr int64_t kFirstLateQuery = 8;

}  // namespace

AttentionStatistics::AttentionStatistics(int64_t heads)
    : all_(static_cast<std::size_t>(heads)),
      without_sink_(static_cast<std::size_t>(heads)),
      without_sink_late_(static_cast<std::size_t>(heads)),
      entropy_sum_(static_cast<std::size_t>(heads), 0.0) {}

void AttentionStatistics::add(std::span<const float> probs, int64_t sequences, int64_t tokens) {
  const auto n = static_cast<std::size_t>(tokens);
  for (auto* family : {&all_, &without_sink_, &without_sink_late_}) {
    for (Histogram& mass : *family) mass.resize(std::max(mass.size(), n), 0.0);
  }
  const float* row = probs.data();
  for (int64_t b = 0; b < sequences; ++b) {
    for (std::size_t h = 0; h < all_.size(); ++h) {
      double entropy = 0;
      for (std::size_t t = 0; t < n; ++t, row += n) {
        const bool late = t >= static_cast<std::size_t>(kFirstLateQuery);
        for (std::size_t s = 0; s <= t; ++s) {
          const double p = row[s];
          entropy -= p * std::log(std::max(p, kLeastProbability));
          all_[h][t - s] += p;
          if (s > 0) without_sink_[h][t - s] += p;
          if (s > 0 && late) without_sink_late_[h][t - s] += p;
        }
      }
      entropy_sum_[h] += entropy;
    }
  }
  rows_ += sequences * tokens;
}

std::vector<double> AttentionStatistics::mean_distance() const {
  std::vector<double> result;
  for (const Histogram& mass : all_) {
    double sum = 0;
    for (std::size_t lag = 0; lag < mass.size(); ++lag) {
      sum += mass[lag] * std::max(static_cast<double>(lag), kLeastDistance);
    }
    result.push_back(std::max(sum / static_cast<double>(rows_), kLeastDistance));
  }
  return result;
}

std::vector<double> AttentionStatistics::entropy() const {
  std::vector<double> result;
  for (const double sum : entropy_sum_) result.push_back(sum / static_cast<double>(rows_));
  return result;
}

std::vector<double> AttentionStatistics::mean_distance_without_sink() const {
  std::vector<double> result;
  for (const Histogram& mass : without_sink_late_) {
    double sum = 0;
    for (std::size_t lag = 0; lag < mass.size(); ++lag) sum += mass[lag] * static_cast<double>(lag);
    const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
    result.push_back(std::max(sum / std::max(total, 1e-6), kLeastDistance));
  }
  return result;
}

std::vector<double> AttentionStatistics::medians(const std::vector<Histogram>& family) const {
  std::vector<double> result;
  for (const Histogram& mass : family) {
    const double half = 0.5 * std::accumulate(mass.begin(), mass.end(), 0.0);
    double below = 0;
    std::size_t lag = 0;
    // A head whose whole mass is the sink has no median: it stays at the least distance.
    while (half > 0 && lag + 1 < mass.size() && (below += mass[lag]) < half) ++lag;
    result.push_back(std::max(static_cast<double>(lag), kLeastDistance));
  }
  return result;
}

std::vector<double> AttentionStatistics::median_distance_without_sink() const {
  return medians(without_sink_);
}

std::vector<double> AttentionStatistics::median_distance() const { return medians(all_); }

}  // namespace graft::taylor
