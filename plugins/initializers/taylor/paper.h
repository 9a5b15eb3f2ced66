#pragma once

#include <graft/plugin.hpp>

#include "plugins/initializers/taylor/options.h"

namespace graft::taylor {

// Phase 1 of Taylor-Calibrate (arXiv 2606.16429) as published, with what its code does where paper
// and code differ: the write gate's mean is set by rescaling the rows of its random projection, and
// the decay bias takes no account of the decay projection. Needs a mixer of Gated DeltaNet's
// parametrisation: an input-dependent decay exp(-exp(A) softplus(W_a x + b)), a sigmoid write gate,
// an output gate of the values' shape.
void run_paper(const Options& options, sdk::InitArgs& args);

// The roles it needs beyond the four projections.
void need_paper_roles(sdk::RoleNeeds& needs);

}  // namespace graft::taylor
