#include "core/config/layer_set.h"

#include <charconv>
#include <optional>
#include <set>
#include <string_view>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

[[noreturn]] void bad_spec(const std::string& spec, const std::string& why) {
  fail(ErrorKind::usage,
       "keep_attention " + quoted(spec) + ": " + why +
           "; it takes none, uniform:K (layers 0, K, 2K, ...) or a list such as 0,4,8-11");
}

std::optional<int> parse_number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

struct Range {
  int first, last;
};

std::vector<Range> parse_list(const std::string& spec) {
  std::vector<Range> ranges;
  std::string_view rest = spec;
  while (true) {
    const std::string_view item = rest.substr(0, rest.find(','));
    const auto dash = item.find('-');
    const auto first = parse_number(item.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse_number(item.substr(dash + 1));
    if (!first || !last) bad_spec(spec, "cannot read " + quoted(item));
    if (*last < *first) bad_spec(spec, "the range " + quoted(item) + " runs backwards");
    ranges.push_back({*first, *last});
    if (item.size() == rest.size()) return ranges;
    rest.remove_prefix(item.size() + 1);
  }
}

struct Spec {
  int uniform = 0;  // the step, 0 = none
  std::vector<Range> ranges;
};

Spec parse_spec(const std::string& spec) {
  constexpr std::string_view uniform = "uniform:";
  if (spec == "none") return {};
  if (spec.starts_with(uniform)) {
    const auto step = parse_number(std::string_view(spec).substr(uniform.size()));
    if (!step || *step < 1) bad_spec(spec, "K must be a whole number of at least 1");
    return {*step, {}};
  }
  return {0, parse_list(spec)};
}

}  // namespace

void check_attention_layers(const std::string& spec) { parse_spec(spec); }

std::vector<int> attention_layers(const std::string& spec, int n_layers) {
  const Spec parsed = parse_spec(spec);
  std::set<int> layers;
  for (int layer = 0; parsed.uniform > 0 && layer < n_layers; layer += parsed.uniform) {
    layers.insert(layer);
  }
  for (const auto [first, last] : parsed.ranges) {
    if (last >= n_layers) {
      bad_spec(spec, "the model has layers 0 to " + std::to_string(n_layers - 1) + ", not " +
                         std::to_string(last));
    }
    for (int layer = first; layer <= last; ++layer) layers.insert(layer);
  }
  if (static_cast<int>(layers.size()) >= n_layers)
    bad_spec(spec, "every layer keeps its attention, none is converted");
  return {layers.begin(), layers.end()};
}

}  // namespace graft
