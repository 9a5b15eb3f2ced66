#include "core/job/student_view.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/eval/generate.h"

namespace graft {
namespace {

constexpr std::int64_t kSamples = 3;

}  // namespace

StudentView::StudentView(Tokenizer tokenizer, std::span<const std::int32_t> held_out,
                         std::string what)
    : tokenizer_(std::move(tokenizer)), held_out_(held_out), what_(std::move(what)) {}

const TeacherContinuations* StudentView::continuations(const Model& teacher) {
  if (static_cast<std::int64_t>(held_out_.size()) < prompts * prompt_length) return nullptr;
  if (!teacher_)
    teacher_ = continue_greedily(
        teacher, spread_prompts(held_out_, 0, prompts, prompt_length, what_), continuation);
  return &*teacher_;
}

std::optional<Agreement> StudentView::agreement_with(const Model& teacher, const Model& student) {
  const TeacherContinuations* const said = continuations(teacher);
  if (said == nullptr) return std::nullopt;
  return agreement(student, *said);
}

nlohmann::ordered_json StudentView::samples(const Model& teacher, const Model& student) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  const TeacherContinuations* const said = continuations(teacher);
  if (said == nullptr) return list;
  const at::Tensor first = said->prompts.narrow(0, 0, std::min(kSamples, prompts));
  const at::Tensor answers = greedy(student, first, continuation);
  for (std::int64_t i = 0; i < first.size(0); ++i)
    list.push_back({{"prompt", text_of(first[i])},
                    {"teacher", text_of(said->continuations[i])},
                    {"student", text_of(answers[i])}});
  return list;
}

std::string StudentView::protocol() const {
  return std::to_string(prompts) + " prompts of " + std::to_string(prompt_length) + " tokens, " +
         std::to_string(continuation) + " greedy tokens each";
}

std::string StudentView::text_of(const at::Tensor& ids) const {
  const at::Tensor row = ids.contiguous();
  const auto* const begin = row.const_data_ptr<std::int64_t>();
  const std::vector<std::int32_t> tokens(begin, begin + row.numel());
  // Half a character at either end is shown as what decoders show; JSON wants UTF-8.
  return tokenizer_.decode(tokens);
}

}  // namespace graft
