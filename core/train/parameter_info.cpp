#include "core/train/parameter_info.h"

#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/teacher/layout.h"

namespace graft {
namespace {

constexpr std::string_view kRolePrefix = "graft.role.";
const std::vector<std::string> kModules = {"mixers", "attention",  "mlp",
                                           "norms",  "embeddings", "head"};

std::int64_t element_count(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

// The number behind "layers." in a name; -1 where there is none.
std::int64_t layer_of(const std::string& name) {
  constexpr std::string_view mark = ".layers.";
  const auto at = name.find(mark);
  return at == std::string::npos ? -1 : std::stoll(name.substr(at + mark.size()));
}

std::string module_of(const ModelConfig& config, const std::string& name, std::int64_t layer) {
  if (name == embedding_name(config)) return "embeddings";
  if (name == output_projection_name(config)) return "head";
  if (layer >= 0 && name.starts_with(attention_prefix(config, layer))) return "attention";
  return name.find("norm") != std::string::npos ? "norms" : "mlp";
}

// Does `text` read as `pattern`, where each * is any text?
bool matches(std::string_view pattern, std::string_view text) {
  const auto star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == text;
  if (!text.starts_with(pattern.substr(0, star))) return false;
  const std::string_view rest = pattern.substr(star + 1);
  for (std::size_t i = star; i <= text.size(); ++i)
    if (matches(rest, text.substr(i))) return true;
  return false;
}

std::string short_role(const std::string& role) {
  return role.starts_with(kRolePrefix) ? role.substr(kRolePrefix.size()) : role;
}

bool names(const std::string& selector, const ParameterInfo& parameter) {
  if (selector == "all") return true;
  if (selector.starts_with("role:")) {
    const std::string role = selector.substr(5);
    return !parameter.role.empty() &&
           (matches(role, parameter.role) || matches(role, short_role(parameter.role)));
  }
  if (selector.starts_with("name:")) return matches(selector.substr(5), parameter.name);
  return selector == parameter.module;
}

// Every selector without a * that would name something.
std::vector<std::string> known_selectors(const std::vector<ParameterInfo>& parameters) {
  std::set<std::string> modules, roles;
  for (const ParameterInfo& parameter : parameters) {
    modules.insert(parameter.module);
    if (!parameter.role.empty()) roles.insert("role:" + short_role(parameter.role));
  }
  std::vector<std::string> known{"all"};
  for (const std::string& module : kModules)
    if (modules.contains(module)) known.push_back(module);
  known.insert(known.end(), roles.begin(), roles.end());
  return known;
}

}  // namespace

std::string mixer_parameter_prefix(const ModelConfig& config, std::int64_t layer) {
  std::string prefix = attention_prefix(config, layer);
  prefix.erase(prefix.find_last_of('.', prefix.size() - 2) + 1);
  return prefix + "mixer.";
}

std::vector<ParameterInfo> backbone_parameters(const ModelConfig& config,
                                               const std::set<std::int64_t>& replaced) {
  std::vector<ParameterInfo> list;
  for (const TensorLayout& tensor : checkpoint_layout(config, replaced)) {
    const std::int64_t layer = layer_of(tensor.name);
    // Vectors are norms and biases, which decay would pull away from where they belong.
    list.push_back({tensor.name, "", module_of(config, tensor.name, layer), layer,
                    element_count(tensor.shape), true, tensor.shape.size() > 1});
  }
  return list;
}

std::vector<ParameterInfo> mixer_parameters(const ModelConfig& config, std::int64_t layer,
                                            const Mixer& mixer) {
  std::vector<ParameterInfo> list;
  for (const graft_param_spec* spec : mixer.param_specs()) {
    const std::vector<std::int64_t> shape(spec->shape, spec->shape + spec->ndim);
    list.push_back({mixer_parameter_prefix(config, layer) + spec->name,
                    spec->role == nullptr ? "" : spec->role, "mixers", layer, element_count(shape),
                    (spec->flags & GRAFT_P_TRAINABLE) != 0, (spec->flags & GRAFT_P_NO_DECAY) == 0});
  }
  return list;
}

std::vector<std::size_t> select_parameters(const std::vector<ParameterInfo>& parameters,
                                           const std::vector<std::string>& selectors,
                                           const std::string& where) {
  std::vector<bool> selected(parameters.size());
  for (const std::string& given : selectors) {
    const bool takes_out = given.starts_with('-');
    const std::string selector = given.substr(takes_out ? 1 : 0);
    bool found = false;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!names(selector, parameters[i])) continue;
      selected[i] = !takes_out;
      found = true;
    }
    if (!found)
      fail(ErrorKind::usage, where + ": no parameter is meant by " + quoted(selector) +
                                 did_you_mean(selector, known_selectors(parameters)));
  }
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (selected[i] && parameters[i].trainable) places.push_back(i);
  return places;
}

std::string describe_selection(const std::vector<ParameterInfo>& parameters,
                               const std::vector<std::size_t>& selected) {
  // By module, then by name without its layer; layers are counted.
  std::map<std::string, std::vector<std::pair<std::string, int>>> modules;
  for (const std::size_t i : selected) {
    const ParameterInfo& parameter = parameters[i];
    std::string name = parameter.name;
    if (parameter.layer >= 0) {
      const std::string number = "." + std::to_string(parameter.layer) + ".";
      name = name.substr(name.find(number) + number.size());
      if (parameter.module == "mixers") name = name.substr(name.find('.') + 1);
    }
    auto& list = modules[parameter.module];
    const auto at = std::find_if(list.begin(), list.end(),
                                 [&](const auto& item) { return item.first == name; });
    if (at == list.end()) {
      list.emplace_back(name, 1);
    } else {
      ++at->second;
    }
  }
  std::string text;
  for (const auto& [module, list] : modules) {
    text += (text.empty() ? "" : "; ") + module + ": ";
    for (std::size_t i = 0; i < list.size(); ++i)
      text += (i == 0 ? "" : ", ") + list[i].first +
              (list[i].second > 1 ? " x" + std::to_string(list[i].second) : "");
  }
  return text;
}

}  // namespace graft
