#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace graft {

// Keys and values of the tokens seen so far, one pair of buffers per layer, float32 or bfloat16 as
// they come. Buffers are made at a layer's first append (a layer that never appends costs nothing)
// and grow by doubling. Not for training: what is kept is detached.
class KvCache {
 public:
  // `capacity`: tokens to make room for at the first append; more is made as needed.
  KvCache(int64_t n_layers, int64_t batch, int64_t capacity = 256);

  int64_t batch() const { return batch_; }
  // Tokens kept in `layer`; 0 for one that never appended.
  int64_t length(int64_t layer) const;
  // The longest layer's length: where the next token stands.
  int64_t length() const;
  uint64_t bytes() const;

  // Appends k and v [B, H_kv, T, d] and returns all that is kept, [B, H_kv, length, d], as views
  // that hold until the next append to this layer. Error(internal) when a shape does not fit.
  std::pair<at::Tensor, at::Tensor> append(int64_t layer, const at::Tensor& k, const at::Tensor& v);

  // The same tokens in buffers of its own.
  KvCache clone() const;

  // Forgets all but the first `length` tokens of every layer (a layer shorter than that is left).
  void truncate(int64_t length);
  void reset() { truncate(0); }

 private:
  struct Layer {
    at::Tensor k, v;  // [B, H_kv, capacity, d]
    int64_t length = 0;
  };
  void reserve(Layer& layer, const at::Tensor& like, int64_t tokens) const;
  Layer& at(int64_t layer);

  int64_t batch_;
  int64_t capacity_;
  std::vector<Layer> layers_;
};

}  // namespace graft
