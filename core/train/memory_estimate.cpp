#include "core/train/memory_estimate.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "core/teacher/layout.h"
#include "core/train/logit_loss.h"

namespace graft {
namespace {

constexpr std::uint64_t kFloat = sizeof(float);
// Kernels, threads and the allocator's caches: what the peak of a run of two tiny layers has beyond
// its tensors.
constexpr std::uint64_t kLibraries = std::uint64_t{24} << 20;
// As core/eval/perplexity.cpp takes them.
constexpr std::uint64_t kWindowsAtOnce = 4, kLogitRows = 256;

std::uint64_t unsigned_of(std::int64_t value) { return static_cast<std::uint64_t>(value); }

std::uint64_t bytes_of(const graft_tensor_spec& spec) {
  std::uint64_t count = 1;
  for (int i = 0; i < spec.ndim; ++i) count *= unsigned_of(spec.shape[i]);
  return count * spec.dtype.bits / 8;
}

struct MixerMemory {
  std::uint64_t saved = 0, workspace = 0;
};

MixerMemory memory_of(Mixer& mixer, const Stage& stage) {
  graft_plan_in in{};
  in.struct_size = sizeof in;
  in.device_type = kDLCPU;
  in.dtype = {kDLFloat, 32, 1};
  in.flags = GRAFT_X_TRAINING | GRAFT_X_DETERMINISTIC;
  in.batch = stage.batch;
  in.tokens = stage.context;
  const graft_plan_out plan = mixer.plan(in);
  MixerMemory memory;
  for (std::uint32_t i = 0; i < plan.n_saved; ++i) memory.saved += bytes_of(*plan.saved[i]);
  memory.workspace = std::max(plan.workspace_forward, plan.workspace_backward);
  return memory;
}

std::uint64_t elements(const std::vector<ParameterInfo>& parameters) {
  std::uint64_t count = 0;
  for (const ParameterInfo& parameter : parameters) count += unsigned_of(parameter.numel);
  return count;
}

std::uint64_t activations(const ModelConfig& config, const Stage& stage, const MixerMemory& mixer) {
  const std::uint64_t tokens = unsigned_of(stage.batch * stage.context);
  const std::uint64_t stream = tokens * unsigned_of(config.model_dim) * kFloat;
  const std::uint64_t heads =
      tokens * unsigned_of(config.query_dim() + 2 * config.key_dim()) * kFloat;
  const std::uint64_t inner = tokens * unsigned_of(config.mlp_dim) * kFloat;
  // One layer without a graph: stream, norms, heads before and after RoPE, three MLP activations.
  const std::uint64_t inference = 6 * stream + 2 * heads + 3 * inner;
  if (stage.scope == StageScope::layer)
    return inference + 6 * stream + mixer.saved + mixer.workspace;
  // What autograd keeps of a layer: norms' inputs and outputs, the MLP's products, the mixer's own.
  const std::uint64_t graph = 8 * stream + 4 * inner + mixer.saved;
  const std::uint64_t layers = unsigned_of(config.n_layers);
  const std::uint64_t kept = stage.recompute ? layers * stream + graph : layers * graph;
  // Logits of student and teacher and their gradients, of a block of tokens.
  const std::uint64_t logits = std::min(unsigned_of(LogitLossInput().block_bytes),
                                        4 * tokens * unsigned_of(config.vocab_size) * kFloat);
  return kept + inference + mixer.workspace + logits;
}

// Windows side by side, through one layer, then a block of logits and its log-softmax.
std::uint64_t evaluation(const ModelConfig& config, std::int64_t context) {
  const std::uint64_t tokens = kWindowsAtOnce * unsigned_of(context);
  const std::uint64_t layer = 6 * unsigned_of(config.model_dim) +
                              2 * unsigned_of(config.query_dim() + 2 * config.key_dim()) +
                              3 * unsigned_of(config.mlp_dim);
  return tokens * layer * kFloat +
         2 * std::min(tokens, kLogitRows) * unsigned_of(config.vocab_size) * kFloat;
}

}  // namespace

MemoryEstimate estimate_memory(const ModelConfig& config, const Stage& stage,
                               const std::vector<ParameterInfo>& parameters,
                               const std::vector<std::size_t>& trained, Mixer& mixer,
                               std::int64_t eval_context) {
  std::uint64_t in_mixers = 0, training = 0, training_backbone = 0;
  for (const ParameterInfo& parameter : parameters)
    if (parameter.module == "mixers") in_mixers += unsigned_of(parameter.numel);
  for (const std::size_t i : trained) {
    training += unsigned_of(parameters[i].numel);
    if (parameters[i].module != "mixers") training_backbone += unsigned_of(parameters[i].numel);
  }
  const std::uint64_t teacher = elements(backbone_parameters(config, {}));
  MemoryEstimate estimate;
  estimate.weights = (teacher + in_mixers + training_backbone) * kFloat;
  if (stage.compute == Compute::bfloat16) estimate.weights += teacher * kFloat / 2;
  estimate.optimizer = training * kFloat * (stage.keep_best ? 4 : 3);
  if (stage.steps > 0) estimate.activations = activations(config, stage, memory_of(mixer, stage));
  if (eval_context > 0) estimate.evaluation = evaluation(config, eval_context);
  estimate.libraries = kLibraries;
  return estimate;
}

std::uint64_t memory_now() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::uint64_t memory_peak() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

std::uint64_t memory_of_machine() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::string bytes_text(std::uint64_t bytes) {
  const double mib = static_cast<double>(bytes) / (1024.0 * 1024.0);
  char text[32];
  if (mib >= 1024) {
    std::snprintf(text, sizeof text, "%.2f GiB", mib / 1024);
  } else {
    std::snprintf(text, sizeof text, "%.0f MiB", mib);
  }
  return text;
}

}  // namespace graft
