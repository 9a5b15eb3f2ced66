#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace graft::text {

// The regular expressions of tokenizer.json, written for Oniguruma (Ruby syntax, Unicode) and run
// by PCRE2 with JIT. What the two read differently is translated; what cannot be is refused:
//   \s \w \d \h [[:alpha:]] ...  Unicode properties (PCRE2's \s lacks nothing but adds U+180E)
//   \p{Han}                      the script, not script extensions
//   (?m)                         dot matches newline; ^ and $ always match at lines
//   (?i)b|c inside a group       reaches to the end of the group: (?i:b|c)
//   a{2}+  a{2}?  [a&&b]  [a[b]] (?x)  refused
// PCRE2 of Debian 12 knows Unicode 14: characters assigned later are no letters to \p{L}.
class Regex {
 public:
  struct Match {
    std::size_t begin;
    std::size_t end;
  };

  // What matching needs beside the pattern; one for each thread, for any pattern.
  class Workspace {
   public:
    Workspace();
    ~Workspace();
    Workspace(Workspace&&) noexcept;
    Workspace& operator=(Workspace&&) noexcept;

   private:
    friend class Regex;
    struct State;
    std::unique_ptr<State> state_;
  };

  // Throws Error(input) saying what is wrong with `pattern`, without naming file or key.
  explicit Regex(std::string_view pattern);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  // The matches in `subject` (well-formed UTF-8) from left to right; an empty match directly behind
  // another match does not count. Throws Error(input) when the pattern needs too many steps.
  class Matches {
   public:
    Matches(const Regex& regex, std::string_view subject, Workspace& workspace)
        : regex_(regex), subject_(subject), workspace_(workspace) {}
    std::optional<Match> next();

   private:
    const Regex& regex_;
    std::string_view subject_;
    Workspace& workspace_;
    std::size_t from_ = 0;
    std::optional<std::size_t> last_end_;
  };

  // The pattern as PCRE2 gets it.
  static std::string translate(std::string_view pattern);

 private:
  std::optional<Match> search(std::string_view subject, std::size_t from,
                              Workspace& workspace) const;

  struct Code;
  std::unique_ptr<Code> code_;
  std::string pattern_;
};

}  // namespace graft::text
