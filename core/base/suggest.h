#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace graft {

// Words for error messages.

// Text of unknown origin made safe to show: control characters and invalid UTF-8 as \xNN, "..." in
// place of what follows after `max_bytes` of it.
std::string printable(std::string_view text, std::size_t max_bytes = 200);

// printable() in single quotes, for names that come out of files.
std::string quoted(std::string_view name);
// Where <iomanip> is included, a call with a std::string also finds std::quoted, which without an
// overload for each kind of argument would be the better match.
inline std::string quoted(const char* name) { return quoted(std::string_view(name)); }
inline std::string quoted(const std::string& name) { return quoted(std::string_view(name)); }
inline std::string quoted(std::string& name) { return quoted(std::string_view(name)); }

// The candidate a typo most likely meant: the least edit distance (insert, delete, replace, swap
// neighbours; case and -/_ do not count), at most a third of the name's length. Ties go to the
// first.
std::optional<std::string> nearest(std::string_view name,
                                   const std::vector<std::string>& candidates);

// To append to "unknown x 'name'": " (did you mean 'x'?)", or when nothing is near "; known: a, b"
// (the first dozen, and how many more), or "" when there are no candidates.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace graft
