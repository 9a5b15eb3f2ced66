#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "core/text/json_node.h"
#include "core/text/regex.h"

namespace graft::text {

// Calls visit(begin, end, is_match) for the stretches of `text`: the matches and what lies between
// them, in order and without gaps. Stretches between matches are not empty; matches may be.
template <typename Visit>
void for_each_stretch(const Regex& regex, std::string_view text, Regex::Workspace& workspace,
                      Visit&& visit) {
  std::size_t done = 0;
  Regex::Matches matches(regex, text, workspace);
  while (const std::optional<Regex::Match> match = matches.next()) {
    if (match->begin > done) visit(done, match->begin, false);
    visit(match->begin, match->end, true);
    done = match->end;
  }
  if (done < text.size()) visit(done, text.size(), false);
}

// The same for a literal text.
template <typename Visit>
void for_each_stretch(std::string_view literal, std::string_view text, Visit&& visit) {
  std::size_t done = 0;
  while (!literal.empty()) {
    const std::size_t found = text.find(literal, done);
    if (found == text.npos) break;
    if (found > done) visit(done, found, false);
    visit(found, found + literal.size(), true);
    done = found + literal.size();
  }
  if (done < text.size()) visit(done, text.size(), false);
}

// A "pattern" of tokenizer.json: {"String": text} or {"Regex": expression}.
class Pattern {
 public:
  explicit Pattern(const JsonNode& node);

  template <typename Visit>
  void for_each_stretch(std::string_view text, Regex::Workspace& workspace, Visit&& visit) const {
    if (regex_) {
      text::for_each_stretch(*regex_, text, workspace, visit);
    } else {
      text::for_each_stretch(std::string_view(literal_), text, visit);
    }
  }

 private:
  std::string literal_;  // when there is no regex
  std::optional<Regex> regex_;
};

// The regex of the string at `node`; errors name its place.
Regex regex_at(const JsonNode& node);

}  // namespace graft::text
