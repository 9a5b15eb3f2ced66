// Options that several mixers have.
#pragma once

#include <string>

#include "graft/description.hpp"
#include "rope.h"

namespace graft::mixers {

// Throws sdk::Status with where = "config.<key>".
[[noreturn]] void refuse_option(const char* key, const std::string& message);

// "auto", "on" or "off" of a part that the teacher's block may have; it changes parameters.
sdk::Option follow_option(const char* key, const char* doc);
// Its value: "auto" is `teacher_has`.
bool follows(const sdk::Config& config, const char* key, bool teacher_has);

// The teacher's RoPE on heads of `head_dim` entries. Refuses the option `rope` where the teacher
// has none or heads are too narrow for it.
Rope teachers_rope(const sdk::LayerInfo& layer, int64_t head_dim);

// eps of the RMSNorm of query and key heads.
double qk_norm_eps(const sdk::LayerInfo& layer);

// Width of a short conv: 0 (none) or 2 to 8.
int64_t short_conv_width(const sdk::Config& config);

// "recompute": the backward runs the forward again (sdk::Activations).
sdk::Option recompute_option();

}  // namespace graft::mixers
