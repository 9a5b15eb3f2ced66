#include "core/base/json.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

using nlohmann::json;

constexpr std::size_t kDeepest = 100;

std::string place(std::string_view text, std::size_t byte, const std::string& source) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const std::size_t newline = before.rfind('\n');
  const std::size_t column = before.size() - (newline == before.npos ? 0 : newline + 1);
  return source + ", line " + std::to_string(line) + ", column " +
         std::to_string(std::max<std::size_t>(column, 1)) + ": ";
}

// The library's words without its prefix "[json.exception.x.n] parse error at line 1, column 2: ".
std::string bare(const json::exception& error) {
  std::string_view what = error.what();
  for (const std::string_view prefix : {"] ", ": "}) {
    const std::size_t at = what.find(prefix);
    if (at != what.npos) what.remove_prefix(at + prefix.size());
  }
  return printable(what);
}

// Watches the parse for what the library lets pass.
class Watch {
 public:
  explicit Watch(const std::string& source) : source_(source) {}

  bool operator()(int, json::parse_event_t event, json& value) {
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (keys_.size() == kDeepest) {
        fail(ErrorKind::input,
             source_ + ": nested deeper than " + std::to_string(kDeepest) + " levels");
      }
      keys_.emplace_back();
    } else if (event == Event::object_end || event == Event::array_end) {
      keys_.pop_back();
    } else if (event == Event::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) {
        fail(ErrorKind::input,
             source_ + ": the key " + quoted(key) + " stands twice in one object");
      }
    }
    return true;
  }

 private:
  const std::string& source_;
  std::vector<std::unordered_set<std::string>> keys_;  // of the objects and arrays now open
};

}  // namespace

json parse_json(std::string_view text, const std::string& source) {
  // The library takes NUL for the end of the text and would not look at what follows.
  if (const std::size_t nul = text.find('\0'); nul != text.npos) {
    fail(ErrorKind::input, place(text, nul + 1, source) + "not valid JSON: a NUL byte");
  }
  try {
    return json::parse(text.begin(), text.end(), Watch(source));
  } catch (const json::parse_error& error) {
    fail(ErrorKind::input, place(text, error.byte, source) + "not valid JSON: " + bare(error));
  } catch (const json::exception& error) {
    fail(ErrorKind::input, source + ": not valid JSON: " + bare(error));
  }
}

json read_json(const std::filesystem::path& path, std::size_t max_bytes) {
  return parse_json(read_text(path, max_bytes), quoted_path(path));
}

}  // namespace graft
