#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/eval/agreement.h"
#include "core/eval/needle.h"
#include "core/student/model.h"

namespace graft {

struct CompareOptions {
  std::int64_t context = 512;  // tokens of a window
  std::int64_t windows = 16;   // the first this many of the text; 0 = all of it
  std::int64_t prompts = 16, prompt_length = 48, continuation = 32;  // 0 prompts: none
  NeedleOptions needle;                                              // no lengths: none
  std::vector<std::int64_t> speed_contexts{128, 512, 1024};          // empty: none
  std::int64_t speed_tokens = 32;                                    // decoded behind each
};

// Likelihood a model loses against the teacher at positions first to last of a window (0-based).
struct PositionBucket {
  std::int64_t first = 0, last = 0;
  double bits_lost = 0;  // per token
};

// One sequence being generated.
struct SpeedFigure {
  std::int64_t context = 0;       // tokens behind it
  double prefill_per_second = 0;  // tokens of the context
  double decode_per_second = 0;   // tokens after it
  std::uint64_t state_bytes = 0;  // keys, values and states at the end
};

struct ModelFigures {
  std::string name;
  double perplexity = 0;
  double kl = 0;               // KL(teacher || model), nats per token
  double agreement = 0;        // share of positions of the text with the teacher's first choice
  std::vector<double> greedy;  // by place in the greedy continuations: share equal to the teacher's
  std::vector<PositionBucket> bits_lost;
  std::vector<NeedleFigure> needle;
  std::vector<SpeedFigure> speed;
};

// What students keep of their teacher, each measured on the same windows, prompts and needles.
class Comparison {
 public:
  // Reads the windows, prompts and needles and runs the teacher on them. Borrows the teacher.
  // `should_stop` ends the work with Error(interrupted). Throws Error(input) naming the text when
  // it has not one window, Error(usage) for contexts beyond the teacher's.
  Comparison(const Model& teacher, const Tokenizer& tokenizer, std::span<const std::int32_t> tokens,
             const std::string& what, const CompareOptions& options,
             std::function<bool()> should_stop = {});

  // Of a student, or of the teacher itself. Throws Error(input) when the vocabularies differ.
  ModelFigures measure(const Model& model, const std::string& name) const;

  std::int64_t windows() const { return static_cast<std::int64_t>(windows_.size()); }

 private:
  struct Window {
    at::Tensor ids, teacher_rows;  // [1,T], [1,T,D]
  };
  void predictions(const Model& model, ModelFigures& figures) const;
  void greedy_agreement(const Model& model, ModelFigures& figures) const;
  SpeedFigure speed(const Model& model, std::int64_t context) const;
  void check_stop() const;

  const Model& teacher_;
  const CompareOptions options_;
  std::span<const std::int32_t> tokens_;
  std::function<bool()> should_stop_;
  std::vector<Window> windows_;
  TeacherContinuations continuations_;
  std::vector<NeedleCase> needles_;
};

// Buckets [1,1], [2,3], [4,7], ... of a window's positions: the first is never predicted.
std::vector<PositionBucket> position_buckets(std::int64_t context);

std::string to_json(const std::vector<ModelFigures>& models, const CompareOptions& options,
                    const std::map<std::string, std::string>& protocol);

}  // namespace graft
