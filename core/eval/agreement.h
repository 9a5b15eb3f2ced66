#pragma once

#include <cstdint>
#include <span>

#include "core/student/model.h"

namespace graft {

// How often a student says what its teacher says. Perplexity can look fine while generation is
// lost, so one of these stands beside every perplexity.
struct Agreement {
  double greedy =
      0;  // free-running: share of positions where the two greedy continuations have the same token
  double forced = 0;  // share of positions where the student's first choice behind the teacher's
                      // own continuation is the teacher's
};

// What the teacher says, made once for many students.
struct TeacherContinuations {
  at::Tensor prompts;        // [N,P] i64
  at::Tensor continuations;  // [N,T] i64, greedy
};

// Where spread_prompts' prompts begin in a text of `total` tokens.
std::vector<std::int64_t> prompt_starts(std::int64_t total, std::int64_t skip, std::int64_t count,
                                        std::int64_t length, const std::string& what);

// N prompts of `length` tokens, spread evenly over the text behind its first `skip` tokens. Throws
// Error(input) when the text is too short for them not to overlap.
at::Tensor spread_prompts(std::span<const std::int32_t> tokens, std::int64_t skip,
                          std::int64_t count, std::int64_t length, const std::string& what);

TeacherContinuations continue_greedily(const Model& teacher, const at::Tensor& prompts,
                                       std::int64_t tokens);
Agreement agreement(const Model& student, const TeacherContinuations& teacher);

}  // namespace graft
