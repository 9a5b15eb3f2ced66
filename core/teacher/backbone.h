#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/safetensors.h"
#include "core/teacher/kv_cache.h"
#include "core/teacher/layout.h"
#include "core/teacher/model_config.h"

namespace graft {

// In what the linear projections and the attention product are computed. Norms, RoPE, softmax, the
// residual stream and the parameters themselves are float32 in both.
enum class Compute { float32, bfloat16 };

struct BackboneOptions {
  Compute compute = Compute::float32;
  // Layers whose attention block somebody else runs (a student's folder): their attention tensors
  // are not expected, and whatever the checkpoint holds below the layer's attention prefix is left
  // to the caller; see Backbone::left_over().
  std::set<int64_t> replaced_layers;
  // More names that are the caller's business, wherever they stand. May be empty.
  std::function<bool(const std::string& name)> is_foreign;
};

// A parameter under its checkpoint name.
struct Parameter {
  at::Tensor value;  // float32, contiguous; may be set to require a gradient and updated in place
  DType file_dtype;  // what the checkpoint stores it as, and what a written student stores again
};

// The parameter as its checkpoint stores it, contiguous. A value beyond float16's range becomes
// Inf.
at::Tensor as_stored(const Parameter& parameter);

// A parameter of an attention block by role, for initializers.
struct RoleTensor {
  RoleLayout layout;
  at::Tensor
      tensor;  // float32, contiguous, on the CPU; shares memory with the parameter if not fused
};

struct AttentionCall {
  // [B,T] int64. Undefined: the tokens follow those in the cache, 0, 1, 2... without one; with a
  // pad_mask only real tokens are counted.
  at::Tensor positions;
  // [B,S] bool or uint8, 1 = real, over the cached tokens and the T new ones; undefined: all real.
  // A padded token is seen by no other; what it computes itself is finite and means nothing.
  at::Tensor pad_mask;
  KvCache* cache = nullptr;  // keys and values of this call are appended
  bool want_context = false;
  bool want_probs = false;  // materialises [B,H,T,S]: for short calibration sequences
};

struct AttentionResult {
  at::Tensor y;        // [B,T,D] the block's output, after the output projection
  at::Tensor context;  // [B,T,H,d] attention-weighted values before it, if wanted
  at::Tensor probs;    // [B,H,T,S] float32, if wanted; rows sum to 1 over s <= t
};

// A decoder-only transformer (Llama, Qwen2, Qwen3, GPT-NeoX) in pieces: the residual stream h
// [B,T,D] is carried by the caller, so that any attention block can be replaced.
//
//   h = embed(ids)
//   for each layer:  x = block_input(layer, h);  y = attention(layer, x).y;  h =
//   finish_block(layer, h, y) logits(final_norm(h))
//
// All activations are float32. Gradients flow through every piece unless the caller's mode forbids
// it (c10::InferenceMode, at::NoGradGuard); parameters do not require gradients until told to.
// Forward calls may run from several threads at once as long as nobody changes a parameter.
class Backbone {
 public:
  // Reads FOLDER, a Hugging Face checkpoint. Error(input) names file and tensor: one that is
  // missing (with the nearest name there is), that nobody knows, of the wrong shape or dtype, with
  // NaN or Inf. Tied embeddings: a tied model may also store the output projection if it equals the
  // embedding; an untied one must store it.
  static Backbone load(const std::filesystem::path& folder, const BackboneOptions& options = {});
  static Backbone load(const ModelConfig& config, const Checkpoint& checkpoint,
                       const BackboneOptions& options = {});

  Backbone(Backbone&&) noexcept;
  Backbone& operator=(Backbone&&) noexcept;
  ~Backbone();

  // The same model with other values for the parameters in `changed`, by checkpoint name, which are
  // stored as float32: rounded to the checkpoint's type they would be another model. All others are
  // shared. Error(internal) for a name or shape that is not its own.
  Backbone with(const std::map<std::string, at::Tensor>& changed) const;

  const ModelConfig& config() const;
  Compute compute() const;
  // Of the calls from now on. Not while others run.
  void set_compute(Compute compute);
  bool is_replaced(int64_t layer) const;
  // By checkpoint name; a tied output projection appears once, as the embedding.
  std::map<std::string, Parameter>& parameters();
  const std::map<std::string, Parameter>& parameters() const;
  // Tensors of the checkpoint that BackboneOptions leaves to the caller, sorted.
  const std::vector<std::string>& left_over() const;
  int64_t parameter_count() const;

  // ids [B,T] int64 -> [B,T,D]. Error(input) names an id outside the vocabulary.
  at::Tensor embed(const at::Tensor& ids) const;
  // The norm before the attention block: h [B,T,D] -> x [B,T,D].
  at::Tensor block_input(int64_t layer, const at::Tensor& h) const;
  // The teacher's own block. Error(internal) for a replaced layer.
  AttentionResult attention(int64_t layer, const at::Tensor& x,
                            const AttentionCall& call = {}) const;
  // Adds the block's output y and the MLP to the stream, one after the other or in parallel as the
  // model does: -> h of the next layer.
  at::Tensor finish_block(int64_t layer, const at::Tensor& h, const at::Tensor& y) const;
  // What the last map of the MLP reads on the way: [B,T,mlp] float32. See mlp_output_name().
  at::Tensor mlp_inner(int64_t layer, const at::Tensor& h, const at::Tensor& y) const;
  at::Tensor final_norm(const at::Tensor& h) const;
  // rows [...,D] after final_norm -> [...,V] float32. Hand over only the rows that are needed: V is
  // large.
  at::Tensor logits(const at::Tensor& rows) const;

  // Runs in place of (or around) a layer's attention block: x -> y.
  using Block = std::function<at::Tensor(int64_t layer, const at::Tensor& x)>;
  // All of the above up to final_norm: ids [B,T] -> [B,T,D]. `block` is asked for every layer's
  // output when given, the layer's own attention with `call` otherwise.
  at::Tensor hidden(const at::Tensor& ids, const AttentionCall& call = {},
                    const Block& block = {}) const;

  // The parameters of a layer's attention block. Error(internal) for a replaced layer.
  std::vector<RoleTensor> layer_roles(int64_t layer) const;
  LayerInfo layer_info(int64_t layer) const { return LayerInfo(config(), layer); }
  KvCache make_cache(int64_t batch, int64_t capacity = 256) const;

 private:
  struct Impl;
  explicit Backbone(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace graft
