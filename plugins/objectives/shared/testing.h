// For tests of objectives on logits: tensors of any float format, one call across the ABI.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plugins/testing/plugin_under_test.h"

namespace graft::testing {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Bits of a 16-bit float with `mantissa_bits`, and back, by its definition: slow and plain.
inline double decode16(std::uint16_t bits, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7FFF) >> mantissa_bits,
            mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? kNan : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

inline std::uint16_t encode16(double x, int mantissa_bits) {
  const int bias = (1 << (14 - mantissa_bits)) - 1;
  const int infinity = ((2 * bias + 1) << mantissa_bits);
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return static_cast<std::uint16_t>(infinity | (1 << (mantissa_bits - 1)));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | infinity);
  if (x == 0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::max(std::ilogb(x), 1 - bias);
  // nearbyint: to the nearest, ties to even
  const auto mantissa =
      static_cast<int>(std::nearbyint(std::ldexp(std::fabs(x), mantissa_bits - exponent)));
  const int bits = ((exponent + bias - 1) << mantissa_bits) + mantissa;
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

// A tensor of numbers of one format, filled from float64 and read back as float64.
class Numbers {
 public:
  Numbers() = default;
  Numbers(std::vector<std::int64_t> shape, const std::vector<double>& values,
          DLDataType dtype = sdk::float32)
      : shape_(std::move(shape)), dtype_(dtype), bytes_(values.size() * (dtype.bits / 8)) {
    for (std::size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }
  static Numbers filled(std::vector<std::int64_t> shape, double value,
                        DLDataType dtype = sdk::float32) {
    std::size_t n = 1;
    for (const std::int64_t size : shape) n *= static_cast<std::size_t>(size);
    return {std::move(shape), std::vector<double>(n, value), dtype};
  }

  bool there() const { return !shape_.empty() || !bytes_.empty(); }
  std::size_t size() const { return bytes_.size() / (dtype_.bits / 8); }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  void set(std::size_t i, double value) {
    if (sdk::same_dtype(dtype_, sdk::float32)) {
      put(i, static_cast<float>(value));
    } else if (sdk::same_dtype(dtype_, sdk::float64)) {
      put(i, value);
    } else if (dtype_.code == kDLInt || dtype_.code == kDLUInt) {
      dtype_.bits == 64 ? put(i, static_cast<std::int64_t>(value))
                        : put(i, static_cast<std::uint8_t>(value));
    } else {
      put(i, encode16(value, mantissa_bits()));
    }
  }
  double operator[](std::size_t i) const {
    if (sdk::same_dtype(dtype_, sdk::float32)) return static_cast<double>(get<float>(i));
    if (sdk::same_dtype(dtype_, sdk::uint8)) return get<std::uint8_t>(i);
    return decode16(get<std::uint16_t>(i), mantissa_bits());
  }
  std::vector<double> values() const {
    std::vector<double> all(size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = (*this)[i];
    return all;
  }

  // NULL when this is no tensor.
  DLTensor* c() {
    if (!there()) return nullptr;
    strides_.assign(shape_.size(), 1);
    for (std::size_t i = shape_.size(); i-- > 1;) strides_[i - 1] = strides_[i] * shape_[i];
    dl_ = {bytes_.empty() ? nullptr : bytes_.data(),
           {kDLCPU, 0},
           static_cast<int32_t>(shape_.size()),
           dtype_,
           shape_.data(),
           strides_.data(),
           0};
    return &dl_;
  }

 private:
  int mantissa_bits() const { return dtype_.code == kDLBfloat ? 7 : 10; }
  template <class T>
  void put(std::size_t i, T value) {
    std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
  }
  template <class T>
  T get(std::size_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
    return value;
  }

  std::vector<std::int64_t> shape_, strides_;
  DLDataType dtype_ = sdk::float32;
  std::vector<char> bytes_;
  DLTensor dl_{};
};

inline std::vector<double> normals(std::size_t n, unsigned seed, double deviation = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(0, deviation);
  std::vector<double> values(n);
  for (double& value : values) value = normal(engine);
  return values;
}

// One run of an objective whose signals are student.logits, `other`, loss_mask and token_weight.
struct LogitCall {
  Numbers student, other, mask, weight;
  Numbers grad;  // as it was before; none: not wanted
  double grad_scale = 1;

  double loss = kNan;  // results
  std::map<std::string, double> metrics;

  Outcome run(graft_objective& objective) {
    Numbers loss_out({1}, {kNan});
    const DLTensor* const signals[] = {student.c(), other.c(), mask.c(), weight.c()};
    DLTensor* const grads[] = {grad.c(), nullptr, nullptr, nullptr};
    graft_objective_args args{};
    args.struct_size = sizeof args;
    args.n_signals = 4;
    args.signals = signals;
    args.grads = grads;
    args.loss = loss_out.c();
    args.grad_scale = grad_scale;
    args.metric_ctx = this;
    args.metric = [](void* ctx, const char* name, const DLTensor* scalar) {
      static_cast<LogitCall*>(ctx)->metrics[name] =
          static_cast<double>(*static_cast<const float*>(sdk::data_address(*scalar)));
    };
    graft_exec exec{};
    exec.struct_size = sizeof exec;
    exec.device_type = kDLCPU;
    metrics.clear();
    return outcome_of([&](graft_error* error) {
      graft_status status = objective.v->workspace(&objective, &args, &exec.workspace_bytes, error);
      if (status != GRAFT_OK) return status;
      std::vector<std::uint64_t> workspace(exec.workspace_bytes / 8 + 1, ~std::uint64_t{0});
      exec.workspace = exec.workspace_bytes == 0 ? nullptr : workspace.data();
      status = objective.v->run(&objective, &exec, &args, error);
      loss = loss_out[0];
      return status;
    });
  }
};

inline std::shared_ptr<graft_objective> make_objective(
    const PluginUnderTest& plugin, const std::map<std::string, sdk::Value>& options = {}) {
  std::shared_ptr<graft_objective> made;
  const Outcome outcome =
      plugin.create<graft_objective_factory>(GRAFT_EXT_OBJECTIVE_FACTORY, options, &made);
  EXPECT_TRUE(outcome.ok()) << outcome.where << ": " << outcome.message;
  return made;
}

// Three threads, as a host might give them: pieces of `grain`, dealt out in turn.
inline const graft_host_parallel* three_threads() {
  static const graft_host_parallel table{
      sizeof(graft_host_parallel), 0, [](const graft_host*) -> int32_t { return 3; },
      [](const graft_host*, int64_t begin, int64_t end, int64_t grain,
         void (*fn)(void*, int64_t, int64_t, int32_t), void* arg) {
        std::vector<std::thread> threads;
        for (int32_t worker = 0; worker < 3; ++worker) {
          threads.emplace_back([=] {
            for (int64_t at = begin + worker * grain; at < end; at += 3 * grain)
              fn(arg, at, std::min(end, at + grain), worker);
          });
        }
        for (std::thread& thread : threads) thread.join();
      }};
  return &table;
}

// log softmax(x / tau) by its definition, in float64. -inf stays -inf.
inline std::vector<double> log_softmax(const std::vector<double>& x, double tau = 1) {
  double most = -kInf, sum = 0;
  for (const double value : x) most = std::max(most, value / tau);
  for (const double value : x) sum += std::exp(value / tau - most);
  std::vector<double> out;
  for (const double value : x) out.push_back(value / tau - most - std::log(sum));
  return out;
}

inline std::vector<double> row_of(const Numbers& logits, std::size_t row) {
  const auto vocabulary = static_cast<std::size_t>(logits.shape().back());
  std::vector<double> values(vocabulary);
  for (std::size_t j = 0; j < vocabulary; ++j) values[j] = logits[row * vocabulary + j];
  return values;
}

inline std::size_t rows_of(const Numbers& logits) {
  return logits.size() / static_cast<std::size_t>(logits.shape().back());
}

}  // namespace graft::testing
