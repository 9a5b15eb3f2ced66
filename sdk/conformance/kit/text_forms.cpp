#include "kit/text_forms.h"

#include <regex>
#include <set>
#include <sstream>
#include <vector>

#include "graft/status.hpp"

namespace graft::conformance {
namespace {

bool matches(std::string_view text, const char* pattern) {
  return std::regex_match(text.begin(), text.end(), std::regex(pattern));
}

// Words and parentheses of a licence expression, by recursive descent.
class Expression {
 public:
  explicit Expression(std::string_view text) {
    for (const char c : text) {
      const bool alone = c == '(' || c == ')';
      if (alone || c == ' ' || fresh_) tokens_.emplace_back();
      if (c != ' ') tokens_.back() += c;
      fresh_ = alone;
    }
    std::erase(tokens_, "");
  }

  std::string problem() {
    either();
    if (problem_.empty() && at_ < tokens_.size())
      problem_ = "does not go on with AND, OR or WITH at '" + tokens_[at_] + "'";
    return problem_;
  }

 private:
  bool take(const char* word) {
    if (at_ >= tokens_.size() || tokens_[at_] != word) return false;
    ++at_;
    return true;
  }
  void either() {
    both();
    while (problem_.empty() && take("OR")) both();
  }
  void both() {
    one();
    while (problem_.empty() && take("AND")) one();
  }
  void one() {
    if (take("(")) {
      either();
      if (problem_.empty() && !take(")")) problem_ = "has a '(' without its ')'";
      return;
    }
    identifier("a licence's");
    if (problem_.empty() && take("WITH")) identifier("an exception's");
  }
  void identifier(const char* whose) {
    const std::string word = at_ < tokens_.size() ? tokens_[at_] : "";
    const bool keyword = word == "AND" || word == "OR" || word == "WITH";
    if (!keyword &&
        matches(word, R"((DocumentRef-[A-Za-z0-9.-]+:)?[A-Za-z0-9][A-Za-z0-9.-]*\+?)")) {
      ++at_;
      return;
    }
    problem_ = sdk::cat("has ", word.empty() ? "nothing" : "'" + word + "'", " where ", whose,
                        " SPDX identifier is expected");
  }

  std::vector<std::string> tokens_;
  bool fresh_ = true;
  std::size_t at_ = 0;
  std::string problem_;
};

}  // namespace

bool is_reverse_dns(std::string_view text) {
  return matches(text, R"([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+)");
}

bool is_semver(std::string_view text) {
  return matches(text, R"(\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?)");
}

bool is_option_key(std::string_view text) {
  return matches(text, R"([a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*)");
}

bool is_param_name(std::string_view text) {
  return matches(text, R"([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)");
}

std::string spdx_problem(std::string_view text) { return Expression(text).problem(); }

std::string build_tags_problem(std::string_view text) {
  std::set<std::string> keys;
  std::istringstream tags{std::string(text)};
  for (std::string tag; std::getline(tags, tag, ';');) {
    if (!matches(tag, "[A-Za-z0-9_.-]+=[^=;]*"))
      return "has '" + tag + "' where key=value is expected";
    if (!keys.insert(tag.substr(0, tag.find('='))).second)
      return "has the key of '" + tag + "' twice";
  }
  return "";
}

}  // namespace graft::conformance
