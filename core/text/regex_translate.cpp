#include <array>
#include <cctype>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/text/regex.h"

// Oniguruma's Ruby syntax (its doc/RE and doc/SYNTAX.md) to PCRE2's (pcre2pattern(3)).

namespace graft::text {

namespace {

// The inside of a character class that matches what the name matches in Oniguruma.
constexpr std::string_view kSpace = R"(\p{White_Space})";
constexpr std::string_view kDigit = R"(\p{Nd})";
// Oniguruma's table for Latin-1 counts the superscripts and fractions as word characters.
constexpr std::string_view kWord =
    R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
constexpr std::string_view kHex = "0-9A-Fa-f";

using NamePair = std::pair<std::string_view, std::string_view>;

constexpr std::array<NamePair, 6> kBrackets = {{
    {"alpha", R"(\p{Alphabetic})"},
    {"digit", kDigit},
    {"alnum", R"(\p{Alphabetic}\p{Nd})"},
    {"upper", R"(\p{Uppercase})"},
    {"space", kSpace},
    {"punct", R"(\p{P}\p{S})"},
}};

// Names of \p{...} that are not general categories or scripts, and long names of categories.
constexpr std::array<NamePair, 21> kProperties = {{
    {"letter", "L"},
    {"mark", "M"},
    {"number", "N"},
    {"punctuation", "P"},
    {"punct", "P"},
    {"symbol", "S"},
    {"separator", "Z"},
    {"other", "C"},
    {"alpha", "Alphabetic"},
    {"alphabetic", "Alphabetic"},
    {"digit", "Nd"},
    {"upper", "Uppercase"},
    {"uppercase", "Uppercase"},
    {"lowercase", "Lowercase"},
    {"space", "White_Space"},
    {"whitespace", "White_Space"},
    {"any", "Any"},
    {"ascii", "ASCII"},
    {"emoji", "Emoji"},
    {"decimalnumber", "Nd"},
    {"extendedpictographic", "Extended_Pictographic"},
}};

constexpr std::array<std::string_view, 37> kCategories = {
    "C",  "Cc", "Cf", "Cn", "Co", "Cs", "L",  "Ll", "Lm", "Lo", "Lt", "Lu", "M",
    "Mc", "Me", "Mn", "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi",
    "Po", "Ps", "S",  "Sc", "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs"};

class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  std::string run() {
    while (!done()) {
      const char c = take();
      switch (c) {
        case '\\':
          escape();
          break;
        case '[':
          character_class();
          break;
        case '(':
          open_group();
          break;
        case ')':
          close_group();
          break;
        case '{':
          interval();
          break;
        default:
          out_ += c;
      }
    }
    close_flags();
    return std::move(out_);
  }

 private:
  bool done() const { return at_ >= pattern_.size(); }
  char take() { return pattern_[at_++]; }
  bool looking_at(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }

  [[noreturn]] void refuse(const std::string& what) const {
    fail(ErrorKind::input,
         "the regular expression " + quoted(pattern_) + " is not supported: " + what);
  }

  void escape();
  void word_boundary(bool negated);
  bool shared_escape(char letter, bool in_class);
  void set(std::string_view inside, bool negated, bool in_class);
  void property(bool negated);
  void unicode_escape();
  void hex_escape();
  void character_class();
  void bracket();
  void open_group();
  void flags();
  void close_group();
  void close_flags();
  void interval();

  std::string_view pattern_;
  std::size_t at_ = 0;
  std::string out_;
  // For each open group: how many (?i: were opened in it for a bare (?i).
  std::vector<int> flag_groups_{0};
};

void Translator::set(std::string_view inside, bool negated, bool in_class) {
  const bool single = inside.starts_with("\\p{") && inside.find('}') == inside.size() - 1;
  if (single) {
    out_ += negated ? "\\P" : "\\p";
    out_ += inside.substr(2);
  } else if (!in_class) {
    out_ += negated ? "[^" : "[";
    out_ += inside;
    out_ += ']';
  } else if (!negated) {
    out_ += inside;
  } else {
    refuse("a negated set inside a character class");
  }
}

// Escapes that mean the same inside and outside of a class. False: not one of them.
bool Translator::shared_escape(char letter, bool in_class) {
  switch (letter) {
    case 's':
      set(kSpace, false, in_class);
      return true;
    case 'S':
      set(kSpace, true, in_class);
      return true;
    case 'd':
      set(kDigit, false, in_class);
      return true;
    case 'D':
      set(kDigit, true, in_class);
      return true;
    case 'w':
      set(kWord, false, in_class);
      return true;
    case 'W':
      set(kWord, true, in_class);
      return true;
    case 'h':
      set(kHex, false, in_class);
      return true;
    case 'H':
      set(kHex, true, in_class);
      return true;
    case 'p':
      property(false);
      return true;
    case 'P':
      property(true);
      return true;
    case 'u':
      unicode_escape();
      return true;
    case 'x':
      hex_escape();
      return true;
    case 'v':
      out_ += "\\x0b";
      return true;
    case 'a':
    case 'e':
    case 'f':
    case 'n':
    case 'r':
    case 't':
      out_ += '\\';
      out_ += letter;
      return true;
    default:
      if (std::isalnum(static_cast<unsigned char>(letter)) != 0) return false;
      out_ += '\\';
      out_ += letter;
      return true;
  }
}

void Translator::escape() {
  if (done()) refuse("it ends in a backslash");
  const char letter = take();
  if (shared_escape(letter, false)) return;
  switch (letter) {
    case 'b':
      word_boundary(false);
      return;
    case 'B':
      word_boundary(true);
      return;
    case 'O':
      out_ += "(?s:.)";
      return;
    case 'A':
    case 'z':
    case 'Z':
    case 'G':
    case 'K':
    case 'R':
    case 'X':
    case 'N':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case '8':
    case '9':
      out_ += '\\';
      out_ += letter;
      return;
    default:
      refuse(std::string("the escape \\") + letter);
  }
}

void Translator::word_boundary(bool negated) {
  const std::string word = "[" + std::string(kWord) + "]";
  out_ += negated ? "(?:(?<=" + word + ")(?=" + word + ")|(?<!" + word + ")(?!" + word + "))"
                  : "(?:(?<=" + word + ")(?!" + word + ")|(?<!" + word + ")(?=" + word + "))";
}

// After "\p" or "\P".
void Translator::property(bool negated) {
  const std::size_t end = looking_at("{") ? pattern_.find('}', at_) : pattern_.npos;
  if (end == pattern_.npos) refuse("\\p without {...}");
  std::string_view name = pattern_.substr(at_ + 1, end - at_ - 1);
  at_ = end + 1;
  if (name.starts_with('^')) {
    negated = !negated;
    name.remove_prefix(1);
  }
  std::string plain;
  for (const char c : name) {
    if (c == ' ' || c == '_' || c == '-') continue;
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) refuse("\\p{" + std::string(name) + "}");
    plain += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  out_ += negated ? "\\P{" : "\\p{";
  for (const std::string_view category : kCategories) {
    if (plain.size() == category.size() && plain[0] == std::tolower(category[0]) &&
        plain.substr(1) == category.substr(1)) {
      out_ += category;
      out_ += '}';
      return;
    }
  }
  for (const auto& [known, translated] : kProperties) {
    if (plain == known) {
      out_ += translated;
      out_ += '}';
      return;
    }
  }
  // What is left must be a script; PCRE2 says so if it is none.
  out_ += "sc:" + plain + '}';
}

// After "\u": four hexadecimal digits.
void Translator::unicode_escape() {
  const std::string_view digits = pattern_.substr(at_, 4);
  for (const char c : digits) {
    if (std::isxdigit(static_cast<unsigned char>(c)) == 0) refuse("\\u without four hex digits");
  }
  if (digits.size() != 4) refuse("\\u without four hex digits");
  at_ += 4;
  out_ += "\\x{" + std::string(digits) + '}';
}

// After "\x": {digits}, or two digits below 80 (above, Oniguruma means a byte and not a character).
void Translator::hex_escape() {
  const std::size_t end = looking_at("{") ? pattern_.find('}', at_) : at_ + 2;
  if (end > pattern_.size()) refuse("\\x without its digits");
  const std::size_t begin = at_ + (looking_at("{") ? 1 : 0);
  const std::string_view digits = pattern_.substr(begin, end - begin);
  const bool braced = begin != at_;
  const bool all_hex = digits.find_first_not_of("0123456789abcdefABCDEF") == digits.npos;
  if (digits.empty() || !all_hex || (!braced && digits[0] > '7')) {
    refuse("\\x" + std::string(digits) + ", which is not \\x{...} of one character");
  }
  at_ = end + (braced ? 1 : 0);
  out_ += "\\x{" + std::string(digits) + '}';
}

// After "[".
void Translator::character_class() {
  out_ += '[';
  if (looking_at("^")) out_ += take();
  if (looking_at("]")) {  // the first one is a character
    out_ += "\\]";
    ++at_;
  }
  while (!done()) {
    const char c = take();
    if (c == ']') {
      out_ += ']';
      return;
    }
    if (c == '[') {
      bracket();
    } else if (c == '&' && looking_at("&")) {
      refuse("the intersection && in a character class");
    } else if (c == '\\') {
      if (done()) break;
      const char letter = take();
      if (shared_escape(letter, true)) continue;
      if (letter != 'b' && (letter < '0' || letter > '7')) {
        refuse(std::string("the escape \\") + letter + " in a character class");
      }
      out_ += '\\';
      out_ += letter;
    } else {
      out_ += c;
    }
  }
  refuse("a character class that is not closed");
}

// After a "[" inside a class: [:name:] or [:^name:].
void Translator::bracket() {
  const std::size_t end = looking_at(":") ? pattern_.find(":]", at_ + 1) : pattern_.npos;
  if (end == pattern_.npos) refuse("a character class inside a character class");
  std::string_view name = pattern_.substr(at_ + 1, end - at_ - 1);
  at_ = end + 2;
  const bool negated = name.starts_with('^');
  if (negated) name.remove_prefix(1);
  for (const auto& [known, inside] : kBrackets) {
    if (name == known) {
      set(inside, negated, true);
      return;
    }
  }
  refuse("[:" + std::string(name) + ":]");
}

// After "(".
void Translator::open_group() {
  if (looking_at("*")) refuse("(*...)");
  if (!looking_at("?")) {
    out_ += '(';
    flag_groups_.push_back(0);
    return;
  }
  ++at_;
  if (looking_at("#")) {  // a comment
    const std::size_t end = pattern_.find(')', at_);
    if (end == pattern_.npos) refuse("a comment that is not closed");
    at_ = end + 1;
    return;
  }
  for (const std::string_view opening : {":", "=", "!", ">", "<=", "<!"}) {
    if (looking_at(opening)) {
      out_ += "(?";
      out_ += opening;
      at_ += opening.size();
      flag_groups_.push_back(0);
      return;
    }
  }
  flags();
}

// After "(?" of "(?i:...)" or "(?i)": reads up to ":" or ")".
void Translator::flags() {
  std::string translated;
  while (!done() && !looking_at(":") && !looking_at(")")) {
    const char flag = take();
    if (flag == 'i' || flag == '-') {
      translated += flag;
    } else if (flag == 'm') {
      translated += 's';  // Ruby's m is everyone else's s
    } else {
      refuse(std::string("(?") + flag + "...)");
    }
  }
  if (done()) refuse("a group that is not closed");
  const bool bare = take() == ')';
  out_ += "(?" + translated + ':';
  if (bare) {
    ++flag_groups_.back();
  } else {
    flag_groups_.push_back(0);
  }
}

void Translator::close_flags() { out_.append(static_cast<std::size_t>(flag_groups_.back()), ')'); }

// After ")".
void Translator::close_group() {
  if (flag_groups_.size() == 1) refuse("a ) without its (");
  close_flags();
  flag_groups_.pop_back();
  out_ += ')';
}

// After "{": {n}, {n,}, {,m}, {n,m}, or a literal brace.
void Translator::interval() {
  const std::size_t end = pattern_.find('}', at_);
  const std::string_view inside =
      end == pattern_.npos ? std::string_view() : pattern_.substr(at_, end - at_);
  const bool counts = !inside.empty() && inside != "," &&
                      inside.find_first_not_of("0123456789,") == inside.npos &&
                      inside.find(',') == inside.rfind(',');
  if (!counts) {
    out_ += "\\{";
    return;
  }
  at_ = end + 1;
  out_ += '{';
  if (inside.starts_with(',')) out_ += '0';
  out_ += inside;
  out_ += '}';
  // To Oniguruma these quantify the quantified: (?:a{2})+ and (?:a{2})?.
  if (looking_at("+")) refuse("{...}+");
  if (looking_at("?") && inside.find(',') == inside.npos) refuse("{n}?");
}

}  // namespace

std::string Regex::translate(std::string_view pattern) { return Translator(pattern).run(); }

}  // namespace graft::text
