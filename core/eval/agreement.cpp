#include "core/eval/agreement.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/eval/generate.h"

namespace graft {

std::vector<std::int64_t> prompt_starts(std::int64_t total, std::int64_t skip, std::int64_t count,
                                        std::int64_t length, const std::string& what) {
  // A text with nothing behind the skipped part is used from its start.
  const std::int64_t begin = total - skip >= count * length ? skip : 0;
  const std::int64_t room = total - begin;
  if (room < count * length)
    fail(ErrorKind::input, "text " + quoted(what) + " has " + std::to_string(total) + " tokens; " +
                               std::to_string(count) + " prompts of " + std::to_string(length) +
                               " tokens need " + std::to_string(count * length) +
                               " (agreement.prompts, agreement.prompt_length)");
  std::vector<std::int64_t> starts;
  for (std::int64_t i = 0; i < count; ++i) starts.push_back(begin + i * (room / count));
  return starts;
}

at::Tensor spread_prompts(std::span<const std::int32_t> tokens, std::int64_t skip,
                          std::int64_t count, std::int64_t length, const std::string& what) {
  at::Tensor prompts = at::empty({count, length}, at::kLong);
  auto* out = prompts.data_ptr<std::int64_t>();
  for (const std::int64_t start :
       prompt_starts(static_cast<std::int64_t>(tokens.size()), skip, count, length, what))
    out = std::copy_n(tokens.begin() + start, length, out);
  return prompts;
}

TeacherContinuations continue_greedily(const Model& teacher, const at::Tensor& prompts,
                                       std::int64_t tokens) {
  return {prompts, greedy(teacher, prompts, tokens)};
}

Agreement agreement(const Model& student, const TeacherContinuations& teacher) {
  c10::InferenceMode inference;
  const std::int64_t tokens = teacher.continuations.size(1);
  Agreement result;
  if (tokens == 0 || teacher.prompts.size(0) == 0) return result;
  // Both read the prompts first.
  Decoder free(student, teacher.prompts.size(0));
  const at::Tensor first = free.feed(teacher.prompts);
  Decoder forced = free.fork();
  result.greedy =
      greedy(free, first, tokens).eq(teacher.continuations).to(at::kDouble).mean().item<double>();

  const at::Tensor& said = teacher.continuations;
  double equal = first.argmax(-1).eq(said.select(1, 0)).sum().item<double>();
  if (tokens > 1) {
    const at::Tensor rows = forced.feed_rows(said.narrow(1, 0, tokens - 1));
    for (std::int64_t i = 0; i < rows.size(0); ++i)
      equal += student.logits(rows[i])
                   .argmax(-1)
                   .eq(said[i].narrow(0, 1, tokens - 1))
                   .sum()
                   .item<double>();
  }
  result.forced = equal / static_cast<double>(said.size(0) * tokens);
  return result;
}

}  // namespace graft
