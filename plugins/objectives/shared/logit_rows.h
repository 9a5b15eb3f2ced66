// Rows of logits [..., V] as the ABI passes them, read and written in pieces of float32, and the
// tokens they belong to.
#pragma once

#include <graft/plugin.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace graft::objectives {

// A piece of a row: what is worked on at a time lies on the stack and in the nearest cache.
inline constexpr std::int64_t kPiece = 1024;

// body(begin, n) for the pieces of a row of `vocabulary` numbers.
template <class Body>
void for_each_piece(std::int64_t vocabulary, Body&& body) {
  for (std::int64_t begin = 0; begin < vocabulary; begin += kPiece)
    body(begin, std::min(kPiece, vocabulary - begin));
}

// float32, bfloat16 or float16, contiguous, on the CPU. Borrows the tensor.
class LogitRows {
 public:
  // Throws Status "tensor:<name>" for anything else, a scalar, or V = 0.
  LogitRows(const DLTensor& tensor, std::string_view name);

  std::int64_t rows() const { return rows_; }
  std::int64_t vocabulary() const { return vocabulary_; }
  std::span<const std::int64_t> shape() const { return shape_; }
  // Of the tokens: the shape without the vocabulary.
  std::span<const std::int64_t> tokens_shape() const { return shape_.first(shape_.size() - 1); }

  // Numbers begin .. begin + n of a row: where they stand if they are float32, else in `buffer`.
  const float* read(std::int64_t row, std::int64_t begin, std::int64_t n, float* buffer) const;
  void write(std::int64_t row, std::int64_t begin, std::int64_t n, const float* values) const;
  void write_zeros(std::int64_t row) const;
  float at(std::int64_t row, std::int64_t column) const;
  // The largest number of a row.
  float row_max(std::int64_t row) const;

 private:
  enum class Kind { float32, bfloat16, float16 };
  template <class T>
  T* address(std::int64_t row, std::int64_t begin) const {
    return static_cast<T*>(data_) + row * vocabulary_ + begin;
  }

  void* data_ = nullptr;
  Kind kind_ = Kind::float32;
  std::int64_t rows_ = 1, vocabulary_ = 0;
  std::span<const std::int64_t> shape_;
};

// The gradient's rows, shaped as the student's; nothing when none is wanted.
std::optional<LogitRows> gradient_rows(const DLTensor* grad, const LogitRows& student);

// Throws Status unless `tensor` has the tokens' shape, or is flat.
void check_tokens(const LogitRows& logits, const DLTensor& tensor, std::string_view name);

// "[3]" or "[0, 3]": where token `row` stands in tensors of this shape.
std::string token_position(std::span<const std::int64_t> tokens_shape, std::int64_t row);

// How much each token counts.
class TokenWeights {
 public:
  // NULL: all count, each 1. Both have the tokens' shape, or are flat. Throws Status for another
  // shape or dtype, and for a weight that is negative or not finite.
  TokenWeights(const LogitRows& logits, const DLTensor* mask, const DLTensor* weight);

  // 0: the token does not count, and nothing of it is read.
  double operator[](std::int64_t row) const;
  // The sum over all tokens for which counts(row).
  template <class Counts>
  double total(Counts&& counts) const {
    double sum = 0;
    for (std::int64_t row = 0; row < rows_; ++row) {
      if ((*this)[row] > 0 && counts(row)) sum += (*this)[row];
    }
    return sum;
  }

 private:
  std::int64_t rows_;
  const std::uint8_t* mask_ = nullptr;
  const float* weight_ = nullptr;
};

// What a row gives to the sums; a second figure for the log.
struct RowLoss {
  double loss = 0, second = 0;
};

// sum over rows of weight(row) * body(row), rows in parallel, added up in their order so that the
// number of threads does not show. The workspace holds a RowLoss for each. Ends with CANCELLED when
// the user wants to stop.
inline std::uint64_t workspace_bytes(std::int64_t rows) {
  return static_cast<std::uint64_t>(rows) * sizeof(RowLoss);
}
// The same for logits whose shape may not have been checked.
std::uint64_t workspace_of(const DLTensor& logits);
template <class Body>
RowLoss sum_rows(const LogitRows& logits, const graft_exec& exec, Body&& body) {
  const std::int64_t rows = logits.rows();
  if (exec.workspace_bytes < workspace_bytes(rows) || (rows > 0 && exec.workspace == nullptr)) {
    throw sdk::Status(GRAFT_INVALID_ARGUMENT, "exec.workspace",
                      sdk::cat("expected ", workspace_bytes(rows), " bytes, got ",
                               exec.workspace == nullptr ? 0 : exec.workspace_bytes));
  }
  auto* const of_row = static_cast<RowLoss*>(exec.workspace);
  constexpr std::int64_t kWorthAThread = 32768;  // numbers
  const std::int64_t grain = std::max<std::int64_t>(1, kWorthAThread / logits.vocabulary());
  sdk::parallel_for(0, rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) of_row[row] = body(row);
    if (sdk::should_stop()) throw sdk::cancelled();
  });
  RowLoss sum;
  for (std::int64_t row = 0; row < rows; ++row) {
    sum.loss += of_row[row].loss;
    sum.second += of_row[row].second;
  }
  return sum;
}

// The output "loss": one float32.
void write_loss(const DLTensor& loss, double value);
// Tells the host a figure.
void report_metric(const sdk::ObjectiveArgs& args, const char* name, double value);

}  // namespace graft::objectives
