#include "core/base/suggest.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace graft {
namespace {

constexpr std::size_t kListed = 12;
// Names people type are shorter; a bound keeps the quadratic comparison cheap for any input.
constexpr std::size_t kLongestCompared = 200;

// The bytes of the well-formed UTF-8 sequence at the front of `text` (RFC 3629), or 0.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return 0;
  // The second byte's range excludes overlong forms, surrogates and what lies beyond U+10FFFF.
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < low || byte(1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  return length;
}

bool is_control(std::string_view sequence) {
  const auto lead = static_cast<unsigned char>(sequence[0]);
  // U+0080 to U+009F are C2 80 to C2 9F: terminals obey them as they obey ESC.
  const bool c1 = lead == 0xC2 && static_cast<unsigned char>(sequence[1]) < 0xA0;
  return lead < 0x20 || lead == 0x7F || c1;
}

void append_escaped(std::string& out, std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (const char c : bytes) {
    const auto value = static_cast<unsigned char>(c);
    out += "\\x";
    out += kDigits[value >> 4];
    out += kDigits[value & 15];
  }
}

std::string folded(std::string_view name) {
  std::string out(name);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '-') c = '_';
  }
  return out;
}

// Optimal string alignment distance.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last, last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0U : 1U);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    before_last = last;
    last = row;
  }
  return last[b.size()];
}

}  // namespace

std::string printable(std::string_view text, std::size_t max_bytes) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = sequence_length(text.substr(at));
    const std::string_view sequence = text.substr(at, std::max<std::size_t>(length, 1));
    if (at + sequence.size() > max_bytes) return out + "...";
    if (length == 0 || is_control(sequence)) {
      append_escaped(out, sequence);
    } else {
      out += sequence;
    }
    at += sequence.size();
  }
  return out;
}

std::string quoted(std::string_view name) {
  std::string out = "'";
  return out.append(printable(name)) += '\'';
}

std::optional<std::string> nearest(std::string_view name,
                                   const std::vector<std::string>& candidates) {
  if (name.empty() || name.size() > kLongestCompared) return std::nullopt;
  const std::string wanted = folded(name);
  const std::size_t limit = std::max<std::size_t>(1, name.size() / 3);
  std::size_t best = std::min(limit, name.size() - 1) + 1;
  std::optional<std::string> found;
  for (const std::string& candidate : candidates) {
    const std::size_t longer = std::max(candidate.size(), name.size());
    if (longer - std::min(candidate.size(), name.size()) > limit) continue;
    const std::size_t distance = edit_distance(wanted, folded(candidate));
    if (distance < best) {
      best = distance;
      found = candidate;
    }
  }
  return found;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  if (const auto near = nearest(name, candidates)) return " (did you mean " + quoted(*near) + "?)";
  if (candidates.empty()) return "";
  std::string out = "; known: ";
  for (std::size_t i = 0; i < std::min(kListed, candidates.size()); ++i) {
    out += (i == 0 ? "" : ", ") + printable(candidates[i]);
  }
  if (candidates.size() > kListed) {
    out += " and " + std::to_string(candidates.size() - kListed) + " more";
  }
  return out;
}

}  // namespace graft
