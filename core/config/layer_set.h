#pragma once

#include <string>
#include <vector>

namespace graft {

// The layers that keep their attention, ascending:
//   "none"        no layer
//   "uniform:k"   0, k, 2k, ...
//   "0,4,8-11"    these, ranges included
//   "FILE.json"   the "layers" of that file, which `hostapp select-layers` writes
// Throws Error(usage) for anything else, a layer the model lacks, or a set that leaves nothing to
// convert; Error(input) for a file that is missing, no list of layers, or of a model of another
// depth.
std::vector<int> attention_layers(const std::string& spec, int n_layers);

// The same without a model: throws for a spec that no model could take.
void check_attention_layers(const std::string& spec);

}  // namespace graft
