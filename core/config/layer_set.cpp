#include "core/config/layer_set.h"

#include <charconv>
#include <optional>
#include <set>
#include <string_view>

#include "core/base/error.h"
#include "core/base/json.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

[[noreturn]] void bad_spec(const std::string& spec, const std::string& why) {
  fail(ErrorKind::usage,
       "keep_attention " + quoted(spec) + ": " + why +
           "; it takes none, uniform:K (layers 0, K, 2K, ...), a list such as 0,4,8-11 or the "
           "FILE.json of select-layers");
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

bool names_a_file(const std::string& spec) { return spec.ends_with(".json"); }

[[noreturn]] void bad_file(const std::string& file, const std::string& why) {
  fail(ErrorKind::input, "keep_attention: " + file + ": " + why +
                             "; hostapp select-layers writes files that can be taken here");
}

struct LayerFile {
  std::vector<int> layers;
  std::optional<int> n_layers;  // of the model they were selected for
};

LayerFile read_layer_file(const std::string& file) {
  const nlohmann::json json = read_json(file);
  const auto is_layer = [](const nlohmann::json& item) {
    return item.is_number_integer() && item >= 0 && item <= 1'000'000;
  };
  if (!json.is_object() || !json.contains("layers") || !json["layers"].is_array())
    bad_file(file, "expected an object with \"layers\": [0, 4, ...]");
  LayerFile read;
  for (const nlohmann::json& item : json["layers"]) {
    if (!is_layer(item)) bad_file(file, "\"layers\" holds " + item.dump() + ", which is no layer");
    read.layers.push_back(item.get<int>());
  }
  if (json.contains("n_layers")) {
    if (!is_layer(json["n_layers"]))
      bad_file(file,
               "\"n_layers\" is " + json["n_layers"].dump() + ", which is no number of layers");
    read.n_layers = json["n_layers"].get<int>();
  }
  return read;
}

std::vector<int> layers_of_file(const std::string& file, int n_layers) {
  const LayerFile read = read_layer_file(file);
  if (read.n_layers && *read.n_layers != n_layers)
    bad_file(file, "its layers were selected for a model of " + std::to_string(*read.n_layers) +
                       " layers, this one has " + std::to_string(n_layers));
  for (const int layer : read.layers)
    if (layer >= n_layers)
      bad_file(file, "the model has layers 0 to " + std::to_string(n_layers - 1) + ", not " +
                         std::to_string(layer));
  const std::set<int> layers(read.layers.begin(), read.layers.end());
  if (static_cast<int>(layers.size()) >= n_layers)
    bad_file(file, "every layer keeps its attention, none is converted");
  return {layers.begin(), layers.end()};
}

}  // namespace

void check_attention_layers(const std::string& spec) {
  if (names_a_file(spec)) {
    read_layer_file(spec);
  } else {
    parse_spec(spec);
  }
}

std::vector<int> attention_layers(const std::string& spec, int n_layers) {
  if (names_a_file(spec)) return layers_of_file(spec, n_layers);
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
