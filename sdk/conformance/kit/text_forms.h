// The forms of the texts a plugin carries.
#pragma once

#include <string>
#include <string_view>

namespace graft::conformance {

bool is_reverse_dns(std::string_view text);  // "org.example.gdn"
bool is_semver(std::string_view text);       // "1.2.0", "0.1.0-rc.1"
bool is_option_key(std::string_view text);   // "feature_map.dim"
bool is_param_name(std::string_view text);   // "q_proj.weight": a checkpoint key

// "" or what is wrong. An expression of SPDX: identifiers, AND, OR, WITH, parentheses,
// LicenseRef-...; the list of known licences is not looked at.
std::string spdx_problem(std::string_view text);
// "key=value;key=value", each key once.
std::string build_tags_problem(std::string_view text);

}  // namespace graft::conformance
