#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace graft {

// What a run's metrics.jsonl tells, sorted for whoever shows it.
struct RunMetrics {
  struct Step {
    std::int64_t step = 0, tokens = 0;
    double loss = 0, lr = 0, grad_norm = 0, tokens_per_second = 0;
    double seconds = 0;                       // of training so far
    std::map<std::string, double> parts;      // by objective
    std::map<std::int64_t, double> by_layer;  // of stages that train layer by layer
  };
  struct Stage {
    std::string name;
    std::vector<Step> steps;
  };
  struct Evaluation {
    std::string stage;
    std::int64_t step = 0, tokens = 0;
    double perplexity = 0;
    double agreement = 0, next_token = 0;  // with the teacher; NaN where it was not measured
    double seconds = 0;                    // of training so far
  };
  // Means over held-out text, one value for each head.
  struct Gates {
    std::vector<double> half_life, write_gate;
  };
  struct Sample {
    std::string prompt, teacher, student;
  };

  std::vector<Stage> stages;
  std::vector<Evaluation> evaluations;
  std::map<std::int64_t, Gates> gates;  // by layer, the last that were measured
  std::vector<Sample> samples;
  double written = 0;  // when the last line was, in seconds since 1970
  double seconds = 0;  // of training, until then
};

// FOLDER/metrics.jsonl and, if it is there, FOLDER/samples.json. Lines of a kind that is not known
// are passed over, and so is a last line without an end: the run may be at work. Throws
// Error(input) naming file and line where one is no JSON object or a figure is none.
RunMetrics read_metrics(const std::filesystem::path& folder);

}  // namespace graft
