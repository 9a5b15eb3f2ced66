#include "core/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/text/utf8.h"

namespace graft::text {

namespace {

// Matching a run of n characters may take a few n steps; the rest is for patterns that backtrack.
constexpr std::uint32_t kBaseSteps = 10'000'000;
constexpr std::uint32_t kStepsPerByte = 64;
constexpr std::size_t kSmallestJitStack = std::size_t{32} << 10;
constexpr std::size_t kLargestJitStack = std::size_t{64} << 20;

struct MatchDataFree {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct MatchContextFree {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};
struct CompileContextFree {
  void operator()(pcre2_compile_context* context) const { pcre2_compile_context_free(context); }
};
struct JitStackFree {
  void operator()(pcre2_jit_stack* stack) const { pcre2_jit_stack_free(stack); }
};
struct CodeFree {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

}  // namespace

struct Regex::Workspace::State {
  std::unique_ptr<pcre2_match_data, MatchDataFree> match_data{pcre2_match_data_create(1, nullptr)};
  std::unique_ptr<pcre2_match_context, MatchContextFree> context{
      pcre2_match_context_create(nullptr)};
  std::unique_ptr<pcre2_jit_stack, JitStackFree> stack{
      pcre2_jit_stack_create(kSmallestJitStack, kLargestJitStack, nullptr)};
};

Regex::Workspace::Workspace() : state_(std::make_unique<State>()) {
  if (!state_->match_data || !state_->context) throw std::bad_alloc();
  // Without a stack of its own (no JIT on this machine) PCRE2 uses 32 KiB of ours.
  if (state_->stack) {
    pcre2_jit_stack_assign(state_->context.get(), nullptr, state_->stack.get());
  }
}
Regex::Workspace::~Workspace() = default;
Regex::Workspace::Workspace(Workspace&&) noexcept = default;
Regex::Workspace& Regex::Workspace::operator=(Workspace&&) noexcept = default;

struct Regex::Code {
  std::unique_ptr<pcre2_code, CodeFree> pcre2;
};

Regex::Regex(std::string_view pattern) : code_(std::make_unique<Code>()), pattern_(pattern) {
  const std::string translated = translate(pattern);
  const std::unique_ptr<pcre2_compile_context, CompileContextFree> context(
      pcre2_compile_context_create(nullptr));
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_->pcre2.reset(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                    &offset, context.get()));
  if (!code_->pcre2) {
    fail(ErrorKind::input, "the regular expression " + quoted(pattern) + " is not valid: " +
                               pcre2_message(error) + " (at byte " + std::to_string(offset) +
                               " of its translation " + quoted(translated) + ")");
  }
  // A machine without executable memory runs the interpreter: slower, with the same matches.
  pcre2_jit_compile(code_->pcre2.get(), PCRE2_JIT_COMPLETE);
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

std::optional<Regex::Match> Regex::search(std::string_view subject, std::size_t from,
                                          Workspace& workspace) const {
  Workspace::State& state = *workspace.state_;
  const std::uint64_t steps = kBaseSteps + std::uint64_t{kStepsPerByte} * subject.size();
  pcre2_set_match_limit(state.context.get(), static_cast<std::uint32_t>(std::min<std::uint64_t>(
                                                 steps, std::numeric_limits<uint32_t>::max())));
  const int result =
      pcre2_match(code_->pcre2.get(), reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(),
                  from, PCRE2_NO_UTF_CHECK, state.match_data.get(), state.context.get());
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0) {
    fail(ErrorKind::input, "the regular expression " + quoted(pattern_) +
                               " cannot be matched: " + pcre2_message(result));
  }
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(state.match_data.get());
  // \K inside a look-ahead can put the start behind the end.
  return Match{std::min(offsets[0], offsets[1]), offsets[1]};
}

std::optional<Regex::Match> Regex::Matches::next() {
  while (from_ <= subject_.size()) {
    const std::optional<Match> match = regex_.search(subject_, from_, workspace_);
    if (!match) {
      from_ = subject_.size() + 1;
      return std::nullopt;
    }
    if (match->begin == match->end && last_end_ == match->end) {
      from_ += from_ < subject_.size() ? character_length(subject_[from_]) : 1;
      continue;
    }
    from_ = match->end;
    last_end_ = match->end;
    return match;
  }
  return std::nullopt;
}

}  // namespace graft::text
