#include "core/student/model.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "core/base/error.h"

namespace graft {
namespace {

// [B,T] i64: each real token's place among the real ones; pads take their successor's.
at::Tensor positions_of(const at::Tensor& pad_mask) {
  return (pad_mask.to(at::kLong).cumsum(1) - 1).clamp_min(0);
}

}  // namespace

Model::Model(std::shared_ptr<const Backbone> backbone, Mixers mixers)
    : backbone_(std::move(backbone)), mixers_(std::move(mixers)) {
  for (const auto& [layer, mixer] : mixers_)
    if (layer < 0 || layer >= config().n_layers)
      fail(ErrorKind::internal, "a mixer for layer " + std::to_string(layer) + " of a model with " +
                                    std::to_string(config().n_layers) + " layers");
  for (std::int64_t layer = 0; layer < config().n_layers; ++layer)
    if (backbone_->is_replaced(layer) && !mixers_.contains(layer))
      fail(ErrorKind::internal,
           "layer " + std::to_string(layer) + " has neither attention nor a mixer");
}

Model Model::replica() const {
  Mixers mixers;
  for (const auto& [layer, mixer] : mixers_) mixers[layer] = mixer->replica();
  return Model(backbone_, std::move(mixers));
}

at::Tensor Model::hidden(const at::Tensor& ids, const at::Tensor& pad_mask) const {
  AttentionCall call;
  if (pad_mask.defined()) {
    call.pad_mask = pad_mask;
    call.positions = positions_of(pad_mask);
  }
  at::Tensor h = backbone_->embed(ids);
  for (std::int64_t layer = 0; layer < config().n_layers; ++layer) {
    const at::Tensor x = backbone_->block_input(layer, h);
    const auto mixer = mixers_.find(layer);
    const at::Tensor y = mixer != mixers_.end()
                             ? mixer->second->forward(x, call.positions, pad_mask).y
                             : backbone_->attention(layer, x, call).y;
    h = backbone_->finish_block(layer, h, y);
  }
  return backbone_->final_norm(h);
}

Decoder::Decoder(const Model& model, std::int64_t batch)
    : model_(model),
      cache_(model.backbone().make_cache(batch)),
      next_(at::zeros({batch}, at::kLong)),
      batch_(batch) {}

at::Tensor Decoder::positions_for(const at::Tensor& ids, const at::Tensor& pad_mask) {
  const std::int64_t tokens = ids.size(1);
  at::Tensor positions, advance;
  if (pad_mask.defined()) {
    positions = next_.unsqueeze(1) + positions_of(pad_mask);
    advance = pad_mask.to(at::kLong).sum(1);
  } else {
    positions = next_.unsqueeze(1) + at::arange(tokens, at::kLong);
    advance = at::full({batch_}, tokens, at::kLong);
  }
  // Once anything is padded, the whole history needs a mask.
  if (pad_mask.defined() || mask_.defined()) {
    const at::Tensor before = mask_.defined() ? mask_ : at::ones({batch_, length_}, at::kByte);
    const at::Tensor now = pad_mask.defined() ? pad_mask : at::ones({batch_, tokens}, at::kByte);
    mask_ = at::cat({before, now.to(at::kByte)}, 1);
  }
  next_ = next_ + advance;
  length_ += tokens;
  return positions;
}

at::Tensor Decoder::feed(const at::Tensor& ids, const at::Tensor& pad_mask) {
  at::NoGradGuard no_grad;
  const Backbone& backbone = model_.backbone();
  return backbone.logits(backbone.final_norm(run(ids, pad_mask).select(1, -1)));
}

at::Tensor Decoder::feed_rows(const at::Tensor& ids, const at::Tensor& pad_mask) {
  at::NoGradGuard no_grad;
  return model_.backbone().final_norm(run(ids, pad_mask));
}

Decoder Decoder::fork() const {
  Decoder copy = *this;
  copy.cache_ = cache_.clone();
  for (auto& [layer, state] : copy.states_)
    for (at::Tensor& tensor : state) tensor = tensor.clone();
  return copy;
}

// The residual stream behind the last layer.
at::Tensor Decoder::run(const at::Tensor& ids, const at::Tensor& pad_mask) {
  if (ids.dim() != 2 || ids.size(0) != batch_ || ids.size(1) == 0)
    fail(ErrorKind::usage, "a decoder for " + std::to_string(batch_) +
                               " sequences was fed ids that are not [" + std::to_string(batch_) +
                               ", at least 1]: a prompt needs at least one token");
  const Backbone& backbone = model_.backbone();
  AttentionCall call;
  call.positions = positions_for(ids, pad_mask);
  call.pad_mask = mask_;
  call.cache = &cache_;

  at::Tensor h = backbone.embed(ids);
  for (std::int64_t layer = 0; layer < model_.config().n_layers; ++layer) {
    const at::Tensor x = backbone.block_input(layer, h);
    const auto mixer = model_.mixers().find(layer);
    const at::Tensor y = mixer != model_.mixers().end()
                             ? mixer->second->advance(x, call.positions, pad_mask, states_[layer])
                             : backbone.attention(layer, x, call).y;
    h = backbone.finish_block(layer, h, y);
  }
  return h;
}

std::uint64_t Decoder::bytes() const {
  std::uint64_t total = cache_.bytes();
  for (const auto& [layer, state] : states_)
    for (const at::Tensor& tensor : state) total += tensor.nbytes();
  return total;
}

}  // namespace graft
