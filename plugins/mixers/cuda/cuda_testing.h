// What the tests of the CUDA kernels share: memory that a device can have a copy of, and where a
// test runs: on the host's executor or on a device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "block.h"
#include "core/checkpoint/safetensors.h"
#include "gdn_plain.h"

namespace graft::cuda {

// Everything a call reads and writes, in one piece, so that a device gets it in one copy.
class Arena {
 public:
  Arena() : bytes_(static_cast<std::byte*>(std::calloc(kSize, 1))) {}

  template <class T>
  T* make(int64_t n) {
    used_ = (used_ + 255) / 256 * 256;
    T* const out = reinterpret_cast<T*>(bytes_.get() + used_);
    used_ += static_cast<std::size_t>(n) * sizeof(T);
    EXPECT_LE(used_, kSize);
    return out;
  }
  // What nobody writes is found: it is no number.
  float* make_unwritten(int64_t n) {
    float* const out = make<float>(n);
    std::fill(out, out + n, std::numeric_limits<float>::quiet_NaN());
    return out;
  }
  std::byte* data() const { return bytes_.get(); }
  std::size_t used() const { return used_; }

 private:
  static constexpr std::size_t kSize = std::size_t{512}
                                       << 20;  // pages that are not used cost nothing
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> bytes_;
  std::size_t used_ = 0;
};

// Moves pointers into an arena to its copy.
template <class... T>
void shift_all(std::ptrdiff_t by, T*&... p) {
  const auto shift = [by]<class P>(P*& pointer) {
    if (pointer != nullptr)
      pointer = reinterpret_cast<P*>(reinterpret_cast<std::intptr_t>(pointer) + by);
  };
  (shift(p), ...);
}

// A tensor [batch, tokens, heads, width] of E in an arena. `gap` numbers lie between rows and are
// none of a kernel's business.
template <class E>
struct TestTensor {
  int batch = 1, heads = 1;
  int64_t tokens = 0;
  int width = 1, gap = 0;
  E* data = nullptr;

  static constexpr uint32_t kUntouched = 0x7fc1;  // of a bf16; a float has it in its upper half

  TestTensor() = default;
  TestTensor(Arena& arena, int batch_, int64_t tokens_, int heads_, int width_, int gap_)
      : batch(batch_), heads(heads_), tokens(tokens_), width(width_), gap(gap_) {
    data = arena.make<E>(size());
    for (int64_t i = 0; i < size(); ++i) data[i] = untouched();
  }
  int64_t row() const { return width + gap; }
  int64_t size() const { return batch * tokens * heads * row(); }
  E& at(int b, int64_t t, int h, int c) const {
    return data[((b * tokens + t) * heads + h) * row() + c];
  }
  template <class F>
  Tensor<F> tensor() const {
    return {data, tokens * heads * row(), heads * row(), row()};
  }
  template <class F>
  void fill(const F& f) {
    for (int b = 0; b < batch; ++b)
      for (int64_t t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h)
          for (int c = 0; c < width; ++c)
            at(b, t, h, c) = stored<E>(static_cast<float>(f(b, t, h, c)));
  }
  Numbers head(int b, int h) const {
    Numbers out;
    for (int64_t t = 0; t < tokens; ++t)
      for (int c = 0; c < width; ++c) out.push_back(number(at(b, t, h, c)));
    return out;
  }
  void expect_gaps_untouched(const std::string& what) const {
    const E mark = untouched();
    for (int64_t at = 0; at < size(); ++at) {
      if (at % row() < width) continue;
      ASSERT_EQ(std::memcmp(&data[at], &mark, sizeof(E)), 0)
          << what << " wrote between rows at " << at;
    }
  }
  static E untouched() {
    if constexpr (sizeof(E) == 2) {
      return {static_cast<uint16_t>(kUntouched)};
    } else {
      return bits_to_float(kUntouched << 16);
    }
  }
};

// The largest difference, over the largest number wanted (at least 1: gradients that cancel to zero
// have no size of their own); infinite where one is no number.
inline double error(const Numbers& got, const Numbers& wanted) {
  if (got.size() != wanted.size()) return std::numeric_limits<double>::infinity();
  double most = 0, size = 1;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) return std::numeric_limits<double>::infinity();
    most = std::max(most, std::abs(got[i] - wanted[i]));
    size = std::max(size, std::abs(wanted[i]));
  }
  return most / size;
}

inline Numbers numbers(const float* data, int64_t n) { return {data, data + n}; }

// ------------------------------------------------------------------ golden files

class Golden {
 public:
  explicit Golden(const std::string& mixer)
      : file_(SafetensorsFile::open(std::string(GRAFT_TEST_DATA "/") + mixer + ".safetensors")) {}

  std::vector<std::string> cases() const {
    std::set<std::string> names;
    for (const std::string& key : file_.names()) names.insert(key.substr(0, key.rfind('.')));
    return {names.begin(), names.end()};
  }
  bool has(const std::string& key) const { return file_.find(key) != nullptr; }
  bool is_bf16(const std::string& key) const { return file_.at(key).dtype == DType::BF16; }
  std::vector<int64_t> shape(const std::string& key) const { return file_.at(key).shape; }
  Numbers get(const std::string& key) const {
    const TensorView& view = file_.at(key);
    Numbers out(static_cast<std::size_t>(element_count(view)));
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (view.dtype == DType::F64) {
        out[i] = element<double>(view, i);
      } else if (view.dtype == DType::F32) {
        out[i] = element<float>(view, i);
      } else {
        EXPECT_EQ(view.dtype, DType::BF16) << key;
        out[i] = number(element<bf16>(view, i));
      }
    }
    return out;
  }

 private:
  template <class T>
  static T element(const TensorView& view, std::size_t i) {
    T out;
    std::memcpy(&out, view.data + i * sizeof(T), sizeof(T));
    return out;
  }
  SafetensorsFile file_;
};

// [outer, rows, columns] with the last two swapped.
inline Numbers swapped(const Numbers& x, int64_t rows, int64_t columns) {
  Numbers out(x.size());
  const auto r = static_cast<std::size_t>(rows), c = static_cast<std::size_t>(columns);
  for (std::size_t at = 0; at < x.size(); ++at) {
    const std::size_t outer = at / (r * c), i = at / c % r, j = at % c;
    out[outer * r * c + j * r + i] = x[at];
  }
  return out;
}

}  // namespace graft::cuda
