#pragma once

#include <set>
#include <string>
#include <vector>

#include "core/job/train_job.h"
#include "core/train/memory_estimate.h"
#include "core/train/parameter_info.h"

namespace graft {

// What one stage trains, worked out without a weight.
struct StagePlan {
  PluginChoice mixer;                     // the one in force
  std::vector<ParameterInfo> parameters;  // of the student, as far as the scope reaches
  std::vector<std::size_t> trained;       // places in `parameters`
  std::vector<double> lr, weight_decay;   // of each of them
  MemoryEstimate memory;
};

struct TrainPlan {
  std::vector<std::int64_t> layers;  // converted ones
  std::vector<StagePlan> stages;
  std::set<std::string> trained_backbone;      // parameters of the backbone that any stage trains
  std::map<std::string, std::string> plugins;  // "mixer gdn" -> id, version, schema, hash
  std::uint64_t memory() const;                // of the stage that takes most
};

// Checks the job against model and plugins and plans its stages. Throws Error(usage) or
// Error(plugin) naming stage, key and the way out: a first stage without a mixer, a mixer without
// initializer or roles, a stage that trains nothing, an objective whose signal its scope does not
// have, a context longer than the teacher's, ...
TrainPlan make_train_plan(const TrainJob& job, const ModelConfig& teacher,
                          PluginRegistry& registry);

}  // namespace graft
