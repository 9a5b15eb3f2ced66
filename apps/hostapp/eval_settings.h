#pragma once

#include "core/config/config.h"
#include "core/eval/perplexity.h"

namespace graft {

// How perplexity is measured here: the keys eval.*.
PerplexityOptions perplexity_options(const Config& config);

}  // namespace graft
