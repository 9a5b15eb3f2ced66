#pragma once

#include <string>

#include "core/config/config.h"
#include "core/train/convert.h"

namespace graft {

// The start that a configuration asks for. `options` holds mixer.options and init.options: the
// configuration itself, or a baseline's row. `label` "" = the initializer's alias.
Recipe make_recipe(const Config& config, const Config& options, const std::string& init,
                   const std::string& label, bool calibrate, PluginRegistry& registry);

}  // namespace graft
