#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>

#include "core/eval/agreement.h"
#include "core/text/tokenizer.h"

namespace graft {

// How a student of a training run speaks, beside its perplexity: the same few prompts out of the
// held-out text each time, and what the teacher makes of them.
class StudentView {
 public:
  static constexpr std::int64_t prompts = 8, prompt_length = 32, continuation = 24;

  // Borrows the text. `what` names it. A text too short for the prompts is no error: then there is
  // nothing to see.
  StudentView(Tokenizer tokenizer, std::span<const std::int32_t> held_out, std::string what);

  // Runs the teacher the first time. None where the text is too short.
  std::optional<Agreement> agreement_with(const Model& teacher, const Model& student);
  // {"LAYER": {"half_life": [...], "write_gate": [...]}}, means over held-out tokens for each head
  // of the mixers that have such taps; null where nothing is ever forgotten. Empty where none has.
  nlohmann::ordered_json gates(const Model& student) const;
  // [{"prompt", "teacher", "student"}], greedy, of the first prompts; empty where there are none.
  nlohmann::ordered_json samples(const Model& teacher, const Model& student);

  // In words: how many prompts of which length.
  std::string protocol() const;

 private:
  const TeacherContinuations* continuations(const Model& teacher);
  std::string text_of(const at::Tensor& ids) const;

  Tokenizer tokenizer_;
  std::span<const std::int32_t> held_out_;
  std::string what_;
  std::optional<TeacherContinuations> teacher_;
};

}  // namespace graft
