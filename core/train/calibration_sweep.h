#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "core/abi/component.h"
#include "core/student/token_mixer.h"
#include "core/teacher/backbone.h"
#include "core/train/convert.h"
#include "core/train/init_run.h"

namespace graft {

// 1/|residual|^2 of each token [N,T], mean 1: an error counts by what it does to the stream.
at::Tensor residual_weights(const at::Tensor& residual);

// What a layer is converted from; stays as it is when the sweep goes on.
struct SweepLayer {
  at::Tensor x, y, residual;  // [N,T,D]: the block's input, its target, the stream behind it
  LayerSignals signals;       // of the initializer's sequences
};

// Time of the passes over the initializer's sequences, and over those only calibration sees.
struct SweepSeconds {
  double init = 0, rest = 0;
};

// The residual stream of the calibration tokens on its way through the teacher, and beside it,
// where StreamOptions say so, that of the student converted so far. For each layer in turn:
// run_attention(), layer() if it is converted, finish_layer(), advance_student().
class CalibrationSweep {
 public:
  // `windows` [N,T] i64, of which the initializer sees the first n_init. Borrows the teacher.
  CalibrationSweep(const Backbone& teacher, const at::Tensor& windows,
                   const Initializer& initializer, std::int64_t n_init,
                   const StreamOptions& options);

  // Runs the teacher's attention block. `signals_wanted`: keep the block's input and head contexts.
  void run_attention(std::int64_t layer, bool signals_wanted);
  // What the layer is converted from: the teacher's input and output, or the student's input and
  // the teacher's output with what would bring the stream back to the teacher's.
  SweepLayer layer() const;
  // Takes the teacher's stream to the next layer ...
  void finish_layer();
  // ... and the student's, through the mixer or, without one, the teacher's attention. A corrected
  // output projection of the MLP goes to `backbone`.
  void advance_student(TokenMixer* mixer, std::map<std::string, at::Tensor>& backbone);

  SweepSeconds seconds() const { return seconds_; }

 private:
  template <typename Work>
  void for_batches(Work&& work);
  void keep_context(std::int64_t first, const at::Tensor& context);
  at::Tensor stream_error(const at::Tensor& teacher, const at::Tensor& student) const;
  at::Tensor corrected_mlp_output(const at::Tensor& y) const;

  const Backbone& teacher_;
  const StreamOptions options_;
  std::int64_t n_init_ = 0, context_limit_ = 0, layer_ = 0;
  bool wants_context_ = false, strayed_ = false;
  at::Tensor h_, x_, y_, context_;  // the teacher's
  at::Tensor student_;              // the student's stream, undefined where it is not followed
  SweepSeconds seconds_;
};

}  // namespace graft
