#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "core/abi/component.h"
#include "core/teacher/model_config.h"

namespace graft {

// A parameter of a student before it has values: what selectors go by.
struct ParameterInfo {
  std::string name;         // the checkpoint's: "model.layers.3.mixer.q_proj.weight"
  std::string role;         // of a mixer's parameter, else ""
  std::string module;       // mixers, attention, mlp, norms, embeddings or head
  std::int64_t layer = -1;  // -1: of no layer
  std::int64_t numel = 0;
  bool trainable = true;
  bool decays = true;  // takes weight decay
};

// The backbone's parameters; the attention of `replaced` layers is not among them.
std::vector<ParameterInfo> backbone_parameters(const ModelConfig& config,
                                               const std::set<std::int64_t>& replaced);

std::vector<ParameterInfo> mixer_parameters(const ModelConfig& config, std::int64_t layer,
                                            const Mixer& mixer);

// "model.layers.3.mixer.": what stands before the names of a layer's mixer parameters.
std::string mixer_parameter_prefix(const ModelConfig& config, std::int64_t layer);

// Which parameters the selectors name, ascending. A selector is all, a module, role:ROLE or
// name:NAME, where * stands for any text and a role may leave out "graft.role."; with - before it,
// it takes out what those before it put in. Throws Error(usage) that starts with `where` for a
// selector that names nothing, with the nearest that would.
std::vector<std::size_t> select_parameters(const std::vector<ParameterInfo>& parameters,
                                           const std::vector<std::string>& selectors,
                                           const std::string& where);

// The selected parameters for a reader: "mixers: q_proj.weight x30, A_log x30; norms: ...".
std::string describe_selection(const std::vector<ParameterInfo>& parameters,
                               const std::vector<std::size_t>& selected);

}  // namespace graft
