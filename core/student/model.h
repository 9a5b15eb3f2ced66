#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/student/token_mixer.h"
#include "core/teacher/backbone.h"

namespace graft {

// A transformer of which any subset of attention blocks is replaced by token mixers: none of them
// for a teacher, some for a hybrid, all for a linear student. Backbone and mixers are shared, so
// that several students of one teacher cost only their mixers. Not thread-safe.
class Model {
 public:
  using Mixers = std::map<std::int64_t, std::shared_ptr<TokenMixer>>;
  explicit Model(std::shared_ptr<const Backbone> backbone, Mixers mixers = {});

  // The same weights for a second thread.
  Model replica() const;

  const Backbone& backbone() const { return *backbone_; }
  const ModelConfig& config() const { return backbone_->config(); }
  const Mixers& mixers() const { return mixers_; }

  // ids [B,T] i64 -> the rows before the output projection [B,T,D]. pad_mask [B,T] u8, 1 = real,
  // may be undefined; with it positions count real tokens only.
  at::Tensor hidden(const at::Tensor& ids, const at::Tensor& pad_mask = {}) const;
  // rows [...,D] -> [...,V]
  at::Tensor logits(const at::Tensor& rows) const { return backbone_->logits(rows); }

 private:
  std::shared_ptr<const Backbone> backbone_;
  Mixers mixers_;
};

// One batch of sequences being generated: keys and values of the attention layers, states of the
// mixers. Holds no state of the model's, so that two decoders do not see each other.
class Decoder {
 public:
  // Borrows the model.
  Decoder(const Model& model, std::int64_t batch);

  // Feeds ids [B,T] i64 behind what was fed before; prompts of unequal length are padded on the
  // left and pad_mask [B,T] u8 says which tokens are real. Returns the logits of the last position
  // [B,V].
  at::Tensor feed(const at::Tensor& ids, const at::Tensor& pad_mask = {});
  // The same, but returns the rows before the output projection for every token, [B,T,D].
  at::Tensor feed_rows(const at::Tensor& ids, const at::Tensor& pad_mask = {});

  // A decoder that goes its own way from here.
  Decoder fork() const;

  // Tokens fed so far, pads included.
  std::int64_t length() const { return length_; }
  // Memory of keys, values and states.
  std::uint64_t bytes() const;

 private:
  at::Tensor run(const at::Tensor& ids, const at::Tensor& pad_mask);
  at::Tensor positions_for(const at::Tensor& ids, const at::Tensor& pad_mask);

  const Model& model_;
  KvCache cache_;
  std::map<std::int64_t, MixerState> states_;
  at::Tensor mask_;  // [B, length] u8 of everything fed, undefined while all is real
  at::Tensor next_;  // [B] i64: position of each row's next token
  std::int64_t batch_ = 0, length_ = 0;
};

}  // namespace graft
