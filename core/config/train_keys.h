#pragma once

#include "core/config/config.h"
#include "core/config/schema.h"

namespace graft {

// What a recipe of `hostapp train` holds: the run's own keys, [[corpus]] and [[stage]] rows, and
// scales.
const Schema& train_schema();

// Puts the values of [scales.NAME], for each NAME of the key `scale` in turn, over those of the
// file, and forgets all scales: the configuration then says what is run. Every scale is checked,
// also those not in use. Call it before flags are set. Throws Error(usage).
void apply_scale(Config& config);

}  // namespace graft
