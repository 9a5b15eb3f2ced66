#pragma once

#include "core/config/schema.h"

namespace graft {

// graft's own configuration: every key that hostapp takes, as TOML and as a flag.
const Schema& graft_schema();

}  // namespace graft
