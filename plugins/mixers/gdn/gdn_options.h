// The options of the "gdn" mixer: their schema, and what they mean for one layer.
#pragma once

#include <vector>

#include "gdn_block.h"
#include "graft/description.hpp"

namespace graft::gdn {

std::vector<sdk::Option> option_schema();

// Throws sdk::Status with where = "config.<key>" for what cannot be built.
BlockOptions block_options(const sdk::LayerInfo& layer, const sdk::Config& config);

}  // namespace graft::gdn
