#include "core/teacher/kv_cache.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/teacher/shape_of.h"

namespace graft {

KvCache::KvCache(int64_t n_layers, int64_t batch, int64_t capacity)
    : batch_(batch), capacity_(std::max<int64_t>(capacity, 1)) {
  if (n_layers < 0 || batch < 1) {
    fail(ErrorKind::internal, "a cache for " + std::to_string(n_layers) + " layers and batch " +
                                  std::to_string(batch) + " makes no sense");
  }
  layers_.resize(static_cast<std::size_t>(n_layers));
}

KvCache::Layer& KvCache::at(int64_t layer) {
  if (layer < 0 || layer >= static_cast<int64_t>(layers_.size())) {
    fail(ErrorKind::internal, "the cache has no layer " + std::to_string(layer));
  }
  return layers_[static_cast<std::size_t>(layer)];
}

int64_t KvCache::length(int64_t layer) const {
  return const_cast<KvCache*>(this)->at(layer).length;
}

int64_t KvCache::length() const {
  int64_t longest = 0;
  for (const Layer& layer : layers_) longest = std::max(longest, layer.length);
  return longest;
}

uint64_t KvCache::bytes() const {
  uint64_t total = 0;
  for (const Layer& layer : layers_) {
    if (layer.k.defined()) total += layer.k.nbytes() + layer.v.nbytes();
  }
  return total;
}

void KvCache::reserve(Layer& layer, const at::Tensor& like, int64_t tokens) const {
  const int64_t have = layer.k.defined() ? layer.k.size(2) : 0;
  if (tokens <= have) return;
  const int64_t capacity = std::max({tokens, 2 * have, capacity_});
  const auto grown = [&](const at::Tensor& old) {
    at::Tensor buffer = at::empty({batch_, like.size(1), capacity, like.size(3)}, like.options());
    if (layer.length > 0) {
      buffer.narrow(2, 0, layer.length).copy_(old.narrow(2, 0, layer.length));
    }
    return buffer;
  };
  layer.k = grown(layer.k);
  layer.v = grown(layer.v);
}

std::pair<at::Tensor, at::Tensor> KvCache::append(int64_t index, const at::Tensor& k,
                                                  const at::Tensor& v) {
  const at::NoGradGuard no_grad;
  Layer& layer = at(index);
  const bool fits =
      k.dim() == 4 && k.sizes() == v.sizes() && k.size(0) == batch_ &&
      k.scalar_type() == v.scalar_type() &&
      (!layer.k.defined() || (layer.k.size(1) == k.size(1) && layer.k.size(3) == k.size(3) &&
                              layer.k.scalar_type() == k.scalar_type()));
  if (!fits) {
    fail(ErrorKind::internal, "keys " + shape_of(k) + " and values " + shape_of(v) +
                                  " do not fit the cache of layer " + std::to_string(index) +
                                  ", batch " + std::to_string(batch_) +
                                  (layer.k.defined() ? ", which holds " + shape_of(layer.k) : ""));
  }
  const int64_t added = k.size(2);
  reserve(layer, k, layer.length + added);
  layer.k.narrow(2, layer.length, added).copy_(k.detach());
  layer.v.narrow(2, layer.length, added).copy_(v.detach());
  layer.length += added;
  return {layer.k.narrow(2, 0, layer.length), layer.v.narrow(2, 0, layer.length)};
}

KvCache KvCache::clone() const {
  KvCache copy = *this;
  for (Layer& layer : copy.layers_) {
    if (!layer.k.defined()) continue;
    layer.k = layer.k.clone();
    layer.v = layer.v.clone();
  }
  return copy;
}

void KvCache::truncate(int64_t length) {
  if (length < 0) fail(ErrorKind::internal, "a cache cannot be cut to " + std::to_string(length));
  for (Layer& layer : layers_) layer.length = std::min(layer.length, length);
}

}  // namespace graft
