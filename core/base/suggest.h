#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace graft {

// Words for error messages.

// `name` in single quotes, safe to show: control characters and invalid UTF-8 as \xNN, and cut
// after 200 bytes. For names that come out of files.
std::string quoted(std::string_view name);

// The candidate a typo most likely meant: the least edit distance (insert, delete, replace, swap
// neighbours; case and -/_ do not count), at most a third of the name's length. Ties go to the
// first.
std::optional<std::string> nearest(std::string_view name,
                                   const std::vector<std::string>& candidates);

// To append to "unknown x 'name'": " (did you mean 'x'?)", or when nothing is near "; known: a, b"
// (the first dozen, and how many more), or "" when there are no candidates.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace graft
