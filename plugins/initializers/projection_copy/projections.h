#pragma once

#include <graft/plugin.hpp>

namespace graft::projections {

// Asks for query, key, value and output on both sides.
void need_projections(sdk::RoleNeeds& needs);

// Fills the mixer's query, key, value and output projections, their biases and the q/k norms from
// the teacher's parameters of the same role.
//
//   query, output  [heads * head_dim, model], [model, heads * head_dim]: heads and head_dim equal
//   on both sides key, value     [heads * head_dim, model]: head h of the mixer is head h / (heads
//   / teacher heads) of the
//                  teacher, which is how grouped-query attention shares its heads
//   biases         follow their projection; a bias that only the mixer has becomes 0
//   q/k norms      [head_dim], repeated where the mixer keeps one per head
//
// A teacher parameter the mixer has no place for is named in the log as dropped. Throws Status
// naming the role when sizes do not fit; what was copied before stays.
void copy_projections(const sdk::InitArgs& args);

}  // namespace graft::projections
