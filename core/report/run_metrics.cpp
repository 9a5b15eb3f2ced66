#include "core/report/run_metrics.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/json.h"

namespace graft {
namespace {

using nlohmann::json;

// JSON has no NaN or infinity: a figure that was one stands as null.
double number(const json& line, const char* key) {
  const auto at = line.find(key);
  if (at == line.end() || at->is_null()) return std::numeric_limits<double>::quiet_NaN();
  return at->get<double>();
}

std::vector<double> numbers(const json& line, const char* key) {
  std::vector<double> values;
  if (const auto at = line.find(key); at != line.end())
    for (const json& value : *at)
      values.push_back(value.is_null() ? std::numeric_limits<double>::infinity()
                                       : value.get<double>());
  return values;
}

RunMetrics::Step step_of(const json& line) {
  RunMetrics::Step step;
  step.step = line.at("step").get<std::int64_t>();
  step.tokens = line.at("tokens").get<std::int64_t>();
  step.loss = number(line, "loss");
  step.lr = number(line, "lr");
  step.grad_norm = number(line, "grad_norm");
  step.tokens_per_second = number(line, "tok_per_s");
  step.seconds = line.value("seconds", 0.0);
  if (const auto parts = line.find("parts"); parts != line.end())
    for (const auto& [name, value] : parts->items())
      step.parts[name] = value.is_null() ? std::nan("") : value.get<double>();
  if (const auto layers = line.find("layer_loss"); layers != line.end())
    for (const auto& [layer, value] : layers->items())
      step.by_layer[std::stoll(layer)] = value.is_null() ? std::nan("") : value.get<double>();
  return step;
}

void add(RunMetrics& metrics, const json& line) {
  const std::string kind = line.value("kind", ""), stage = line.value("stage", "");
  metrics.seconds = std::max(metrics.seconds, line.value("seconds", 0.0));
  if (kind == "step") {
    const auto index = line.at("stage_index").get<std::size_t>();
    if (index >= 10'000) throw std::out_of_range("stage_index is " + std::to_string(index));
    if (metrics.stages.size() <= index) metrics.stages.resize(index + 1);
    metrics.stages[index].name = stage;
    metrics.stages[index].steps.push_back(step_of(line));
  } else if (kind == "eval") {
    metrics.evaluations.push_back({stage, line.at("step").get<std::int64_t>(),
                                   line.at("tokens").get<std::int64_t>(),
                                   number(line, "perplexity"), number(line, "agreement"),
                                   number(line, "next_token"), line.value("seconds", 0.0)});
  } else if (kind == "gates") {
    metrics.gates.clear();
    for (const auto& [layer, values] : line.at("layers").items())
      metrics.gates[std::stoll(layer)] = {numbers(values, "half_life"),
                                          numbers(values, "write_gate")};
  }
}

double last_written(const std::filesystem::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return 0;
  return static_cast<double>(info.st_mtim.tv_sec) +
         1e-9 * static_cast<double>(info.st_mtim.tv_nsec);
}

// What is wrong with a value of the right syntax, with its place before it.
template <typename Work>
void naming(const std::string& source, Work&& work) {
  try {
    work();
  } catch (const std::exception& e) {
    fail(ErrorKind::input, source + ": not what a run writes there: " + e.what());
  }
}

}  // namespace

RunMetrics read_metrics(const std::filesystem::path& folder) {
  const auto path = folder / "metrics.jsonl", samples = folder / "samples.json";
  const std::string text = read_text(path);
  RunMetrics metrics;
  metrics.written = last_written(path);
  std::size_t number_of_line = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const auto end = rest.find('\n');
    if (end == std::string_view::npos) break;
    const std::string source = quoted_path(path) + ", line " + std::to_string(++number_of_line);
    const json line = parse_json(rest.substr(0, end), source);
    rest.remove_prefix(end + 1);
    naming(source, [&] { add(metrics, line); });
  }
  if (!std::filesystem::exists(samples)) return metrics;
  const json list = read_json(samples);
  naming(quoted_path(samples), [&] {
    for (const json& sample : list)
      metrics.samples.push_back({sample.at("prompt").get<std::string>(),
                                 sample.at("teacher").get<std::string>(),
                                 sample.at("student").get<std::string>()});
  });
  return metrics;
}

}  // namespace graft
