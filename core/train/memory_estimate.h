#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/abi/component.h"
#include "core/teacher/model_config.h"
#include "core/train/parameter_info.h"
#include "core/train/stage.h"

namespace graft {

// What training a stage will take, in bytes. An estimate: it counts the tensors that are known to
// be held at once and not what allocators and libraries keep for themselves.
struct MemoryEstimate {
  std::uint64_t weights = 0;      // teacher, mixers, and the student's own copy of what trains
  std::uint64_t optimizer = 0;    // gradients, AdamW's two moments, best-loss copies
  std::uint64_t activations = 0;  // of one forward and backward pass, plugins' workspace included
  std::uint64_t evaluation = 0;   // of a measurement, which has nothing of a step's beside it
  std::uint64_t libraries = 0;    // what LibTorch and its threads take once they compute
  std::uint64_t total() const {
    return weights + optimizer + std::max(activations, evaluation) + libraries;
  }
};

// `parameters` are the student's, `trained` those of them that train, `mixer` one of its mixers
// (planned for the stage's sizes). `eval_context` is what a measurement's windows have, 0 = there
// is none.
MemoryEstimate estimate_memory(const ModelConfig& config, const Stage& stage,
                               const std::vector<ParameterInfo>& parameters,
                               const std::vector<std::size_t>& trained, Mixer& mixer,
                               std::int64_t eval_context = 0);

// Bytes of this process that are in memory now, and the most there ever were.
std::uint64_t memory_now();
std::uint64_t memory_peak();

// Of the machine.
std::uint64_t memory_of_machine();

// "1.25 GiB", "38 MiB".
std::string bytes_text(std::uint64_t bytes);

}  // namespace graft
