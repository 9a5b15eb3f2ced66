#include "plugins/objectives/shared/logit_rows.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "plugins/objectives/shared/row_kernels.h"

namespace graft::objectives {
namespace {

sdk::Status bad_tensor(std::string_view name, const std::string& message) {
  return {GRAFT_INVALID_ARGUMENT, sdk::cat("tensor:", name), message};
}

}  // namespace

LogitRows::LogitRows(const DLTensor& tensor, std::string_view name)
    : shape_(sdk::shape_of(tensor)) {
  if (shape_.empty()) throw bad_tensor(name, "expected shape [..., vocabulary], got a scalar");
  if (sdk::same_dtype(tensor.dtype, sdk::bfloat16)) {
    kind_ = Kind::bfloat16;
  } else if (sdk::same_dtype(tensor.dtype, sdk::float16)) {
    kind_ = Kind::float16;
  } else if (!sdk::same_dtype(tensor.dtype, sdk::float32)) {
    throw bad_tensor(name, sdk::cat("expected float32, bfloat16 or float16, got ",
                                    sdk::dtype_name(tensor.dtype)));
  }
  sdk::check_device(tensor, name, kDLCPU);
  sdk::check_contiguous(tensor, name);
  vocabulary_ = shape_.back();
  for (const std::int64_t size : tokens_shape()) rows_ *= size;
  if (vocabulary_ == 0) throw bad_tensor(name, "has a vocabulary of no tokens");
  data_ = sdk::data_address(tensor);
  if (rows_ > 0 && data_ == nullptr)
    throw bad_tensor(name, sdk::cat("has no data for shape ", sdk::shape_string(tensor)));
}

const float* LogitRows::read(std::int64_t row, std::int64_t begin, std::int64_t n,
                             float* buffer) const {
  if (kind_ == Kind::float32) return address<const float>(row, begin);
  const auto* const stored = address<const std::uint16_t>(row, begin);
  kind_ == Kind::bfloat16 ? from_bfloat16(stored, n, buffer) : from_float16(stored, n, buffer);
  return buffer;
}

void LogitRows::write(std::int64_t row, std::int64_t begin, std::int64_t n,
                      const float* values) const {
  if (kind_ == Kind::float32) {
    std::memcpy(address<float>(row, begin), values, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  auto* const stored = address<std::uint16_t>(row, begin);
  kind_ == Kind::bfloat16 ? to_bfloat16(values, n, stored) : to_float16(values, n, stored);
}

void LogitRows::write_zeros(std::int64_t row) const {
  // All three formats write 0 as zero bytes.
  const auto width = kind_ == Kind::float32 ? sizeof(float) : sizeof(std::uint16_t);
  const auto bytes = static_cast<std::size_t>(vocabulary_) * width;
  std::memset(static_cast<char*>(data_) + static_cast<std::size_t>(row) * bytes, 0, bytes);
}

float LogitRows::at(std::int64_t row, std::int64_t column) const {
  float number;
  return *read(row, column, 1, &number);
}

float LogitRows::row_max(std::int64_t row) const {
  float buffer[kPiece];
  float most = -std::numeric_limits<float>::infinity();
  for_each_piece(vocabulary_, [&](std::int64_t begin, std::int64_t n) {
    most = std::max(most, largest(read(row, begin, n, buffer), n));
  });
  return most;
}

std::optional<LogitRows> gradient_rows(const DLTensor* grad, const LogitRows& student) {
  if (grad == nullptr) return std::nullopt;
  sdk::check_shape(*grad, "grad", student.shape());
  return LogitRows(*grad, "grad");
}

void check_tokens(const LogitRows& logits, const DLTensor& tensor, std::string_view name) {
  const bool flat = tensor.ndim == 1 && tensor.shape[0] == logits.rows();
  if (!flat) sdk::check_shape(tensor, name, logits.tokens_shape());
}

std::uint64_t workspace_of(const DLTensor& logits) {
  const std::int64_t vocabulary = logits.ndim > 0 ? logits.shape[logits.ndim - 1] : 0;
  return vocabulary == 0 ? 0 : workspace_bytes(sdk::numel(logits) / vocabulary);
}

std::string token_position(std::span<const std::int64_t> tokens_shape, std::int64_t row) {
  std::vector<std::int64_t> index(tokens_shape.size());
  for (std::size_t axis = index.size(); axis-- > 0;) {
    index[axis] = row % tokens_shape[axis];
    row /= tokens_shape[axis];
  }
  return sdk::shape_string(index);
}

TokenWeights::TokenWeights(const LogitRows& logits, const DLTensor* mask, const DLTensor* weight)
    : rows_(logits.rows()) {
  if (mask != nullptr) {
    check_tokens(logits, *mask, GRAFT_SIGNAL_LOSS_MASK);
    mask_ = sdk::data<const std::uint8_t>(*mask, GRAFT_SIGNAL_LOSS_MASK).data();
  }
  if (weight == nullptr) return;
  check_tokens(logits, *weight, GRAFT_SIGNAL_TOKEN_WEIGHT);
  weight_ = sdk::data<const float>(*weight, GRAFT_SIGNAL_TOKEN_WEIGHT).data();
  for (std::int64_t row = 0; row < rows_; ++row) {
    if (mask_ != nullptr && mask_[row] == 0) continue;
    if (!(weight_[row] >= 0) || std::isinf(weight_[row])) {
      throw bad_tensor(GRAFT_SIGNAL_TOKEN_WEIGHT,
                       sdk::cat("the weight at ", token_position(logits.tokens_shape(), row),
                                " is ", weight_[row], "; expected a finite number of at least 0"));
    }
  }
}

double TokenWeights::operator[](std::int64_t row) const {
  if (mask_ != nullptr && mask_[row] == 0) return 0;
  return weight_ == nullptr ? 1.0 : static_cast<double>(weight_[row]);
}

void write_loss(const DLTensor& loss, double value) {
  if (sdk::numel(loss) != 1) {
    throw bad_tensor("loss", sdk::cat("expected one number, got shape ", sdk::shape_string(loss)));
  }
  sdk::data<float>(loss, "loss")[0] = static_cast<float>(value);
}

void report_metric(const sdk::ObjectiveArgs& args, const char* name, double value) {
  auto number = static_cast<float>(value);
  const DLTensor scalar{&number, {kDLCPU, 0}, 0, sdk::float32, nullptr, nullptr, 0};
  args.metric(name, scalar);
}

}  // namespace graft::objectives
